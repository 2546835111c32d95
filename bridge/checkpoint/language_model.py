"""How checkpoints of several parts (images, sound) name the tensors of their language model.

model.language_model.X    model.X, as transformers writes since 4.52
language_model.model.X    model.X, as before; language_model.lm_head is lm_head
"""

# (in the checkpoint, in a language model of its own)
TEXT_PREFIXES = (("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.", ""))
