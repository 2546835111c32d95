"""Convert the checkpoint in tests/data, print the table, and let llama.cpp continue a line of Shakespeare."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bridge.cli import main  # noqa: E402

CHECKPOINT = ROOT / "tests" / "data" / "qwen3-gptq-4bit-g128-sym"
LINE = "GREMIO:\nGood morrow, neighbour Baptista.\n\nBAPTISTA:\n"
TOKENS = 60


def continuation(gguf: Path, prompt: str) -> str:
    """llama.cpp's greedy continuation of the prompt."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_ctx = 512
    params.verbosity = -1
    params.warmup = False
    server = xllamacpp.Server(params)
    answer = server.handle_completions({"prompt": prompt, "max_tokens": TOKENS, "temperature": 0.0})
    return answer["choices"][0]["text"]


if __name__ == "__main__":
    folder = ROOT / "demo"
    folder.mkdir(exist_ok=True)
    gguf = folder / "shakespeare.gguf"
    print(f"$ gguf-bridge convert {CHECKPOINT.relative_to(ROOT)} {gguf.relative_to(ROOT)} --force")
    if code := main(["convert", str(CHECKPOINT), str(gguf), "--force"]):
        sys.exit(code)
    print(f"\nllama.cpp continues with {gguf.relative_to(ROOT)}:\n")
    print(LINE + continuation(gguf, LINE))
