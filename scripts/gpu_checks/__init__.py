"""What scripts/gpu_check.py does, by concern: jobs and their processes, correctness, times, the table."""
