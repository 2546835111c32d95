"""Everything there is to check and to measure on a machine with an NVIDIA GPU, in one go of at most 8 minutes.

    python scripts/gpu_check.py [--json gpu_check.json]

First correctness, in several processes at once, which also compiles what is timed later: products of all types against
float64 (1 to 8 columns, rounded activations and floats, 9 to 64 columns on tensor cores, odd shapes, outputs poisoned
before and guarded behind), epilogues, dequantization, tensors as Python has them, QuantLinear with its gradient and
compiled, trellis codes, and the model in tests/data against the CPU runtime: its captured steps against steps launch
by launch, and launches that begin while others end against launches one after the other; as a transformers model too.
Then times, of replays of CUDA graphs whose weights are rotated beyond the L2 cache: the read bandwidth, products, those
of 16 and 64 columns against dequantizing first, torch's f16 product, tokens of a synthetic 8B model both ways of
launching, and other launch configurations. The table comes last. What there was no time for is listed as not run. Exit
code 1 where a result is wrong or below its bar, or a check or a bar was not run, 2 where nothing could be checked.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

BUDGET = 465.0  # seconds, after which nothing runs but the printing of the table
FOR_CORRECTNESS = 0.6  # of it, at most


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    options.add_argument(
        "--json", type=Path, default=Path("gpu_check.json"), metavar="FILE", help="default: %(default)s"
    )
    options.add_argument("--seconds", type=float, default=BUDGET, help="that all may take, default: %(default)s")
    options.add_argument("--jobs", nargs="+", help=argparse.SUPPRESS)
    begun = time.monotonic()
    a = options.parse_args(arguments)
    if (reason := missing()) is not None:
        print(f"no check: {reason}", file=sys.stderr)
        return 2
    from gpu_checks import jobs, runner

    if a.jobs:
        runner.work(a.jobs, jobs.run)
        return 0
    return check(a.json, begun, a.seconds)


def check(out: Path, begun: float, seconds: float) -> int:
    """All jobs, the table, and the JSON, written anew after each part; `begun` is a time.monotonic()."""
    from gpu_checks import jobs, report, runner

    found: dict[str, Any] = {"machine": machine(), "correctness": {}, "times": {}}
    print(found["machine"], flush=True)

    def show(job: str, result: dict[str, Any]) -> None:
        print(report.shown(job, result), flush=True)

    def save(**more: Any) -> None:
        found.update(seconds=time.monotonic() - begun, **more)
        out.write_text(json.dumps(found, indent=1))

    try:
        save()
    except OSError as problem:
        print(f"no check: {problem}", file=sys.stderr)
        return 2
    save(correctness=runner.at_once(jobs.CORRECT, begun + FOR_CORRECTNESS * seconds, show))
    save(times=runner.in_turn(jobs.TIMES, begun + seconds, show))
    everything = found["correctness"] | found["times"]
    wrong = [line for result in everything.values() for line in result.get("wrong", [])]
    wrong += [f"{job}: {result['failed']}" for job, result in everything.items() if "failed" in result]
    late = [job for job, result in everything.items() if "late" in result]
    table = report.rows(found["times"])
    save(wrong=wrong, not_run=late, table=[row._asdict() for row in table])
    print(report.printed(found, table, wrong), flush=True)
    complete = not found["correctness"].keys() & set(late) and all(row.met for row in table if row.bar)
    return 0 if complete and not wrong else 1


def missing() -> str | None:
    """What stands in the way, in a line."""
    try:
        import torch
        from bridge.cuda.device import require

        import bridge.runtime.model  # noqa: F401  # and what it needs
        from bridge.errors import BridgeError
    except ImportError as problem:
        return f"{problem.name or problem} is missing"
    try:
        require("cuda")
    except BridgeError as problem:
        return str(problem)
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} cannot use the GPU"
    return None


def machine() -> str:
    """The GPU and the versions, in a line."""
    import numba
    import numba_cuda
    import torch
    from bridge.cuda.device import require

    device = require("cuda")
    return (
        f"{device.name}, compute capability {'.'.join(map(str, device.capability))}, {device.multiprocessors} "
        f"multiprocessors; torch {torch.__version__}, numba {numba.__version__}, numba-cuda {numba_cuda.__version__}"
    )


if __name__ == "__main__":
    sys.exit(main())
