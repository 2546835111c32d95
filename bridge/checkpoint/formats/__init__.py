"""One reader a format: packed tensors in, CodedTensor out."""
