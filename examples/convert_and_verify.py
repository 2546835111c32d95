"""Convert a checkpoint, print what it cost, and measure the file on disk: convert_and_verify.py CHECKPOINT OUT.gguf"""

import sys

import bridge

checkpoint, out = sys.argv[1:]
report = bridge.convert(checkpoint, out)
print(report.table())
worst = max((t for t in bridge.verify(out, checkpoint).tensors if t.fidelity), key=lambda t: t.fidelity.nmse)
print(f"largest error on disk: {worst.name}, NMSE {worst.fidelity.nmse:.1e}")
