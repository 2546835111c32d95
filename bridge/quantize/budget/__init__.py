"""A type for each tensor under a size budget: costs (`sensitivity`), the best allocation, and measured trials."""
