"""gguf-bridge: GPTQ and AWQ checkpoints become GGUF files without quantizing twice."""
