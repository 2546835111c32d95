"""A plan executed: read `executor`, then `gguf_writer`. `report` says what it found, `verify` measures the file."""
