"""The parts of scripts/gpu_check.py: jobs and their processes, correctness, times, the table."""
