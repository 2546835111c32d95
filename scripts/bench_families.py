"""Compare the speed of families in this runtime with llama.cpp; print a markdown table.

    python scripts/bench_families.py                       all of the shapes below
    python scripts/bench_families.py lfm2 gemma4 --turns 5
    python scripts/bench_families.py lfm2 --draft         replies with guessed tokens, compared with those without

Each model has the layers of a published one, fewer of them, with random weights in Q4_K (Q8_0 and MXFP4 where a row is
no multiple of 256); mixtures whose layers are large have fewer experts. The peer is the llama.cpp of the tests'
xllamacpp wheel, which on x86 is built for AVX2. Ours and theirs take turns, one process per turn with one thread, and
the times are those that the processor spent on it, so that other load on the machine matters little. Every process
makes 32 tokens one by one after 8, with our weights all repacked, and reads 256 from an empty context. The table shows
the medians of the turns, and the median ratio of a turn of ours to the following turn of theirs.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from benchlib import ROOT, head, line, machine, parser
from benchlib.drafts import print_drafts
from benchlib.speeds import OURS, WHEEL, turn

BEGIN = """
import json, sys, time
path, threads = sys.argv[1], int(sys.argv[2])
tokens = [(i * 7919) % 4000 for i in range(256)]
"""
REPORT = """
prompt()
start = time.process_time()
prompt()
read = 256 / (time.process_time() - start)
prepare()
list(generate(9))
made = generate(33)
next(made)
start = time.process_time()
list(made)
print("RESULT" + json.dumps({"prompt": read, "decode": 32 / (time.process_time() - start)}))
"""
TEXT: dict[str, Any] = {
    "vocab_size": 32768, "max_position_embeddings": 4096, "tie_word_embeddings": False, "bos_token_id": None,
    "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
# family -> the published model, its class of configuration in transformers, and its fields
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lfm2": ("LFM2 1.2B", "Lfm2Config", {
        "hidden_size": 2048, "intermediate_size": 8192, "block_auto_adjust_ff_dim": False, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_hidden_layers": 6,
        "layer_types": ["conv", "conv", "full_attention", "conv", "conv", "full_attention"]}),
    "qwen3.5": ("Qwen3.5 2B", "Qwen3_5TextConfig", {
        "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 256, "num_hidden_layers": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128}),
    "granite-4": ("Granite 4 H tiny", "GraniteMoeHybridConfig", {
        "hidden_size": 1536, "intermediate_size": 512, "shared_intermediate_size": 1024, "num_local_experts": 64,
        "num_experts_per_tok": 6, "num_attention_heads": 12, "num_key_value_heads": 4, "num_hidden_layers": 4,
        "layer_types": ["mamba", "mamba", "attention", "mamba"], "mamba_n_heads": 48, "mamba_d_head": 64,
        "mamba_d_state": 128, "mamba_n_groups": 1}),
    "gpt-oss": ("gpt-oss 20B", "GptOssConfig", {
        "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 2}),
    "glm4-moe-lite": ("GLM-4.7 Flash", "Glm4MoeLiteConfig", {
        "hidden_size": 2048, "intermediate_size": 10240, "moe_intermediate_size": 1536, "n_routed_experts": 64,
        "num_experts_per_tok": 4, "num_attention_heads": 20, "num_key_value_heads": 20, "num_hidden_layers": 3,
        "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "first_k_dense_replace": 1}),
    "gemma4": ("Gemma 4 E2B", "Gemma4TextConfig", {
        "hidden_size": 1536, "intermediate_size": 6144, "num_attention_heads": 8, "num_key_value_heads": 1,
        "head_dim": 256, "num_hidden_layers": 10, "num_kv_shared_layers": 5, "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 32768, "use_double_wide_mlp": True, "sliding_window": 512,
        "tie_word_embeddings": True, "final_logit_softcapping": 30.0,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
        "per_layer_config": {"4": {"head_dim": 512}, "9": {"head_dim": 512}}}),
    "falcon-h1": ("Falcon-H1 1.5B", "FalconH1Config", {
        "hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 128, "num_hidden_layers": 5, "mamba_d_ssm": 3072, "mamba_n_heads": 48, "mamba_d_head": 64,
        "mamba_d_state": 256, "mamba_n_groups": 1}),
    "mamba2": ("Mamba-Codestral 7B", "Mamba2Config", {
        "hidden_size": 4096, "num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8,
        "num_hidden_layers": 3}),
    "jamba": ("Jamba Reasoning 3B", "JambaConfig", {
        "hidden_size": 2560, "intermediate_size": 8192, "num_attention_heads": 20, "num_key_value_heads": 1,
        "num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 1,
        "num_experts_per_tok": 1, "mamba_d_state": 16, "mamba_dt_rank": 160}),
    "gemma3n": ("Gemma 3n E2B", "Gemma3nTextConfig", {
        "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 256, "num_hidden_layers": 5, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 32768, "laurel_rank": 64, "sliding_window": 512, "tie_word_embeddings": True,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "activation_sparsity_pattern": [0.95] * 5}),
    "nemotron-h": ("Nemotron-H 4B", "NemotronHConfig", {
        "hidden_size": 3072, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "ssm_state_size": 128, "mamba_num_heads": 112, "mamba_head_dim": 64, "n_groups": 8,
        "layers_block_type": ["mamba", "mlp", "mamba", "mlp", "attention", "mlp"]}),
    "deepseek3": ("DeepSeek V3 (8 experts)", "DeepseekV3Config", {
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 8,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_attention_heads": 128,
        "num_key_value_heads": 128, "num_hidden_layers": 1, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 0}),
    "glm4-moe": ("GLM-4.5 Air (16 experts)", "Glm4MoeConfig", {
        "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 16,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_attention_heads": 96,
        "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 2, "attention_bias": True,
        "first_k_dense_replace": 1}),
    "qwen3-next": ("Qwen3-Next 80B (32 experts)", "Qwen3NextConfig", {
        "hidden_size": 2048, "intermediate_size": 5120, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "num_hidden_layers": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 32, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}),
    "apertus": ("Apertus 8B", "ApertusConfig", {
        "hidden_size": 4096, "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 2}),
    "minimax-m2": ("MiniMax M2 (16 experts)", "MiniMaxM2Config", {
        "hidden_size": 3072, "intermediate_size": 1536, "num_local_experts": 16, "num_experts_per_tok": 8,
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64,
        "num_hidden_layers": 2}),
    "phimoe": ("Phi-3.5-MoE (4 experts)", "PhimoeConfig", {
        "hidden_size": 4096, "intermediate_size": 6400, "num_local_experts": 4, "num_experts_per_tok": 2,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 2, "attention_bias": True,
        "lm_head_bias": True, "sliding_window": None}),
}  # fmt: skip
_KEPT = ("per_layer_model_proj", "attn_k_b", "attn_v_b", "ffn_gate_inp")  # floats in published files
_DRAWN = 512  # rows of a matrix; the others repeat them


def main() -> None:
    options = parse()
    print(f"Machine: {machine()}.\n")
    sides = {"ours": BEGIN + OURS + REPORT, "theirs": BEGIN + WHEEL + REPORT}
    if not options.draft:
        print(head("layers of", "what", "gguf-bridge", "llama.cpp", "ratio"), flush=True)
    for family in options.families or SHAPES:
        with tempfile.TemporaryDirectory(prefix="gguf-bridge-bench-") as scratch:
            path = made(family, Path(scratch))
            if options.draft:
                print(f"\nLayers of {SHAPES[family][0]}:\n")
                print_drafts(path, "ngram", None, [1], options.turns)
                continue
            turn(sys.executable, sides["ours"], path, 1)  # compile what is not compiled yet; fill the page cache
            found = [[turn(sys.executable, code, path, 1) for code in sides.values()] for _ in range(options.turns)]
        for what in ("decode", "prompt"):
            ratio = statistics.median(ours[what] / theirs[what] for ours, theirs in found)
            medians = [f"{statistics.median(pair[side][what] for pair in found):.1f} tokens/s" for side in (0, 1)]
            line(SHAPES[family][0], what, *medians, f"{ratio:.2f}")


def parse() -> argparse.Namespace:
    options = parser(__doc__, "--turns")
    options.add_argument("--draft", action="store_true", help="measure guessed tokens (ngram), as bench_model.py does")
    options.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(SHAPES)}; default: all")
    return options.parse_args()


def made(family: str, scratch: Path) -> Path:
    """A GGUF in the shape of a family's published model."""
    import torch
    import transformers

    import bridge
    from scripts.peers.gguf_file import rewrite

    _, kind, fields = SHAPES[family]
    config = getattr(transformers, kind)(**TEXT | fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or parameter.numel() < 1 << 20:
                parameter.normal_(1 if parameter.ndim == 1 else 0, 0.1)
            else:
                parameter.zero_()  # memory that nobody wrote may hold numbers that are none
    config.architectures = [type(model).__name__]
    model.save_pretrained(scratch / "model", save_original_format=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(ROOT / "tests/data/qwen3-gptq-4bit-g128-sym" / file, scratch / "model" / file)
    bridge.convert(scratch / "model", scratch / "floats.gguf", tensor_types=[(".*", "F16")])
    shutil.rmtree(scratch / "model")
    rewrite(scratch / "floats.gguf", scratch / "blocks.gguf", _type, _random)
    (scratch / "floats.gguf").unlink()
    return scratch / "blocks.gguf"


def _type(tensor: gguf.ReaderTensor) -> str:
    now = str(tensor.tensor_type.name)
    columns = int(tensor.shape[0])
    if now != "F16" or any(part in tensor.name for part in _KEPT) or columns % 32:
        return now
    if columns % 256:
        return "MXFP4" if "_exps" in tensor.name else "Q8_0"
    return "Q6_K" if tensor.name == "output.weight" else "Q4_K"


def _random(tensor: gguf.ReaderTensor, type: str) -> np.ndarray:
    """Weights whose products are as large as what they multiply: a state of tiny numbers would be slow."""
    from bridge.blocks.read import READ
    from bridge.encode.round_rows import quantize_rows
    from bridge.runtime.bench import random_tensor

    columns, *rows = (int(n) for n in tensor.shape)
    count = int(np.prod(rows))
    if READ[type].scales:
        return random_tensor(type, count, columns).raw
    drawn = np.random.default_rng(0).normal(0, columns**-0.5, (min(count, _DRAWN), columns)).astype(np.float32)
    data = quantize_rows(drawn, READ[type]).data
    return np.resize(data, (count, data.shape[1])).reshape(-1)


if __name__ == "__main__":
    main()
