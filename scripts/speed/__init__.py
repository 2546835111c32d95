"""How fast and in how much memory: each script measures, beside a peer where there is one. Run as a module."""
