"""What every family makes of a small model, held against tests/data/families.txt.

A case there is a title, what its config.json has beside CONFIG, and then `listing`, line by line. A new case needs the
names of its tensors in any listing; the failing test shows the whole of what it should have been.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import BridgeError
from bridge.gguf_file.architectures import ARCHITECTURES
from bridge.models import describe_model
from bridge.models.families import ALL
from bridge.models.outline import Outline, OutlineTensor, Part
from scripts.tables import model_table
from tests.conftest import CHECKPOINT, ROOT
from tests.support.encoder_models import ENCODERS
from tests.support.make_families import GOLDENS

CONFIG: dict[str, Any] = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "vocab_size": 2048,
}  # fmt: skip
TENSOR_NAME = re.compile(r"\b(?:model|lm_head)\.[\w.]*(?:weight|bias|inv_freq|layer_scalar|experts\.[a-z]\w+)\b")
FULL = {"rope_type": "default", "rope_theta": 500000.0}
HALF = FULL | {"partial_rotary_factor": 0.5}
LOCAL_LINEAR = {"full_attention": FULL, "sliding_attention": FULL | {"rope_type": "linear", "factor": 8.0}}
LLAMA3 = FULL | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64}  # fmt: skip
YARN = FULL | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
TWO_BASES = {"full_attention": FULL, "sliding_attention": FULL | {"rope_theta": 10000.0}}
CASES = [
    (title, json.loads(config), lines)
    for title, config, *lines in (
        case.splitlines() for case in (ROOT / "tests/data/families.txt").read_text(encoding="utf-8").split("\n\n")
    )
]


def listing(outline: Outline, names: Sequence[str]) -> list[str]:
    """Everything but the general and the tokenizer's keys, a line each."""
    arch = outline.metadata["general.architecture"].value
    keys = [f"{key} = {v.value!r}" for key, v in outline.metadata.items() if key.startswith(f"{arch}.")]
    named = {part.source for tensor in outline.tensors for part in tensor.parts}
    left = [
        *(f"unused {name}" for name in outline.unused),
        *(f"must be zero {name}" for name in outline.zero_only),
        *(f"dropped {name}" for name in sorted({*names} - named - {*outline.unused, *outline.zero_only})),
    ]
    folds = [f"{fold.consumer} folds into {' and '.join(fold.producers)}" for fold in outline.folds]
    return [
        *(f"note {note}" for note in outline.notes), *keys, *left, *folds,
        *(tensor_line(tensor, outline) for tensor in outline.tensors),
    ]  # fmt: skip


def tensor_line(tensor: OutlineTensor, outline: Outline) -> str:
    line = f"{tensor.name} {'x'.join(map(str, tensor.shape))} {tensor.fixed_type or '-'}"
    if tensor.data is not None:
        return f"{line} = {' '.join(f'{value:g}' for value in tensor.data)}"
    optional = " if not zero" if tensor.source in outline.optional else ""
    return f"{line} <- {' + '.join(map(part_text, tensor.parts))}{optional}"


def part_text(part: Part) -> str:
    matrix = f"[{part.matrix}]" if part.matrix is not None else ""
    rows = f" rows {','.join(map(str, part.rows))}" if part.rows is not None else ""
    return part.source + matrix + rows + (f" of {part.stored[0]}" if part.stored else "")


@pytest.mark.parametrize(("title", "config", "lines"), CASES, ids=[title for title, *_ in CASES])
def test_a_familys_model_is_planned_as_it_was(
    title: str, config: dict[str, Any], lines: list[str], tmp_path: Path
) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(CHECKPOINT / file, tmp_path / file)
    names = sorted({*TENSOR_NAME.findall("\n".join(lines))})
    values = {key: value for key, value in (CONFIG | config).items() if value is not None}
    assert listing(describe_model(values, tmp_path, names), names) == lines


def test_every_family_has_a_case() -> None:
    """Here, among those of llama.cpp's converter, or among those held against transformers."""
    known = {name for _, config, _ in CASES for name in config.get("architectures") or [config["model_type"]]}
    known |= {encoder.model for encoder in ENCODERS.values()}
    for golden in GOLDENS.glob("*.json"):
        known |= {*json.loads(golden.read_text())["config"]["architectures"]}
    assert not [family.arch for family in ALL if not known & {*family.architectures, family.model_type}]


def test_the_docs_list_every_family_and_tell_where_it_runs() -> None:
    """A name of docs/checkpoints.md's table for each of `Family.titles`, in the row of what its GGUF is good for."""
    rows = [line.strip("| ").split(" | ") for line in model_table.rows()]
    listed = {title: use for use, titles in rows for title in titles.split(", ")}
    assert [*sorted(listed)] == sorted(title for family in ALL for title in family.titles)
    for family in ALL:
        graph = ARCHITECTURES.get(family.arch)
        use = model_table.DRAFTS if family.drafter else model_table.ELSEWHERE if graph is None else None
        assert {listed[title] for title in family.titles} <= ({use} if use else {model_table.TEXT, model_table.VECTORS})
    page = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8")
    assert "\n".join([model_table.HEAD, "|---|---|", *model_table.rows()]) in page


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        (
            "exaone4",
            {"sliding_window": 32},
            "sliding_window is 32 with 2 layers; llama.cpp has a window in EXAONE 4's model of",
        ),
        (
            "gemma3",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention is True; llama.cpp's graph",
        ),
        ("gemma3", {"rope_parameters": LOCAL_LINEAR}, "rope of type 'linear' in layers with a window; llama.cpp has"),
        (
            "olmo3",
            {"rope_parameters": TWO_BASES},
            "rotate by rope_theta 10000, the others by 500000; llama.cpp",
        ),
        ("mellum2", {"rope_parameters": TWO_BASES}, "rotate by rope_theta 10000, the others by 500000; llama.cpp"),
        ("mellum2", {"mlp_layer_types": ["dense", *3 * ["sparse"]]}, "llama.cpp has experts in all layers"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("olmoe", {"num_key_value_heads": 2}, "4 heads of 8 elements, 2 of keys, in a hidden_size of 32"),
        ("youtu", {"rope_interleave": False}, "rope_interleave is False"),
        ("afmoe", {"layer_types": 4 * ["sliding_attention"]}, "layers other than every fourth attend to everything"),
        ("afmoe", {"mup_enabled": False}, "mup_enabled is False"),
        ("minicpm", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("minicpm", {"num_experts": 8}, "num_experts is 8; llama.cpp's converter knows no experts"),
        ("arcee", {"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ("arcee", {"mlp_bias": True}, "mlp_bias is True"),
        ("jais2", {"attention_bias": False}, "attention_bias is False; .* has biases throughout"),
        *(
            (name, {"rope_parameters": LLAMA3}, "rope of type 'llama3' divides frequencies; .* reads no divisors")
            for name in ("cohere2", "hy3", "jais2", "ling2", "smollm3", "youtu")
        ),
        *(
            (
                name,
                {"rope_parameters": {"full_attention": LLAMA3, "sliding_attention": FULL | {"rope_theta": 10000.0}}},
                "rope of type 'llama3' divides frequencies; .* reads no divisors",
            )
            for name in ("laguna", "mimo2")
        ),
        ("granite-swa", {"layer_rope_theta": [0, 5.0, 7.0, 7.0]}, "layer_rope_theta is .*; llama.cpp has one for all"),
        ("granite-swa", {"layer_rope_theta": [1.0]}, "must have a number for each of 4 layers"),
        ("olmo3", {"layer_types": ["full_attention"]}, "must be full or sliding, for every layer"),
        ("qwen3.5", {"linear_num_key_heads": 3}, "4 value heads cannot share 3 key heads"),
        ("ministral3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "reads Ministral 3 with yarn"),
        ("lfm2", {"layer_types": ["conv"]}, "must name the kind of each of 3 layers"),
        ("lfm2", {"layer_types": 3 * ["conv"]}, "conv.in_proj.weight is missing"),
        ("lfm2-moe", {"use_expert_bias": False}, "use_expert_bias is False"),
        ("ernie4.5-moe", {"moe_layer_end_index": 1}, "experts in the last layer too"),
        ("ernie4.5-moe", {"moe_layer_interval": 2}, "moe_layer_interval is 2"),
        ("exaone-moe", {"sliding_window": None}, "sliding_window is None, and no layer has a window"),
        ("exaone-moe", {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}, "must be dense, then sparse"),
        ("cohere2", {"layer_types": 5 * ["full_attention"]}, "sliding_window is 32, and no layer has a window"),
        ("cohere2-moe", {"shared_expert_combination_strategy": "sum"}, "combination_strategy is 'sum'"),
        (
            "cohere2-moe",
            {"prefix_dense_sliding_window_pattern": 2},
            "a dense layer without a window is not rotated; llama.cpp rotates all",
        ),
        ("ling2", {"num_shared_experts": 2}, "num_shared_experts is 2"),
        ("ling2", {"head_dim": 16}, "4 heads of 16 elements in a hidden_size of 32; llama.cpp has as many of q here"),
        ("ling2", {"n_group": 4}, "4 experts in 4 groups; llama.cpp wants groups of two or more experts"),
        ("glm5-next", {"n_group": 3}, "4 experts in 3 groups; llama.cpp wants .* all of one size"),
        (
            "laguna",
            {"rope_parameters": {"full_attention": FULL | {"partial_rotary_factor": 0.2}, "sliding_attention": FULL}},
            "3 elements of a head are rotated; llama.cpp rotates pairs",
        ),
        ("ling", {"first_k_dense_replace": 1}, "has experts in all layers of this architecture"),
        (
            "laguna",
            {"layer_types": [*2 * ["sliding_attention"], *3 * ["full_attention"]]},
            "layer 0 has a window, of whose heads 16 elements are rotated, of others 8; llama.cpp then rotates as many",
        ),
        ("laguna", {"gating": "per-token"}, "gating is 'per-token'; must be per-head or per-element"),
        ("laguna", {"num_attention_heads_per_layer": [4, 5, 6, 6, 4]}, "must be a multiple of 2 key-value heads"),
        (
            "step35",
            {"layer_types": 5 * ["full_attention"], "partial_rotary_factors": 5 * [0.5], "rope_theta": 1e4},
            "no layer has a window; llama.cpp loads no such model",
        ),
        ("step35", {"zero_centered": False}, "zero_centered is False; llama.cpp"),
        ("step35", {"head_dim": 8}, "head_dim is 16; llama.cpp has 8, the size of heads, in all layers"),
        ("step35", {"num_sliding_attention_heads": 5}, "5 heads cannot share 2 key-value heads in layers with a"),
        ("step35", {"partial_rotary_factors": 5 * [0.5]}, "is 0.5 in layers of sliding_attention; llama.cpp"),
        ("step35", {"rope_theta": [1e4, 1e4, 1e4, 1e4, 5e6]}, r"rope_theta is \[10000.0, "),
        ("step35", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'; llama.cpp would scale layers with"),
        (
            "step35",
            {"layer_types": ["full_attention", *3 * ["chunked"], "full_attention"]},
            "layer_types has 'chunked'; must be full",
        ),
        ("mimo2", {"swa_v_head_dim": 8}, "swa_v_head_dim is 8; llama.cpp has one size of heads for all layers here"),
        ("mimo2", {"hybrid_layer_pattern": [0, 2, 1, 1]}, "must name the kind of each of 4 layers"),
        ("mimo2", {"layer_types": 4 * ["full_attention"]}, "no layer has a window; llama.cpp loads no such model"),
        ("mimo2", {"head_dim": 16}, "5 elements of a head are rotated; llama.cpp rotates pairs"),
        (
            "mimo2",
            {"rope_parameters": {"full_attention": FULL, "sliding_attention": HALF}},
            "layers with a window rotate 12 elements of a head, the others 8; llama.cpp has one number for all here",
        ),
        (
            "mimo2",
            {"rope_parameters": {"full_attention": YARN | {"attention_factor": 1.3}, "sliding_attention": FULL}},
            "rope with an attention factor of its own; llama.cpp would scale layers with a window as well",
        ),
        ("exaone-moe", {"tie_word_embeddings": True}, "tie_word_embeddings is True; llama.cpp's graph needs a head"),
        ("granite-swa", {"layer_types": 4 * ["full_attention"]}, "no layer has a window; llama.cpp loads no such"),
        ("granite-swa", {"layer_rope_theta": 4 * [0]}, "no layer rotates; llama.cpp loads no such model"),
        (
            "muse-glimmer",
            {"layer_types": 5 * ["full_attention"], "layer_rope_theta": 5 * [0]},
            "no layer has a window; llama.cpp loads no such model",
        ),
        ("dots3-note", {"layer_types": 4 * ["full_attention"]}, "no layer has a window; llama.cpp loads no such"),
        ("dots3-note", {"layer_types": 4 * ["sliding_attention"]}, "no layer attends to everything; llama.cpp loads"),
        (
            "kimi-linear",
            {"layer_types": 4 * ["full_attention"]},
            "no layer has linear attention; llama.cpp loads no such model",
        ),
        ("ling3", {"layer_types": 4 * ["full_attention"]}, "no layer has linear attention; llama.cpp loads no such"),
        ("glm5-next", {"layer_types": 5 * ["indexed_attention"]}, "no layer has linear attention; llama.cpp loads no"),
        ("minimax-m2", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("minimax-m3", {"moe_layer_freq": [0, 1, 0, 1]}, "has experts in all layers after the first that has some"),
        ("minimax-m3", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0"),
        ("deepseek4", {"compress_ratios": [0, 4, 8, 4]}, "must be 0, 4 or 128 in every layer"),
        ("deepseek4", {"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]}, "hash_moe in first layers only"),
        ("deepseek4", {"hc_mult": 2}, "hc_mult is 2"),
        ("glm5-next", {"qk_rope_head_dim": 8}, "qk_rope_head_dim is 8; llama.cpp rotates nothing here"),
        ("glm5-next", {"index_topk": 30}, "index_topk is 30 with index_kpool 4; llama.cpp chooses pools of two"),
        ("glm5-next", {"linear_attn_config": {"num_heads": 2}}, "linear attention has 2 heads, other layers 4"),
        ("glm5-next", {"linear_attn_config": [2]}, r"linear_attn_config is \[2\], must be an object"),
        ("glm5-next", {"indexer_types": 5 * ["shared"]}, "indexer_types has shared for layer 1, before any layer"),
        ("glm5-next", {"layer_types": 5 * ["mamba"]}, "must be linear or indexed, for every layer"),
        ("ling3", {"layer_types": ["linear_attention"]}, "must be linear_attention or full_attention, for every layer"),
        ("ling3", {"no_kda_lora": False}, "no_kda_lora is False; llama.cpp's graph"),
        ("ling3", {"gated_attention_proj_granularity_type": "element_wise"}, "granularity_type is 'element_wise'"),
        ("ling3", {"kda_lower_bound": 0.0}, r"kda_lower_bound is 0\.0; must be below 0"),
        (
            "ling3",
            {"mrope_section": [1, 1, 1]},
            r"mrope_section is \[1, 1, 1\], must count the pairs of qk_rope_head_dim 8",
        ),
        ("ling3", {"rope_parameters": YARN | {"mscale_all_dim": 1.0}}, "mscale_all_dim 1.0, which scales all scores"),
        ("ling3", {"rope_parameters": LLAMA3}, "rope of type 'llama3'; llama.cpp has default, linear, yarn"),
        (
            "glm5-next",
            {"mlp_layer_types": ["sparse", *4 * ["dense"]]},
            "must be dense, then sparse",
        ),
        ("muse-glimmer", {"layer_types": 5 * ["chunked_attention"]}, "must be full or sliding, for every layer"),
        ("muse-glimmer", {"layer_rope_theta": 5 * [10000.0]}, "llama.cpp rotates in the layers with a window"),
        ("muse-glimmer", {"rope_parameters": FULL | {"rope_type": "linear", "factor": 8.0}}, "rope of type 'linear'"),
        ("hy-v4", {"indexer_types": ["shared", "full", "full", "full"]}, "and full for the first"),
        ("hy-v4", {"tie_word_embeddings": True}, "tie_word_embeddings is True; llama.cpp's graph needs a head"),
        ("dots1", {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ("granite-4", {"mamba_n_heads": 5}, "64 elements of a Mamba layer in 5 heads"),
        ("granite-4", {"position_embedding_type": "rope"}, "position_embedding_type is 'rope'"),
        ("granite-4", {"layer_types": ["mamba", "mlp", "mamba"]}, "no tensor of a granitehybrid model"),
        ("gemma3n", {"num_kv_shared_layers": 2}, "2 of 4 layers use the keys of earlier ones"),
        ("gemma3n", {"activation_sparsity_pattern": 4 * [0.0]}, "activation_sparsity_pattern is"),
        ("gemma3n", {"laurel_rank": 32}, "laurel_rank is 32"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ("gemma4", {"per_layer_config": {"1": {"head_dim": 32}}}, "must have the same for every layer with full"),
        ("gemma4", {"per_layer_config": [32]}, r"per_layer_config is \[32\], must be an object"),
        ("llama4", {"use_qk_norm": False}, "use_qk_norm is False; llama.cpp has True for 4 experts"),
        ("llama4", {"no_rope_layers": [1, 1, 1, 1]}, "no_rope_layers is"),
        ("llama4", {"attention_chunk_size": 1024}, "attention_chunk_size is 1024"),
        ("hunyuan", {"rope_parameters": {"rope_type": "dynamic", "alpha": "x"}}, "alpha is 'x'"),
    ],
)
def test_a_config_that_llama_cpp_cannot_express_is_refused(
    name: str, change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    golden = json.loads((GOLDENS / f"{name}.json").read_text())
    config = golden["config"]
    config.get("text_config", config).update(change)
    with pytest.raises(BridgeError, match=problem):
        describe_model(config, tmp_path, golden["checkpoint"])
