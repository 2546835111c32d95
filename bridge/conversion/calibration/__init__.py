"""Plans whose layers are quantized with a text (`bridge.quantize`). Read `calibrate_plan` first."""
