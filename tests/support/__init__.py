"""What the tests and the measuring scripts share: llama.cpp itself, and a model in transformers."""
