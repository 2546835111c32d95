"""What a decoder runs on: its tensors, found and checked, and what it keeps of the tokens so far.

Read `layers` first, then `weights` and `layer_reader`, which fill it; `kv_cache` and `recurrent_state` hold a sequence.
"""
