"""python scripts/convert_on_dask.py PLAN.json OUT.gguf [--scheduler tcp://HOST:8786 | --workers N]

Distributes the shards of one model over the machines of a Dask cluster; the plan (`gguf-bridge plan CHECKPOINT -o
PLAN.json --split-max-size 4G`) defines the shards. Every worker needs this program, and the checkpoint, the plan and
the output's folder under the same paths. If a worker is lost, another one writes its shard. Without --scheduler, N
processes on this machine do the work.

Needs `pip install .[dask]`.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import bridge
from bridge.conversion.planning.plan_reader import load_plan
from bridge.conversion.writing.gguf_writer import shards_of


def write_shard(plan: str, out: str, shard: int, count: int) -> str:
    """Write one shard, replacing what another worker may have left. Returns its path."""
    return str(bridge.convert(out=out, plan=plan, shard=(shard, count), force=True).outputs[0])


def main() -> int:
    parser = argparse.ArgumentParser(description="Distribute the shards of one model over a Dask cluster.")
    parser.add_argument("plan", type=Path, help="written by `gguf-bridge plan --split-max-size SIZE`")
    parser.add_argument("out", type=Path, help="the GGUF; its shards are OUT-00001-of-0000N.gguf")
    parser.add_argument("--scheduler", help="address of a running Dask scheduler, tcp://HOST:8786")
    parser.add_argument("--workers", type=int, default=2, help="processes on this machine, without --scheduler")
    arguments = parser.parse_args()
    from distributed import Client, LocalCluster, as_completed

    plan, out = str(arguments.plan.resolve()), str(arguments.out.resolve())
    count = len(shards_of(load_plan(arguments.plan)[0]))
    cluster = arguments.scheduler or LocalCluster(
        n_workers=arguments.workers, threads_per_worker=1, dashboard_address=None
    )
    with Client(cluster) as client:
        shards = range(1, count + 1)
        futures = client.map(write_shard, [plan] * count, [out] * count, shards, [count] * count, pure=False)
        for future in as_completed(futures):
            print(f"wrote {future.result()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
