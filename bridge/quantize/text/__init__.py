"""Calibration texts as tokens. Read `texts` first, then `mixture`: sources, shares and what is held back."""
