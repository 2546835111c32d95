"""Commands that run a model: read `run` first."""
