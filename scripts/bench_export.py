"""Measure speed and memory of an export, compared with copying the GGUF; print a markdown table.

    python scripts/bench_export.py [--gguf FILE --config DIR] [--rounds 3]

The GGUF is synthetic unless one is given: a Llama of random blocks, 0.35 GB. Exports and copies take turns. A copy
reads the file and writes and syncs its bytes again; an export does so with the checkpoint. Both are processes of their
own whose imports are not counted, nor a first export, which loads the kernels; the page cache is warm. Speeds are bytes
of the GGUF a second, by wall time and by CPU time of all threads. Memory is the largest resident set (ru_maxrss), which
counts mapped pages, less that of the same process before the first export.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
from benchlib import head, line, machine, output_of, parser

from bridge.runtime.bench import random_tensor

HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 2048, 5632, 32, 4, 4096
BYTES = 350_000_000
EXACT = (
    ("Q4_0", "gptq_v2"), ("Q4_0", "compressed-tensors"), ("Q4_0", "mlx"), ("Q4_0", "awq"), ("Q4_0", "hqq"),
    ("Q8_0", "gptq_v2"), ("Q8_0", "compressed-tensors"), ("Q8_0", "mlx"), ("Q8_0", "hqq"),
    ("Q4_1", "mlx"), ("Q5_0", "mlx"), ("Q5_1", "mlx"), ("Q4_K", "mlx"), ("Q4_K", "floats"),
    ("MXFP4", "compressed-tensors"), ("MXFP4", "mlx"), ("NVFP4", "modelopt"), ("NVFP4", "compressed-tensors"),
)  # fmt: skip

EXPORT = """
import json, resource, sys, time
from pathlib import Path
import bridge
from bridge.conversion.export import export
from bridge.encode.block_bytes import unpack_fields
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
export(sys.argv[1], sys.argv[2], sys.argv[3], config=sys.argv[4])
wall, cpu = time.perf_counter(), time.process_time()
done = export(sys.argv[1], sys.argv[2], sys.argv[3], config=sys.argv[4], force=True)
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
hows = sorted({t.how for t in done.tensors if ".layers." in t.name and t.name.endswith("proj.weight")})
print(json.dumps({"wall": wall, "cpu": cpu, "peak": (peak() - before) * 1024, "how": ", ".join(hows)}))
"""

COPY = """
import json, os, sys, time
wall, cpu = time.perf_counter(), time.process_time()
with open(sys.argv[1], "rb") as source, open(sys.argv[2], "wb") as target:
    while piece := source.read(16 << 20):
        target.write(piece)
    target.flush()
    os.fsync(target.fileno())
print(json.dumps({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}))
"""


def main() -> None:
    options = parse()
    print(f"Machine: {machine()}.\n")
    print(head("GGUF", "format", "layers", "of copying, wall", "of copying, CPU", "wall, s", "copy, s", "memory, MB"))
    with tempfile.TemporaryDirectory(prefix="gguf-bridge-export-") as scratch:
        made = ""
        for type, format in EXACT:
            if options.only in (None, format) and options.type in (None, type):
                path, config = options.gguf, options.config
                if path is None:
                    path, config = Path(scratch) / "model.gguf", Path(scratch) / "config"
                    if made != type:
                        write(path, type, options.bytes)
                        made = type
                line(
                    type if options.gguf is None else path.name, format, *measure(path, config, format, options.rounds)
                )


def parse() -> argparse.Namespace:
    options = parser(__doc__, "--rounds")
    options.add_argument("--gguf", type=Path, metavar="FILE", help="default: a synthetic one")
    options.add_argument("--config", type=Path, metavar="DIR", help="config and tokenizer of FILE")
    options.add_argument(
        "--bytes", type=int, default=BYTES, metavar="N", help="of the synthetic one; default: %(default)s"
    )
    options.add_argument("--type", help="of the synthetic one: only this")
    options.add_argument("--only", metavar="FORMAT", help="only this format")
    return options.parse_args()


def measure(path: Path, config: Path, format: str, rounds: int) -> list[str]:
    """The cells of a row."""
    exports, copies = [], []
    with tempfile.TemporaryDirectory(prefix="gguf-bridge-export-") as scratch:
        for i in range(rounds + 1):  # the first compiles
            out, copy = Path(scratch) / f"out-{i}", Path(scratch) / "copy.gguf"
            copies.append(json.loads(output_of(sys.executable, "-c", COPY, path, copy)))
            exports.append(json.loads(output_of(sys.executable, "-c", EXPORT, path, out, format, config)))
            copy.unlink()
            shutil.rmtree(out)
    wall, cpu, copied, copied_cpu = (
        statistics.median(run[key] for run in runs[1:])
        for runs, key in ((exports, "wall"), (exports, "cpu"), (copies, "wall"), (copies, "cpu"))
    )
    peak = max(run["peak"] for run in exports[1:]) / 1e6
    return [
        exports[0]["how"],
        f"{copied / wall:.2f}",
        f"{copied_cpu / cpu:.2f}",
        f"{wall:.2f}",
        f"{copied:.2f}",
        f"{peak:.0f}",
    ]


def write(path: Path, type: str, nbytes: int) -> None:
    """A Llama of random blocks of a type; the embeddings, which are also the head, are F16."""
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER),
    }  # fmt: skip
    made = {shape: random_tensor(type, *shape).raw for shape in set(shapes.values())}
    layers = max(1, nbytes // sum(made[shape].size for shape in shapes.values()))
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    norm = np.ones(HIDDEN, np.float32)
    writer.add_tensor("token_embd.weight", np.zeros((VOCAB, HIDDEN), np.float16))
    writer.add_tensor("output_norm.weight", norm)
    for i in range(layers):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", norm)
        for name, shape in shapes.items():
            raw = made[shape].reshape(shape[0], -1)
            writer.add_tensor(f"blk.{i}.{name}.weight", raw, raw_dtype=gguf.GGMLQuantizationType[type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "vocab_size": VOCAB,
        "intermediate_size": INNER, "num_hidden_layers": layers, "num_attention_heads": HEADS, "rms_norm_eps": 1e-5,
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    }  # fmt: skip
    folder = path.parent / "config"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
