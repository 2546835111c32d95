"""4-bit floats (MXFP4, NVFP4) and three values (TQ1_0, TQ2_0). Read `mxfp4` first."""
