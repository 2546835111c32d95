"""Measure speed and memory of an export, compared with copying the GGUF; print a markdown table.

    python -m scripts.speed.bench_export [--gguf FILE --config DIR] [--rounds 3]

The GGUF is synthetic unless one is given: a Llama of random blocks, 0.35 GB. Each row is of one process, in which
exports and copies take turns after a first export, which loads the kernels; it is printed once it is measured. A copy
reads the file and writes and syncs its bytes again; an export does so with the checkpoint. The page cache is warm.
Speeds are bytes of the GGUF a second, by wall time and by CPU time of all threads. Memory is the largest resident set,
which counts mapped pages, less that of the process before the first export.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np

from bridge.runtime.bench import random_tensor
from scripts.benchlib import Lines, bench, option, output_of
from scripts.make_synthetic import layer_shapes, llama_config

HEADS, KV_HEADS, VOCAB = 32, 4, 4096
OPTIONS = (
    "--rounds", option("--gguf", help="default: a synthetic one"),
    option("--config", Path, "DIR", "config and tokenizer of FILE"),
    option("--bytes", 350_000_000, "N", "of the synthetic one"),
    option("--sizes", (2048, 5632), "N", "hidden and intermediate; 8192 28672 are those of Llama 70B", nargs=2),
    option("--type", help="of the synthetic one: only this"),
    option("--only", metavar="FORMAT", help="only this format"),
)  # fmt: skip
COLUMNS = (
    "GGUF", "format", "layers", "of copying, wall", "of copying, CPU",
    "wall, s", "CPU, s", "copy's CPU, s", "memory, MB",
)  # fmt: skip
CASES = (
    *((type, format) for type in ("Q4_0", "Q8_0") for format in ("compressed-tensors", "gptq", "gptq_v2", "mlx")),
    *(("MXFP4", format) for format in ("compressed-tensors", "mlx")),
    *(("NVFP4", format) for format in ("compressed-tensors", "modelopt", "mlx")),
    *((type, "mlx") for type in ("Q4_1", "Q5_0", "Q5_1", "Q4_K")),
    *((type, "hqq") for type in ("Q4_0", "Q8_0")),
    ("Q4_0", "awq"), ("Q4_K", "floats"),
)  # fmt: skip

TURNS = """
import json, os, resource, shutil, sys, time
from bridge.conversion.checkpoints.export import export
source, folder, format, config, rounds = sys.argv[1:]

def peak():  # KB; ru_maxrss of Linux counts the process that started this one
    try:
        with open("/proc/self/status") as file:
            return next(int(row.split()[1]) for row in file if row.startswith("VmHWM"))
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def copy():
    with open(source, "rb") as file, open(folder + "/copy", "wb") as target:
        while piece := file.read(1 << 20):
            target.write(piece)
        target.flush()
        os.fsync(target.fileno())
    os.unlink(folder + "/copy")

def exported():
    done = export(source, folder + "/out", format, config=config)
    shutil.rmtree(folder + "/out")
    return done

def timed(run):
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu

before = peak()
hows = sorted({t.how for t in exported().tensors if ".layers." in t.name and t.name.endswith("proj.weight")})
found = [(timed(copy), timed(exported)) for _ in range(int(rounds))]
print(json.dumps({"how": ", ".join(hows), "peak": (peak() - before) * 1024, "turns": found}))
"""


def measure(options: argparse.Namespace) -> Lines:
    with tempfile.TemporaryDirectory(prefix="gguf-bridge-export-") as scratch:
        written = ""
        for type, format in CASES:
            if options.only in (None, format) and options.type in (None, type):
                path, config = options.gguf, options.config
                if path is None:
                    path, config = Path(scratch) / "model.gguf", Path(scratch) / "config"
                    if written != type:
                        write(path, type, options.bytes, *options.sizes)
                        written = type
                name = type if options.gguf is None else path.name
                yield name, format, *cells(path, config, format, options.rounds)


def cells(path: Path, config: Path, format: str, rounds: int) -> list[str]:
    """What becomes of the layers, speeds and memory."""
    with tempfile.TemporaryDirectory(prefix="gguf-bridge-export-") as scratch:
        figures = json.loads(output_of(sys.executable, "-c", TURNS, path, scratch, format, config, rounds))
    (copied, copied_cpu), (wall, cpu) = np.median(figures["turns"], 0)
    seconds = (f"{value:.2f}" for value in (wall, cpu, copied_cpu))
    return [figures["how"], f"{copied / wall:.2f}", f"{copied_cpu / cpu:.2f}", *seconds, f"{figures['peak'] / 1e6:.0f}"]


def write(path: Path, type: str, nbytes: int, hidden: int, inner: int) -> None:
    """A Llama of random blocks of a type; the embeddings, which are also the head, are F16."""
    names = "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"
    shapes = dict(zip(names, layer_shapes(hidden, inner, HEADS, KV_HEADS).values(), strict=True))
    blocks = {shape: random_tensor(type, *shape).raw for shape in set(shapes.values())}
    layers = max(1, nbytes // sum(blocks[shape].size for shape in shapes.values()))
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(hidden // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    norm = np.ones(hidden, np.float32)
    writer.add_tensor("token_embd.weight", np.zeros((VOCAB, hidden), np.float16))
    writer.add_tensor("output_norm.weight", norm)
    for i in range(layers):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", norm)
        for name, shape in shapes.items():
            raw = blocks[shape].reshape(shape[0], -1)
            writer.add_tensor(f"blk.{i}.{name}.weight", raw, raw_dtype=gguf.GGMLQuantizationType[type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = llama_config(hidden, inner, HEADS, KV_HEADS, layers, VOCAB) | {"tie_word_embeddings": True}
    folder = path.parent / "config"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure, COLUMNS)
