"""GGUF files in transformers with this project's products: packed weights on a CPU and on CUDA.

    import bridge.transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder_or_hub_id, gguf_file="model.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder_or_hub_id, gguf_file="model.gguf")

The import registers the loader; `bridge.nn` has what it does in parts. PackedConfig("f32") as quantization_config
computes with float32 activations.
"""

from bridge.nn.gguf_quantizer import PackedConfig, register_gguf

__all__ = ["PackedConfig"]

register_gguf()
