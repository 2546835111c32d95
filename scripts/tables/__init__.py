"""Tables of the documentation that programs make: each module prints its own, and `tests/test_docs.py` compares them."""
