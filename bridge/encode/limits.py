"""How much error a conversion may add: what `auto` chooses types by, and what `verify` holds them to."""

CARRIED_LIMIT = 0.01  # of the checkpoint's own noise: tensors whose codes are carried
REQUANTIZED_LIMIT = 0.15  # likewise: tensors that must be requantized
FLOAT_LIMIT = 1e-4  # NMSE of tensors that came as floats; Q8_0 has 3e-5
