"""What a checkpoint's configs claim about its quantization: config files are parsed into a QuantConfig.

`quant_config` defines the claim, `detect_format` reads it (start there), `schemes` parses compressed-tensors' configs,
and `unlabelled` recognises formats by their tensors if no config names them.
"""
