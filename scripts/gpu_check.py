"""Everything there is to check and to measure on a machine with an NVIDIA GPU, in one go of at most 8 minutes.

    python scripts/gpu_check.py [--json gpu_check.json]

First correctness, in several processes at once, which also compiles what is timed later: products of all types
against float64 (1 to 8 columns, rounded activations and floats, odd shapes, outputs poisoned before and guarded
behind), epilogues, dequantization, and the model in tests/data against the CPU runtime, its captured steps against
steps launch by launch. Then times, of replays of CUDA graphs whose weights are rotated beyond the L2 cache: the read
bandwidth, products, torch's f16 product, tokens of a synthetic 8B model, and other launch configurations. The table
comes last. Exit code 1 where a result is wrong, 2 where nothing could be checked.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

BEGUN = time.monotonic()
BUDGET = 440  # seconds, after which nothing new is begun but the table
PROCESSES = max(1, min(12, (os.cpu_count() or 2) - 2))
ALL = ("Q4_K", "Q6_K", "Q8_0", "Q4_0", "Q2_K", "Q3_K", "Q5_K", "Q4_1", "Q5_0", "Q5_1")
BARS = {"Q4_K": 85, "Q6_K": 85, "Q8_0": 85, "Q4_0": 85, "Q2_K": 75, "Q3_K": 75, "Q5_K": 75, "Q4_1": 75}  # % of reading
TRIED = {
    type: (1, 4) if type in ("Q4_K", "Q6_K", "Q8_0") else (1,) for type in BARS
}  # columns, with other configurations
DECODED = 96  # tokens


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    options.add_argument(
        "--json", type=Path, default=Path("gpu_check.json"), metavar="FILE", help="default: %(default)s"
    )
    options.add_argument("--job", help=argparse.SUPPRESS)
    a = options.parse_args()
    if (reason := missing()) is not None:
        print(f"no check: {reason}", file=sys.stderr)
        return 2
    if a.job:
        print("RESULT" + json.dumps(run_job(a.job)))
        return 0
    found: dict[str, Any] = {"machine": machine()}
    print(found["machine"], flush=True)
    found["correctness"] = correctness()
    wrong = [line for job in found["correctness"].values() for line in job["wrong"]]
    found["times"] = times()
    found["seconds"] = time.monotonic() - BEGUN
    a.json.write_text(json.dumps(found, indent=1))
    print_tables(found, wrong)
    return 1 if wrong or found["times"].get("failed") else 0


def missing() -> str | None:
    """What stands in the way, in a line."""
    try:
        import torch
        from bridge.cuda.device import available
    except ImportError as problem:
        return f"{problem.name or problem} is missing"
    if (reason := available()) is not None:
        return reason
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} cannot use the GPU"
    return None


def machine() -> str:
    import numba
    import numba_cuda
    import torch
    from bridge.cuda.device import require

    device = require("cuda")
    return (
        f"{device.name}, compute capability {'.'.join(map(str, device.capability))}, {device.multiprocessors} "
        f"multiprocessors; torch {torch.__version__}, numba {numba.__version__}, numba-cuda {numba_cuda.__version__}"
    )


# --- correctness ---


def correctness() -> dict[str, Any]:
    """Every job in a process of its own; what a process prints when it fails is what is wrong."""
    jobs = ["model", *(f"{type}/alternatives" for type in TRIED)]  # the longest first
    jobs += [f"{type}/{precision}" for precision in ("int8", "f32") for type in ALL]
    with ThreadPoolExecutor(PROCESSES) as pool:
        results = dict(zip(jobs, pool.map(_in_process, jobs), strict=True))
    for job, result in results.items():
        print(f"{job:<17} {'; '.join(result['wrong']) or 'right'}  {result.get('notes', '')}", flush=True)
    return results


def _in_process(job: str) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), "--job", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    except subprocess.TimeoutExpired:
        return {"wrong": [f"{job}: no end after 300 s"]}
    if done.returncode:
        return {"wrong": [f"{job}: exit code {done.returncode}: {' '.join(done.stderr.split())[-1500:]}"]}
    return json.loads(done.stdout.rpartition("RESULT")[2])


def run_job(job: str) -> dict[str, Any]:
    if job == "model":
        return check_model()
    type, _, part = job.partition("/")
    return check_alternatives(type) if part == "alternatives" else check_products(type, part)


def check_products(type: str, precision: str) -> dict[str, Any]:
    """Products, epilogues and dequantization of a type, against float64."""
    import numpy as np
    import torch
    from bridge.cuda import dequantize, matvec
    from bridge.cuda.activations import Records
    from bridge.cuda.device import require, view
    from bridge.cuda.matrix import DeviceMatrix

    from bridge.blocks import BLOCKS
    from bridge.runtime.bench import random_tensor

    device = require("cuda")
    rng = np.random.default_rng()
    wrong: list[str] = []
    worst = 0.0
    shapes = [(1, 256), (3, 512), (129, 1280), (1000, 2304), (2050, 4096)]
    shapes += [] if BLOCKS[type].is_k else [(5, 32), (131, 96)]

    def judge(what: str, y: Any, expected: Any, limit: float) -> None:
        nonlocal worst
        error = float(np.linalg.norm(y - expected) / np.linalg.norm(expected))
        worst = max(worst, error if limit <= 1e-4 else 0)  # halves aside
        if not error < limit:  # NaN is wrong too
            wrong.append(f"{what}: error {error:.2e}")

    for rows, columns in shapes:
        tensor = random_tensor(type, rows, columns)
        weights = tensor.dequantize().astype(np.float64)
        matrix = DeviceMatrix.upload(tensor, device)
        for n in range(1, 9):
            x = rng.standard_normal((n, columns)).astype(np.float32)
            records = Records(columns, n, device, precision)
            records.quantize(torch.from_numpy(x).cuda(), n, device.stream())
            y = torch.full((n + 1, rows), float("nan"), device="cuda")
            matvec.launch(matrix, records, view(y[:n]), n, device.stream())
            result = y.cpu().numpy()
            taken = x.astype(np.float64) if precision == "f32" else rounded(x)
            judge(f"{type} {rows}x{columns}, {n} columns, {precision}", result[:n], taken @ weights.T, 1e-5)
            if not np.isnan(result[n]).all():
                wrong.append(f"{type} {rows}x{columns}, {n} columns, {precision}: written beyond the end")
    # epilogues, on the last of the shapes that are even
    rows, columns = 1000, 2304
    tensor = random_tensor(type, rows, columns)
    weights = tensor.dequantize().astype(np.float64)
    x = rng.standard_normal((1, columns)).astype(np.float32)
    for kind in (torch.float32, torch.float16, torch.bfloat16):
        given = torch.from_numpy(x).cuda().to(kind)
        x = given.float().cpu().numpy()
        records = Records(columns, 1, device, precision).quantize(given, 1, device.stream())
        product = (x.astype(np.float64) if precision == "f32" else rounded(x)) @ weights.T
        bias = torch.randn(rows, device="cuda")
        before = torch.randn((1, rows), device="cuda")
        y = before.clone()
        matrix = DeviceMatrix.upload(tensor, device)
        matvec.launch(matrix, records, view(y), 1, device.stream(), accumulate=True, bias=view(bias))
        expected = product + bias.cpu().numpy() + before.cpu().numpy()
        judge(f"{type} {kind} in, bias and sum", y.cpu().numpy(), expected, 1e-5)
    small = random_tensor(type, rows, columns)
    pair = DeviceMatrix.upload([small, tensor], device, interleave=True)
    y = torch.full((1, rows), float("nan"), device="cuda")
    scaled = 3 / np.abs(product).max()  # so that silu is neither 0 nor the identity
    x = (x * scaled).astype(np.float32)
    records = Records(columns, 1, device, precision).quantize(torch.from_numpy(x).cuda(), 1, device.stream())
    matvec.launch_silu(pair, records, view(y), 1, device.stream())
    product = (x.astype(np.float64) if precision == "f32" else rounded(x)) @ weights.T
    judge(f"{type} silu", y.cpu().numpy(), product / (1 + np.exp(-product)) * product, 1e-4)
    # dequantization
    for dtype, limit in ((torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)):
        out = torch.full((500, columns), float("nan"), dtype=dtype, device="cuda")
        dequantize.tile(matrix, 300, 500, out, device.stream())
        judge(f"{type} tile in {dtype}", out.double().cpu().numpy(), weights[300:800], limit)
    ids = torch.tensor([999, 0, 17], dtype=torch.int32, device="cuda")
    out = torch.full((3, columns), float("nan"), device="cuda")
    dequantize.rows(matrix, view(ids), view(out), 3, device.stream())
    judge(f"{type} rows", out.double().cpu().numpy(), weights[[999, 0, 17]], 1e-6)
    return {"wrong": wrong, "worst": worst, "notes": f"largest relative error {worst:.1e}"}


def check_alternatives(type: str) -> dict[str, Any]:
    """Every configuration that is timed later makes the product that the table's own makes; compiles them too."""
    import torch
    from bridge.cuda import matvec
    from bridge.cuda.activations import Records
    from bridge.cuda.bench import LARGE
    from bridge.cuda.device import require, view
    from bridge.cuda.matrix import DeviceMatrix

    from bridge.runtime.bench import random_tensor

    device = require("cuda")
    rows, columns = 71, LARGE[1]
    matrix = DeviceMatrix.upload(random_tensor(type, rows, columns), device)
    wrong = []
    for n in TRIED[type]:
        records = Records(columns, n, device).quantize(torch.randn((n, columns), device="cuda"), n, device.stream())
        results = []
        for shape in matvec.configurations(matrix, n):
            y = torch.full((n, rows), float("nan"), device="cuda")
            matvec.launch(matrix, records, view(y), n, device.stream(), shape=shape)
            results.append(y.cpu().numpy())
            if not (error := difference(results[-1], results[0])) < 1e-5:
                wrong.append(f"{type}, {n} columns, {shape}: {error:.1e}")
    return {"wrong": wrong}


def rounded(x: Any) -> Any:
    """x in float64 as int8 records hold it: in steps that map the largest of 32 values onto -128."""
    import numpy as np

    blocks = x.reshape(-1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    sign = np.where((blocks == largest).any(-1, keepdims=True), np.float32(-1), np.float32(1))
    codes = np.rint(np.minimum(blocks * (np.float32(128) * sign / largest), np.float32(127)))
    steps = (largest * np.float32(1 / 128) * sign).astype(np.float64)
    return (codes * steps).reshape(x.shape)


def check_model() -> dict[str, Any]:
    """The checkpoint in tests/data: CUDA's logits beside the CPU's; captured steps beside launches by themselves."""
    import numpy as np

    import bridge

    wrong: list[str] = []
    notes = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        bridge.convert(ROOT / "tests" / "data" / "qwen3-gptq-4bit-g128-sym", path)
        for precision, prompt_limit, token_limit in (("f32", 1e-3, 1e-3), ("int8", 5e-2, 5e-2)):
            cpu = bridge.Model.load(path, precision=precision, context=512)
            gpu = bridge.Model.load(path, precision=precision, context=512, device="cuda").prepare()
            tokens = cpu.tokenizer.encode("The history of the city is long, and nobody knows all of it. " * 12)[:200]
            limit = prompt_limit
            for count in (200, 5, 1):
                error = difference(gpu.logits(tokens[:count]), cpu.logits(tokens[:count]))
                notes.append(f"{precision} prompt of {count} {error:.1e}")
                if not error < limit:
                    wrong.append(f"model, {precision}, prompt of {count}: {error:.1e}")
            own, other = gpu._decoder, cpu._decoder
            own.scores(tokens[:150], 1), other.scores(tokens[:150], 1)
            pairs = [(own.next_scores(t), other.logits(other.run([t]))[0]) for t in tokens[150:]]
            error = max(difference(a, b) for a, b in pairs)
            notes.append(f"{precision} tokens {error:.1e}")
            if not error < token_limit:
                wrong.append(f"model, {precision}, tokens after a prompt: {error:.1e}")
            for how in ({}, {"temperature": 0.8, "seed": 1}, {"temperature": 1.0, "top_k": 0, "seed": 2}):
                own.graphs = True
                captured = list(gpu.generate_tokens(tokens[:20], 300, **how))
                own.graphs = False
                if captured != list(gpu.generate_tokens(tokens[:20], 300, **how)):
                    wrong.append(f"model, {precision}, {how}: captured steps make other tokens than launches")
                if captured != list(_again(gpu, own, tokens[:20], how)):
                    wrong.append(f"model, {precision}, {how}: not the same tokens twice")
            if precision == "f32":
                made = list(gpu.generate_tokens(tokens[:20], 60))
                same = int((np.array(made) == np.array(list(cpu.generate_tokens(tokens[:20], 60)))[: len(made)]).sum())
                notes.append(f"{same} of {len(made)} greedy tokens are the CPU's")
    return {"wrong": wrong, "notes": "; ".join(notes)}


def _again(gpu: Any, decoder: Any, tokens: list[int], how: dict[str, Any]) -> Any:
    decoder.graphs = True
    return gpu.generate_tokens(tokens, 300, **how)


def difference(one: Any, other: Any) -> float:
    import numpy as np

    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


# --- times ---


def times() -> dict[str, Any]:
    import torch
    from bridge.cuda.device import require

    device = require("cuda")
    found: dict[str, Any] = {"failed": []}
    with device.active(), torch.cuda.device(device.index):
        steps = (time_reading, time_products, time_decode, time_alternatives)
        for step in steps:
            if time.monotonic() - BEGUN > BUDGET:
                found["failed"].append(f"{step.__name__}: no time was left")
                continue
            begun = time.monotonic()
            try:
                step(device, found)
            except Exception as problem:  # the other steps are still worth having
                found["failed"].append(f"{step.__name__}: {type(problem).__name__}: {problem}")
            print(f"{step.__name__}: {time.monotonic() - begun:.0f} s", flush=True)
            torch.cuda.empty_cache()
    return found


def time_reading(device: Any, found: dict[str, Any]) -> None:
    from bridge.cuda.bench import read_bandwidth

    found["read"] = read_bandwidth(device)
    print(f"reading: {found['read'] / 1e9:.0f} GB/s", flush=True)


def time_products(device: Any, found: dict[str, Any]) -> None:
    from bridge.cuda.bench import LARGE, SMALL, Bench, torch_product

    from bridge.runtime.bench import random_tensor

    found["torch"] = {"x".join(map(str, shape)): torch_product(shape, device) for shape in (LARGE, SMALL)}
    found["products"] = []
    for shape in (LARGE, SMALL):
        for type in ALL:
            own = Bench(random_tensor(type, *shape), device)
            line = {"type": type, "shape": "x".join(map(str, shape)), "nbytes": own.matrix.nbytes}
            line |= {
                "int8": own.product(),
                "int8_4": own.product(4),
                "int8_8": own.product(8),
                "f32": own.product(1, "f32"),
            }
            found["products"].append(line)
            share = line["nbytes"] / line["int8"] / found["read"]
            print(f"{type} {line['shape']}: {1e6 * line['int8']:.1f} us, {share:.1%} of reading", flush=True)
            del own


def time_alternatives(device: Any, found: dict[str, Any]) -> None:
    """Other ways to share the work, for the table in matvec.py: the time of each, the table's own among them."""
    from bridge.cuda.bench import LARGE, SMALL, Bench
    from bridge.cuda.matvec import configurations

    from bridge.runtime.bench import random_tensor

    found["alternatives"] = []
    for type, columns in TRIED.items():
        for shape in (LARGE, SMALL):
            own = Bench(random_tensor(type, *shape), device)
            for n in columns:
                for choice in configurations(own.matrix, n):
                    if time.monotonic() - BEGUN > BUDGET:
                        return
                    line = {"type": type, "shape": "x".join(map(str, shape)), "n": n, "configuration": list(choice)}
                    found["alternatives"].append(line | {"seconds": own.product(n, shape=choice)})


class SyntheticFile:
    """A GGUF of a Llama 3 8B's shape that exists in memory only: every matrix Q4_K, of random codes."""

    HIDDEN, INNER, HEADS, KV_HEADS, LAYERS, VOCAB = 4096, 14336, 32, 8, 32, 128256

    def __init__(self) -> None:
        import numpy as np

        self.path = Path("synthetic-8b")
        self.metadata = {
            "general.architecture": "llama", "llama.block_count": self.LAYERS, "llama.context_length": 8192,
            "llama.embedding_length": self.HIDDEN, "llama.feed_forward_length": self.INNER,
            "llama.attention.head_count": self.HEADS, "llama.attention.head_count_kv": self.KV_HEADS,
            "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 500000.0,
        }  # fmt: skip
        kv = self.HIDDEN // self.HEADS * self.KV_HEADS
        shapes = {
            "attn_q": (self.HIDDEN, self.HIDDEN), "attn_k": (kv, self.HIDDEN), "attn_v": (kv, self.HIDDEN),
            "attn_output": (self.HIDDEN, self.HIDDEN), "ffn_gate": (self.INNER, self.HIDDEN),
            "ffn_up": (self.INNER, self.HIDDEN), "ffn_down": (self.HIDDEN, self.INNER),
        }  # fmt: skip
        self.tensors: dict[str, Any] = {}
        self._made: dict[tuple[int, int], Any] = {}
        for name in ("token_embd", "output"):
            self._add(name, (self.VOCAB, self.HIDDEN))
        for i in range(self.LAYERS):
            for part, shape in shapes.items():
                self._add(f"blk.{i}.{part}", shape)
        norms = [f"blk.{i}.{part}_norm" for i in range(self.LAYERS) for part in ("attn", "ffn")]
        from bridge.runtime.quant_tensor import QuantTensor

        ones = np.ones(self.HIDDEN, np.float32).view(np.uint8)
        for name in [*norms, "output_norm"]:
            self.tensors[f"{name}.weight"] = QuantTensor(f"{name}.weight", "F32", (self.HIDDEN,), ones)
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def _add(self, name: str, shape: tuple[int, int]) -> None:
        """Weights of mean 0 and a deviation of about 0.02; matrices of one shape share their bytes here."""
        import numpy as np

        from bridge.runtime.quant_tensor import QuantTensor

        if shape not in self._made:
            rng = np.random.default_rng(len(self._made))
            raw = rng.integers(0, 256, (shape[0], shape[1] // 256, 144), np.uint8)
            raw[:, :, 0:4] = np.array([1.1e-4, 7.5 * 1.1e-4], np.float16).view(np.uint8)
            self._made[shape] = raw.reshape(-1)
        self.tensors[f"{name}.weight"] = QuantTensor(f"{name}.weight", "Q4_K", shape, self._made[shape])

    def __getitem__(self, name: str) -> Any:
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors


def time_decode(device: Any, found: dict[str, Any]) -> None:
    """Tokens a second one after the other, with the host reading each; and of the captured step alone."""
    import torch
    from bridge.cuda.decoder import Decoder

    from bridge.runtime.decoder_config import read_config
    from bridge.runtime.sampling import Sampler, Sampling

    file: Any = SyntheticFile()
    begun = time.monotonic()
    decoder = Decoder(file, read_config(file.metadata, file.path), 4096, "f16", "int8", str(device))
    decoder.prepare()
    decode: dict[str, Any] = {"file": file.nbytes, "upload": time.monotonic() - begun}
    found["decode"] = decode
    for name, prompt, how in (
        ("greedy", 16, Sampling()),
        ("sampled", 16, Sampling(0.8, seed=1)),
        ("greedy after 3000 tokens", 3000, Sampling()),
    ):
        ids = [(i * 7919) % 100000 for i in range(prompt)]
        stream = decoder.draw(ids, Sampler(how))
        start = time.perf_counter()
        next(stream)
        first = time.perf_counter()
        for _ in range(DECODED):
            next(stream)
        stop = time.perf_counter()
        decode[name] = {"tokens_per_second": DECODED / (stop - first), "prompt_seconds": first - start}
        print(f"decode, {name}: {DECODED / (stop - first):.1f} tokens/s", flush=True)
        stream.close()
    torch.cuda.synchronize()
    decoder._set_state(16, 1)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(DECODED):
        decoder._captured[None].replay()
    end.record()
    end.synchronize()
    decode["step_seconds"] = begin.elapsed_time(end) / 1000 / DECODED
    decode["bound"] = found["read"] / file.nbytes


# --- the tables ---


def print_tables(found: dict[str, Any], wrong: list[str]) -> None:
    t = found["times"]
    print_alternatives(t.get("alternatives", []))
    checked = sum(not job["wrong"] for job in found["correctness"].values())
    print(
        f"\n{found['machine']}. {found['seconds']:.0f} s in all; {checked} of {len(found['correctness'])} jobs right."
    )
    for line in [*wrong, *t["failed"]]:
        print(f"FAILED {line}")
    if "read" in t:
        print(f"Read bandwidth in the same run: {t['read'] / 1e9:.0f} GB/s.\n")
    print("| what | bar | measured | in detail |\n|---|---|---|---|")
    for row in table(t):
        print("| " + " | ".join(row) + " |")


def table(t: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    rows: list[tuple[str, str, str, str]] = []
    if "read" not in t:
        return rows
    lines = {(p["type"], p["shape"]): p for p in t.get("products", [])}
    large = "8192x28672"
    for (type, shape), p in lines.items():
        bar = BARS.get(type) if shape == large else 60 if type == "Q4_K" else None
        share = 100 * p["nbytes"] / p["int8"] / t["read"]
        detail = f"{1e6 * p['int8']:.1f} us; floats {1e6 * p['f32']:.1f} us; torch f16 {1e6 * t['torch'][shape]:.1f} us"
        rows.append((f"{type} matvec, {shape}", f">= {bar}%" if bar else "", f"{share:.1f}% of reading", detail))
    if (p := lines.get(("Q4_K", large))) is not None:
        rows.append(("Q4_K against torch's f16", ">= 3.0x", f"{t['torch'][large] / p['int8']:.2f}x", large))
    for type in ("Q4_K", "Q6_K", "Q8_0"):
        if (p := lines.get((type, large))) is not None:
            four = f"{p['int8_4'] / p['int8']:.2f}x"
            rows.append((f"{type}, batch 4 against 1", "<= 1.3x", four, f"batch 8: {p['int8_8'] / p['int8']:.2f}x"))
    if "bound" in (d := t.get("decode", {})):
        speed = d["greedy"]["tokens_per_second"]
        detail = (
            f"{speed:.1f} tokens/s of {d['bound']:.1f}; step alone {1e3 * d['step_seconds']:.3f} ms; sampled "
            f"{d['sampled']['tokens_per_second']:.1f}; after 3000 tokens "
            f"{d['greedy after 3000 tokens']['tokens_per_second']:.1f}; prompt of 3000 in "
            f"{d['greedy after 3000 tokens']['prompt_seconds']:.2f} s; upload {d['upload']:.0f} s"
        )
        share = 100 * speed / d["bound"]
        rows.append((f"decode, 8B Q4_K, {d['file'] / 1e9:.2f} GB", ">= 60%", f"{share:.1f}% of bandwidth/size", detail))
    return rows


def print_alternatives(lines: list[dict[str, Any]]) -> None:
    """The fastest three of each case beside the table's own, which comes first."""
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        cases.setdefault((line["type"], line["shape"], line["n"]), []).append(line)
    if cases:
        print("\nconfigurations (rows, units, split, warps), us: the table's own; the fastest")
    for case, tried in cases.items():
        best = sorted(tried, key=lambda line: line["seconds"])[:3]
        shown = [f"{line['configuration']} {1e6 * line['seconds']:.1f}" for line in [tried[0], *best]]
        print(f"{' '.join(map(str, case))}: {'; '.join(shown)}")


if __name__ == "__main__":
    sys.exit(main())
