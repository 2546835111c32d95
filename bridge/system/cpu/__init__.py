"""The machine: its CPUs and their instruction sets (`targets`), memory, and threads that work on rows."""
