"""python scripts/repack_on_dask.py SOURCE OUT [options of repack] [--scheduler tcp://HOST:8786 | --workers N]

`gguf-bridge repack` on the machines of a Dask cluster: workers plan the layers and write them into the files of one
folder, the others' tensors are copied here. Every worker needs this program, and the source and the new folder under
the same paths. If a worker is lost, others do its layers. The files are byte for byte those of `gguf-bridge repack`.
Without --scheduler, N processes on this machine do the work.

Needs `pip install .[dask]`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.quantize_on_dask import run_on_cluster

if __name__ == "__main__":
    sys.exit(run_on_cluster("repack"))
