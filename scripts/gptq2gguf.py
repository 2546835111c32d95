"""python scripts/gptq2gguf.py CHECKPOINT [OUT.gguf]: `gguf-bridge convert`, from a checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bridge.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
