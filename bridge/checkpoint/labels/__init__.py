"""What a checkpoint's configs claim about its quantization: config files go in, a QuantConfig comes out.

`quant_config` is the claim, `detect_format` reads it (start there), `schemes` parses compressed-tensors' configs, and
`unlabelled` recognises formats by their tensors where no config tells. `gptq_labels` writes labels.
"""
