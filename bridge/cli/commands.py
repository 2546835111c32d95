"""The commands: `gguf-bridge --help` lists them, and a command is run, without importing the others."""

# name -> the module of this folder that has it, which has `add_parser` and may have several commands; and the help
COMMANDS = {
    "run": ("use.chat", "answer a prompt, or chat, with a GGUF or a checkpoint"),
    "chat": ("use.chat", "talk with a model, line by line; /help lists what can be done"),
    "serve": ("use.serve", "answer OpenAI's and Ollama's clients, and serve a page to chat"),
    "convert": ("files.convert", "write a checkpoint as a GGUF, or a GGUF in other types"),
    "quantize": ("files.quantize", "round a float model to a GGUF or a checkpoint, on a text"),
    "export": ("files.export", "write a GGUF as a checkpoint: GPTQ, AWQ, MLX, floats, ..."),
    "convert-lora": ("files.convert_lora", "write a PEFT adapter (LoRA) as a GGUF"),
    "repack": ("files.repack", "write a quantized checkpoint in another format, with its codes"),
    "edit": ("files.edit", "change a GGUF's metadata, chat template and names"),
    "inspect": ("files.inspect", "describe a checkpoint or a GGUF, and what convert would do"),
    "plan": ("files.plan", "show or write what convert would do, tensor by tensor"),
    "verify": ("files.verify", "measure how far a GGUF or a checkpoint is from another"),
    "perplexity": ("use.run", "measure how well a GGUF predicts a text"),
    "bench": ("use.bench", "time products with quantized weights"),
    "warmup": ("use.warmup", "compile the kernels that a model needs on this CPU, now"),
    "plot": ("plot", "draw a report, or a benchmark's figures"),
    "cache": ("cache", "list or clear the cache: converted models, compiled kernels"),
    "completion": ("completion", "print what completes this program's options in a shell"),
}
