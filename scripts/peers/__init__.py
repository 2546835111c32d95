"""Other programs that scripts and tests compare with: llama.cpp, ggml and transformers on our files."""
