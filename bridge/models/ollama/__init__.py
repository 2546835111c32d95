"""What Ollama wants beside a GGUF: a Modelfile with its template, made of the chat template."""
