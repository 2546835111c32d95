"""What scripts and tests measure with: llama.cpp, ggml and transformers on our files."""
