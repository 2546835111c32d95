"""`python -m bridge.cli`: the command line."""

from bridge.cli import entry_point

entry_point()
