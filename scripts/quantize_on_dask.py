"""python scripts/quantize_on_dask.py MODEL OUT [options of quantize] [--scheduler tcp://HOST:8786 | --workers N]

`gguf-bridge quantize` on the machines of a Dask cluster: workers gather the Hessians of a part of the sequences each,
and quantize a layer each. Every worker needs this program, and the checkpoint and the output's folder under the same
paths. If a worker is lost, others do its tasks. The bytes depend on --parts, not on the number of workers; with --parts
1 they are those of `gguf-bridge quantize`. Without --scheduler, N processes on this machine do the work.

Needs `pip install .[dask,quantize]`.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bridge import cli
from bridge.quantize.run.cluster import Spread


def run_on_cluster(command: str) -> int:
    """Run a command of gguf-bridge with the machines of a cluster; returns its exit code."""
    parser = argparse.ArgumentParser(
        description=f"Run `gguf-bridge {command}` on a Dask cluster; all other arguments are that command's.",
        allow_abbrev=False,
    )
    parser.add_argument("--scheduler", help="address of a running Dask scheduler, tcp://HOST:8786")
    parser.add_argument("--workers", type=int, default=2, help="processes on this machine, without --scheduler")
    parser.add_argument("--parts", type=int, help="of the sequences (default: as many as there are workers)")
    arguments, rest = parser.parse_known_args()
    from distributed import Client, LocalCluster

    cluster = arguments.scheduler or LocalCluster(
        n_workers=arguments.workers, threads_per_worker=1, dashboard_address=None
    )
    with Client(cluster) as client:
        client.wait_for_workers(1)
        workers = sorted(client.scheduler_info(n_workers=-1)["workers"])

        def preferred(part: int) -> dict[str, Any]:
            """The part's worker still has its sequences' passes; another one has to make them anew."""
            return {"workers": workers[part % len(workers)], "allow_other_workers": True}

        return cli.main([command, *rest], spread=Spread(client, arguments.parts or len(workers), preferred))


if __name__ == "__main__":
    sys.exit(run_on_cluster("quantize"))
