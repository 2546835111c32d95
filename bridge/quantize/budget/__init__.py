"""A size budget: which type each tensor gets."""
