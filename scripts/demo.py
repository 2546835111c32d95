"""Convert the checkpoint in tests/data, print the table, and let llama.cpp continue a line of Shakespeare."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bridge.cli import main  # noqa: E402
from scripts.peers.llama.llama_cpp import LlamaCpp  # noqa: E402

CHECKPOINT = ROOT / "tests" / "data" / "qwen3-gptq-4bit-g128-sym"
LINE = "GREMIO:\nGood morrow, neighbour Baptista.\n\nBAPTISTA:\n"
TOKENS = 60


if __name__ == "__main__":
    folder = ROOT / "demo"
    folder.mkdir(exist_ok=True)
    gguf = folder / "shakespeare.gguf"
    print(f"$ gguf-bridge convert {CHECKPOINT.relative_to(ROOT)} {gguf.relative_to(ROOT)} --force")
    if code := main(["convert", str(CHECKPOINT), str(gguf), "--force"]):
        sys.exit(code)
    print(f"\nllama.cpp continues with {gguf.relative_to(ROOT)}:\n")
    with LlamaCpp(gguf, float_kv=False) as model:
        print(LINE + model.detokenize(model.generate_greedy(model.tokenize(LINE, add_special=True), TOKENS)))
