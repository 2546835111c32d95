"""Writes checkpoints of quantized layers.

written, registry (in formats/)   what a format's record says, and the list of records; a record is in the module of the
                                  format's reader
block_words                       codes of GGUF blocks as words of a checkpoint, without a byte for each in between
writer, report                    layers in any order to a folder with all other tensors of the model; what was written
"""
