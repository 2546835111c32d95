"""Tables of the pages that programs make: each module prints its own; `tests/test_docs.py` compares the pages."""
