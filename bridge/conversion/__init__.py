"""Checkpoint in, GGUF out: plan, executor, writer, report, verify."""
