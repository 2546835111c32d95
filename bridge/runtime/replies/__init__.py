"""From a decoder to text. Read `generation` first, then `batch`: several sequences that share passes over the weights.

drawing                             one reply or a batch, drawn to its end and timed
speculation                         tokens that are guessed, then checked several at a time
chat                                conversations by the GGUF's template
perplexity, continuations, scoring  how likely a model finds given texts
"""
