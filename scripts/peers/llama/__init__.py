"""llama.cpp and ggml through their C API, by ctypes, and programs made of it. Read `ggml` and `llama_cpp` first."""
