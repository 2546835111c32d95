"""Other programs on our files, and we on theirs. Run as a module."""
