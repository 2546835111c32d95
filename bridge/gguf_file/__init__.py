"""The GGUF file and llama.cpp's conventions."""
