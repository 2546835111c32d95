"""Attention over a cache on the device. Read `kv_cache` first, then `attention` and `attention_shape`.

attention_vectors, attention_tile, attention_mma, attention_spans    what a block of threads does, in order
prompt_attention                                                     many tokens at once
"""
