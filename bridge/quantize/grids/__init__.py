"""Grids that codes are rounded onto."""
