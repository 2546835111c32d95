"""How close files are to their models: divergence, errors of layers, what conversions cost. Run as a module."""
