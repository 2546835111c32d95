"""Train a layer that predicts a token further (MTP): train_mtp.py MODEL --text TEXT --out DIR [--steps N] [--depth N]

    gguf-bridge convert DIR mtp.gguf --type Q8_0
    gguf-bridge run mtp.gguf -p TEXT --draft mtp

MODEL is a small Llama or Qwen3. DIR is a GLM-4.5 that computes the same: all its layers are dense. To cost what a deep
model does, it gets layers that add nothing, up to --depth. The layer that predicts has two experts, both of which each
token passes through, and learns, from the model's states, what the model itself replies: TEXT only begins the replies.
"""

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nn
from safetensors.torch import load_file, save_file

import bridge

_PROMPT, _REPLY = 32, 96  # tokens of each reply
_LENGTH = _PROMPT + _REPLY
_TOGETHER = 8  # replies in a step of the training


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    options.add_argument("model", type=Path, metavar="MODEL", help="a small float Llama or Qwen3")
    options.add_argument("--text", type=Path, required=True, metavar="FILE", help="what replies begin with")
    options.add_argument("--out", type=Path, required=True, metavar="DIR", help="the checkpoint to write")
    options.add_argument("--replies", type=int, default=256, metavar="N", help="to learn from; default: %(default)s")
    options.add_argument("--steps", type=int, default=80, metavar="N", help="of training; default: %(default)s")
    options.add_argument("--depth", type=int, default=32, metavar="N", help="layers of DIR; default: %(default)s")
    a = options.parse_args()
    torch.manual_seed(0)
    config = json.loads((a.model / "config.json").read_text())
    weights = {name: w.float() for name, w in load_file(a.model / "model.safetensors").items()}
    replies = sample(a.model, a.text, a.replies, a.out)
    states = states_of(a.model, replies)
    head = Head(config, weights)
    train(head, replies, states, a.steps)
    write(a.out, a.model, config, weights, head, a.depth)


def sample(model: Path, text: Path, count: int, out: Path) -> torch.Tensor:
    """int [count, prompt and reply]: the model's own most likely replies to pieces of a text."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "sampling.gguf"
    bridge.convert(model, path, type="q8_0", force=True)
    loaded = bridge.Model.load(path, context=_LENGTH + 1)
    loaded.tokenizer.stops = frozenset()
    ids = loaded.tokenizer.encode(text.read_text(), add_special=False)
    starts = np.random.default_rng(0).integers(0, len(ids) - _PROMPT, count)
    with loaded.batch() as batch:
        made = [batch.add(ids[at : at + _PROMPT], _REPLY, temperature=0) for at in starts]
        for _ in batch:
            pass
    path.unlink()
    return torch.tensor([g.prompt + g.tokens for g in made])


def states_of(model: Path, replies: torch.Tensor) -> torch.Tensor:
    """float16 [replies, tokens, hidden]: the model's normalized states."""
    from transformers import AutoModel

    made = AutoModel.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        return torch.cat([made(part).last_hidden_state.half() for part in replies.split(32)])


class Head(torch.nn.Module):
    """The layer in floats; its experts and the shared one are one network."""

    def __init__(self, config: dict[str, Any], weights: dict[str, torch.Tensor]):
        super().__init__()
        hidden, last = config["hidden_size"], f"model.layers.{config['num_hidden_layers'] - 1}."
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim, self.eps = config["head_dim"], config["rms_norm_eps"]
        self.theta = config["rope_parameters"]["rope_theta"]
        self.embedding = weights["model.embed_tokens.weight"]
        self.output = weights.get("lm_head.weight", self.embedding)
        inner = config["intermediate_size"] // 256 * 256
        own = {name.removeprefix(last): w.clone() for name, w in weights.items() if name.startswith(last)}
        for part in ("gate", "up"):
            own[f"mlp.{part}_proj.weight"] = own[f"mlp.{part}_proj.weight"][:inner]
        own["mlp.down_proj.weight"] = own["mlp.down_proj.weight"][:, :inner].contiguous()
        joined = torch.cat([torch.eye(hidden), torch.eye(hidden)], 1) / 2 + 0.01 * torch.randn(hidden, 2 * hidden)
        own |= {"eh_proj.weight": joined, "enorm.weight": torch.ones(hidden), "hnorm.weight": torch.ones(hidden)}
        own["shared_head.norm.weight"] = weights["model.norm.weight"].clone()
        self.names = list(own)
        self.own = torch.nn.ParameterList(own.values())

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight

    def forward(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Logits [n, reply, vocab] of the reply's tokens, for tokens int [n, length] and the states before each."""
        w = dict(zip(self.names, self.own, strict=True))
        both = [self.norm(self.embedding[tokens], w["enorm.weight"]), self.norm(states, w["hnorm.weight"])]
        x = torch.cat(both, -1) @ w["eh_proj.weight"].T
        x = x + self.attention(self.norm(x, w["input_layernorm.weight"]), w) @ w["self_attn.o_proj.weight"].T
        y = self.norm(x, w["post_attention_layernorm.weight"])
        y = nn.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
        x = self.norm(x + y @ w["mlp.down_proj.weight"].T, w["shared_head.norm.weight"])
        return x[:, _PROMPT - 2 :] @ self.output.T

    def attention(self, x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
        n, length, _ = x.shape

        def split(part: str, heads: int) -> torch.Tensor:
            y = (x @ w[f"self_attn.{part}_proj.weight"].T).view(n, length, heads, self.head_dim)
            norm = w.get(f"self_attn.{part}_norm.weight")
            return (y if norm is None else self.norm(y, norm)).transpose(1, 2)

        q, k, v = split("q", self.heads), split("k", self.kv_heads), split("v", self.kv_heads)
        half = torch.arange(0, self.head_dim, 2) / self.head_dim
        angles = torch.arange(length)[:, None] * self.theta**-half
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)

        def rotated(y: torch.Tensor) -> torch.Tensor:
            first, second = y.chunk(2, -1)
            return y * cos + torch.cat([-second, first], -1) * sin

        y = nn.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).reshape(n, length, -1)


def train(head: Head, replies: torch.Tensor, states: torch.Tensor, steps: int) -> None:
    """AdamW on the tokens that the model chose; the rate falls as a cosine."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps, pct_start=0.05)
    begun = time.process_time()
    for step in range(steps):
        chosen = torch.randint(len(replies), (_TOGETHER,))
        tokens = replies[chosen]
        with torch.autocast("cpu", torch.bfloat16):
            logits = head(tokens[:, 1:-1], states[chosen, :-2].float()).float()
        wanted = tokens[:, _PROMPT:]
        loss = nn.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 19 or step == steps - 1:
            right = (logits.argmax(-1) == wanted).float().mean()
            seconds = time.process_time() - begun
            print(f"step {step + 1}: loss {loss.item():.3f}, {right:.1%} guessed, {seconds:.0f} s of CPU", flush=True)


def write(
    out: Path, model: Path, config: dict[str, Any], weights: dict[str, torch.Tensor], head: Head, depth: int
) -> None:
    """The checkpoint."""
    layers, normed = config["num_hidden_layers"], "model.layers.0.self_attn.q_norm.weight" in weights
    made = dict(weights)
    first = {name: w for name, w in weights.items() if name.startswith("model.layers.0.")}
    for layer in range(layers, depth):
        for name, w in first.items():
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            made[name.replace(".0.", f".{layer}.", 1)] = torch.zeros_like(w) if adds else w
    own = {name: w.detach() for name, w in zip(head.names, head.own, strict=True)}
    inner = own["mlp.gate_proj.weight"].shape[0]
    each, last = inner // 4, f"model.layers.{depth}."
    for part in ("gate", "up", "down"):
        axis = int(part == "down")
        pieces = own.pop(f"mlp.{part}_proj.weight").split([each, each, 2 * each], axis)
        for expert in range(2):  # each has half of the weight
            made[f"{last}mlp.experts.{expert}.{part}_proj.weight"] = pieces[expert] * (1 + axis)
        made[f"{last}mlp.shared_experts.{part}_proj.weight"] = pieces[2]
    made |= {last + name: w for name, w in own.items()}
    made[f"{last}mlp.gate.weight"] = torch.zeros(2, config["hidden_size"])
    made[f"{last}mlp.gate.e_score_correction_bias"] = torch.zeros(2)
    kept = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
        "max_position_embeddings", "vocab_size", "tie_word_embeddings", "bos_token_id", "eos_token_id", "hidden_act",
    )  # fmt: skip
    rope = {**config["rope_parameters"], "partial_rotary_factor": 1.0}
    (out / "config.json").write_text(json.dumps({
        **{key: config[key] for key in kept}, "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"],
        "num_hidden_layers": depth, "num_nextn_predict_layers": 1, "first_k_dense_replace": depth,
        "use_qk_norm": normed, "attention_bias": False, "rope_parameters": rope, "partial_rotary_factor": 1.0,
        "n_routed_experts": 2, "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": each,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "dtype": "float16",
    }, indent=2))  # fmt: skip
    save_file({name: w.half().contiguous() for name, w in made.items()}, out / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(model / name, out / name)


if __name__ == "__main__":
    main()
