"""Blocks of 32 integers (Q2_0: 64, Q1_0: 128) with one scale, and for Q4_1 and Q5_1 a minimum. Read `q4_0` first."""
