"""The GGUF file and the conventions of llama.cpp that reading and writing share.

Read `reader` first: `read_gguf(path)` maps a file, or all shards of one, and returns its metadata and each tensor's
name, type, shape and bytes. `header` checks and decodes; `imatrix` reads and writes importance matrices. The others are
conventions: `pretokenizers` (tokenizer.ggml.pre), `chat_template` (jinja).
"""
