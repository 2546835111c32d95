"""Looks for damage in the weights of a checkpoint or a GGUF: read `check` first."""
