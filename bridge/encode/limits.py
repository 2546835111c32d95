"""How much error a conversion may add: `auto` chooses types and `verify` checks them by these limits."""

CARRIED_LIMIT = 0.01  # of the checkpoint's own noise: tensors whose codes are carried
REQUANTIZED_LIMIT = 0.15  # of tensors that must be requantized
FLOAT_LIMIT = 1e-4  # NMSE of tensors that were floats; Q8_0 has 3e-5
