"""What a decoder does between its products, as C functions. Read `program` first, the table that calls them.

passes                                products of several tokens, by the kernels of engines/
decoder_ops                           look up, normalize, activate
attention, latent_attention           over the cache of keys and values
expert_ops, recurrent_ops, stream_ops mixtures of experts, layers with a state, several streams of activations
"""
