"""Attention over a cache on the device. Read `kv_cache` and `attention_kind` first, then `attention` and
`attention_shape`.

attention_vectors, attention_tile, attention_mma, attention_spans    what a block of threads does, in order
latent_attention, latent_heads, latent_spans                         the same of latent vectors
step_attention                                                       the launches of one token, layer by layer
prompt_attention                                                     many tokens at once
"""
