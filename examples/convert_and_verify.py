"""Convert a checkpoint, print what it cost, and measure the file on disk: convert_and_verify.py CHECKPOINT OUT.gguf"""

import sys

import bridge

checkpoint, out = sys.argv[1:]
report = bridge.convert(checkpoint, out)
print(report.table())
nmse, name = max((t.fidelity.nmse, t.name) for t in bridge.verify(out, checkpoint).tensors if t.fidelity)
print(f"largest error on disk: {name}, NMSE {nmse:.1e}")
