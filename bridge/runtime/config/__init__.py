"""What a GGUF's metadata says of a decoder: read `decoder_config`, the result, then `config_reader`."""
