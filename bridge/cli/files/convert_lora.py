"""`gguf-bridge convert-lora`."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from bridge.cli.options import CHECKPOINT, command
from bridge.system.progress import say

_DESCRIPTION = """\
Write a PEFT adapter (LoRA) as a GGUF for the file that convert makes of its base
checkpoint, which may be quantized: rows and columns are in that file's order. llama.cpp
applies changes of matrices only: DoRA, norms and added tokens are refused, and so are tied
embeddings; convert --merge merges such an adapter into its base.
"""


def add_parser(commands: Any) -> None:
    p = command(commands, "convert-lora", run, _DESCRIPTION)
    p.add_argument("adapter", help="folder with adapter_config.json and adapter_model.safetensors")
    p.add_argument("out", type=Path, help="GGUF to write")
    p.add_argument("--base", required=True, metavar="CKPT", help=f"the adapter's base model: {CHECKPOINT}")
    p.add_argument("--config", metavar="DIR", type=Path, help="config.json and tokenizer, for a base without them")
    p.add_argument("--template", metavar="MODEL.gguf", help="the template of convert, for architectures unknown here")
    p.add_argument("--force", action="store_true", help="replace a file that exists")


def run(a: argparse.Namespace) -> int:
    say(f"reading {a.adapter}")
    from bridge.conversion.lora import convert_lora

    changed = convert_lora(a.adapter, a.out, base=a.base, config=a.config, template=a.template, force=a.force)
    file = shlex.quote(str(a.out))
    print(f"{a.out}: changes {len(changed)} tensors")
    print(f"next:\n  llama-cli -m MODEL.gguf --lora {file}")
    return 0
