"""Threads that run C functions over chunks of rows. Read `pool` first."""
