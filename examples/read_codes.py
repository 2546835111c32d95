"""Print what a checkpoint holds, module by module: read_codes.py CHECKPOINT"""

import sys

import bridge

with bridge.open_checkpoint(sys.argv[1]) as checkpoint:
    for name in checkpoint.modules:
        layer = checkpoint.read_module(name)
        codes = layer.codes
        print(f"{name}: codes {codes.shape}, {codes.min()} to {codes.max()}, scales {layer.scales.shape}")
