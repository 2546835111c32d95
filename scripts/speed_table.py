"""The README's table of speeds, from docs/measured/speed.json.

    python -m scripts.speed.bench_model gemma3-270m --threads 2 --turns 5 --prompts 512 8192 --depths 8 8000 \\
        --together 8 --start --json docs/measured/speed.json
    python -m scripts.speed_table
"""

import json
from pathlib import Path

HEAD = "| 2 threads | gguf-bridge | llama.cpp | ratio |"
MODEL, THREADS = "gemma3-270m", 2
# what bench_model calls a measurement -> what the table calls it
ROWS = {
    "decode after 8 tokens": "decode",
    "decode after 8000 tokens": "decode after 8,000 tokens",
    "prompt, 512 tokens": "prompt, 512 tokens",
    "prompt, 8192 tokens": "prompt, 8,192 tokens",
    "8 sequences at once": "eight sequences at once",
    "start to first token": "start to first token",
}


def rows(record: dict) -> list[str]:
    """The lines of the table that follow its head, of a record that bench_model wrote."""
    measured = {row["what"]: row for row in record["rows"] if (row["model"], row["threads"]) == (MODEL, THREADS)}
    lines = []
    for what, name in ROWS.items():
        row = measured[what]
        values = [f"{row[side]:{'.2f' if row['unit'] == 's' else ',.0f'}} {row['unit']}" for side in ("ours", "theirs")]
        lines.append(f"| {name} | {' | '.join(values)} | {row['ratio']:.2f} |")
    return lines


def main() -> None:
    record = json.loads((Path(__file__).parents[1] / "docs/measured/speed.json").read_text(encoding="utf-8"))
    print(HEAD, "|---|---|---|---|", *rows(record), sep="\n")


if __name__ == "__main__":
    main()
