"""What a checkpoint's configs claim about its quantization, and how a format is recognised."""
