"""Commands that read and write files: read `convert` first."""
