"""The commands: `gguf-bridge --help` lists them, and a command is run, without importing the others."""

# name -> the module of this folder that has it, which has `add_parser` and may have several commands; and the help
COMMANDS = {
    "convert": ("files.convert", "write a checkpoint as a GGUF, carrying its integer codes, or a GGUF in other types"),
    "quantize": ("files.quantize", "quantize a float model with the Hessians of a text, as GGUF or checkpoint"),
    "convert-lora": ("files.convert_lora",
                     "write a PEFT adapter (LoRA) as a GGUF for the file that convert makes of its base"),
    "plan": ("files.plan", "show or write what convert would do, tensor by tensor"),
    "verify": ("files.verify", "measure a GGUF on disk against the checkpoint it was made from"),
    "inspect": ("files.inspect", "describe a checkpoint or a GGUF, and what convert would do"),
    "repack": ("files.repack", "rewrite a GPTQ checkpoint with its zero points stored as v1 or v2"),
    "edit": ("files.edit", "change a GGUF's metadata, chat template and names"),
    "export": ("files.export",
               "write a GGUF as a checkpoint: GPTQ, AWQ, compressed-tensors, MLX, HQQ, ModelOpt or floats"),
    "run": ("use.run", "continue a text, or answer a question, with a GGUF or a checkpoint"),
    "perplexity": ("use.run", "measure how well a GGUF predicts a text"),
    "chat": ("use.chat", "talk with a GGUF or a checkpoint, line by line; /help lists what can be done"),
    "serve": ("use.serve",
              "answer OpenAI's and Ollama's clients over HTTP, with a GGUF or a checkpoint, and serve a page to chat"),
    "bench": ("use.bench", "time products with quantized weights, compared with the memory's own speed"),
    "warmup": ("use.warmup",
               "compile the kernels that a model needs on this CPU, so that its first run does not wait for them"),
    "plot": ("plot", "draw a report, or a benchmark's figures"),
    "cache": ("cache", "list or clear the cache: GGUFs that `run` made from checkpoints, compiled kernels"),
}  # fmt: skip
