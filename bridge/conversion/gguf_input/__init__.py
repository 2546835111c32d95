"""A GGUF in the place of a checkpoint: read `gguf_checkpoint` first."""
