"""Mixtures of experts: each with its own Hessian, named as the checkpoint names it, whatever reached it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from bridge.checkpoint import open_checkpoint
from bridge.quantize import FloatModel, Method, groups, quantize_block, quantize_model
from bridge.quantize.model import stages
from bridge.quantize.model.block_inputs import BlockInputs
from bridge.quantize.model.experts import (
    SeparateExperts,
    complete_from_all_experts,
    merged,
    restore_experts,
    split_experts,
)
from bridge.quantize.model.forward_passes import Passes, drawn
from bridge.quantize.solve.hessian import Hessian
from tests.support.tiny_models import save_model

TOKENS = torch.randint(0, 320, (6, 24), generator=torch.Generator().manual_seed(3))
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2MoeConfig", MOE | {"shared_expert_intermediate_size": 32}),
    "laguna": ("LagunaConfig", MOE | {"shared_expert_intermediate_size": 32, "mlp_layer_types": 2 * ["sparse"]}),
    "qwen3": ("Qwen3MoeConfig", MOE | {"norm_topk_prob": True, "tie_word_embeddings": True}),
}


def rounded(layer: Any) -> tuple[torch.Tensor, Any]:
    values = (layer.weight * 16).round() / 16
    return values, (values, layer.hessian)


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, fields = KINDS[request.param]
    return save_model(tmp_path_factory.mktemp(request.param) / "m", config, **SMALL, **fields)


def in_memory(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def test_experts_taken_apart_compute_what_they_did_together_and_share_their_weights(folder: Path) -> None:
    model = in_memory(folder)
    expected = model(TOKENS).logits
    block = model.model.layers[1]
    fused = block.mlp.experts
    taken = split_experts(block)
    assert isinstance(block.mlp.experts, SeparateExperts)
    torch.testing.assert_close(model(TOKENS).logits, expected)
    block.mlp.experts.get_submodule("3").down_proj.weight.zero_()
    restore_experts(taken)
    assert block.mlp.experts is fused
    assert not fused.down_proj[3].any()
    assert fused.down_proj[2].any()


def test_experts_are_layers_by_their_names_in_the_checkpoint_and_come_block_by_block_alike(folder: Path) -> None:
    model = in_memory(folder)
    expected = dict(quantize_model(model, TOKENS, rounded, batch=4, cross=True))
    with open_checkpoint(folder) as checkpoint:
        found = dict(quantize_model(FloatModel(checkpoint), TOKENS, rounded, batch=4, cross=True))
        names = {f"{name}.weight" for name in found}
        experts = {name for name in checkpoint.tensors if ".experts." in name and name.endswith(".weight")}
        assert len(experts) == 2 * 5 * 3
        assert experts < names <= set(checkpoint.tensors)
    for (own, (values, hessian)), (_, twin) in zip(expected.items(), found.values(), strict=True):
        torch.testing.assert_close(hessian.matrix, twin.matrix)
        torch.testing.assert_close(hessian.cross, twin.cross)
        module = own.rpartition(".experts.")[2] if ".experts." in own else ""
        if module.endswith("down_proj"):  # the model's 3-D tensor holds what was found
            fused = model.get_submodule(own.removesuffix(f".{module}")).down_proj
            torch.testing.assert_close(fused.detach()[int(module.split(".")[0])], values)


def test_a_checkpoint_of_3d_experts_gives_the_same_model(folder: Path, tmp_path: Path) -> None:
    model = in_memory(folder)
    model.save_pretrained(tmp_path, save_original_format=False)
    with open_checkpoint(tmp_path) as checkpoint, torch.no_grad():
        assert "model.layers.0.mlp.experts.gate_up_proj" in checkpoint.tensors
        floats = FloatModel(checkpoint)
        for block in (None, 0, 1):
            floats.load(block)
        floats.load_head()
        torch.testing.assert_close(floats.model(TOKENS).logits, model(TOKENS).logits)
        assert floats.name("model.layers.0.mlp.experts.3.up_proj") == "model.layers.0.mlp.experts.3.up_proj"


@torch.no_grad()
def test_an_experts_hessians_are_of_the_tokens_that_reach_it_in_both_models(folder: Path) -> None:
    """Inputs as the quantized model has them, and the float model's of the same tokens, wherever it routes them."""
    model = in_memory(folder)
    twin = copy.deepcopy(model)
    tokens = TOKENS.repeat(6, 1).add(torch.arange(36)[:, None]) % 320
    seen: dict[str, Hessian] = {}

    def halved(layer: Any) -> tuple[torch.Tensor, None]:
        seen[layer.name] = layer.hessian
        return layer.weight * 0.9, None

    names = [n for n, _ in quantize_model(model, tokens, halved, cross=True, wanted=lambda n: ".0." in n)]
    half = copy.deepcopy(twin)
    for name, module in half.named_modules():
        if name in names:
            module.weight.mul_(0.9)
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    for of in (half, twin):
        experts = of.model.layers[0].mlp.experts
        experts.register_forward_pre_hook(lambda _m, args: calls.append(args[:2]))
        of(tokens)
    (quantized, chosen), (floats, others) = calls
    assert (chosen != others).any()
    for number in range(5):
        token = (chosen == number).any(1)
        x, x_float = quantized[token], floats[token]
        for name in ("gate_proj", "down_proj"):
            h = seen[f"model.layers.0.mlp.experts.{number}.{name}"]
            assert (h.tokens, h.borrowed_tokens) == (len(x), 0)
        h = seen[f"model.layers.0.mlp.experts.{number}.up_proj"]
        torch.testing.assert_close(h.matrix, 2 / len(x) * x.T @ x, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(h.cross, 2 / len(x) * (x_float - x).T @ x, rtol=1e-3, atol=1e-3)


def test_what_the_loss_feels_of_an_expert_is_of_the_tokens_that_reach_it_by_their_weights(folder: Path) -> None:
    """A of down_proj: each token's gradient at the experts' sum, times the weight that it gives to this expert."""
    model, calls = in_memory(folder), []
    experts = model.model.layers[0].mlp.experts

    def keep(_module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        calls.append((*args[1:], output))

    experts.register_forward_hook(keep)
    scores = model(TOKENS).logits.log_softmax(-1).flatten(0, 1)
    chosen_tokens = drawn(scores.detach().exp(), torch.Generator().manual_seed(0))
    scores.gather(1, chosen_tokens).sum().backward()
    chosen, weights, output = calls[0]
    with torch.no_grad():
        found = dict(Passes(FloatModel(open_checkpoint(folder)), TOKENS, len(TOKENS)).output_products(2048))
    for number in range(5):
        own = (weights.detach() * (chosen == number)).sum(1, keepdim=True) * output.grad
        norms = own.norm(dim=1)
        mine = norms > 0
        expected = (own[mine] / norms[mine, None]).T @ own[mine] / TOKENS.numel() * norms[mine].mean()
        of = f"mlp.experts.{number}.down_proj", f"block_sparse_moe.experts.{number}.w2"
        (a,) = (found[f"model.layers.0.{name}"] for name in of if f"model.layers.0.{name}" in found)
        torch.testing.assert_close(a.blocks[0], expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_experts_whose_hessians_do_not_fit_in_memory_together_are_gathered_one_after_the_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wanted(name: str) -> bool:
        return ".0.mlp.experts." in name

    tokens = TOKENS.repeat(6, 1).add(torch.arange(36)[:, None]) % 320
    together = dict(quantize_model(in_memory(folder), tokens, rounded, wanted=wanted))
    monkeypatch.setattr(stages, "HESSIANS", 1)
    apart = dict(quantize_model(in_memory(folder), tokens, rounded, wanted=wanted))
    order = [name.split(".experts.")[1] for name in apart]
    assert order[:3] == ["0.gate_proj", "0.up_proj", "1.gate_proj"]
    assert set(together) == set(apart)
    for name, (_, hessian) in together.items():
        assert hessian.borrowed_tokens == 0
        torch.testing.assert_close(apart[name][1].matrix, hessian.matrix)


def test_an_expert_with_too_few_tokens_is_lent_the_mean_of_all_of_them() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(n, 8) * (i + 1) for i, n in enumerate((30, 2, 0, 8))]
    hessians = []
    for i, x in enumerate(inputs):
        hessians.append(Hessian(f"expert {i}", 8))
        hessians[-1].add(x, 1.5 * x)
    complete_from_all_experts(hessians, merged(hessians))
    every = torch.cat(inputs)
    mean = 2 / len(every) * every.T @ every
    own = [2 / max(len(x), 1) * x.T @ x for x in inputs]
    torch.testing.assert_close(hessians[0].matrix, own[0])
    torch.testing.assert_close(hessians[1].matrix, 0.25 * own[1] + 0.75 * mean)
    torch.testing.assert_close(hessians[2].matrix, mean)
    torch.testing.assert_close(hessians[3].matrix, own[3])
    assert [h.cross is None for h in hessians] == [False, True, True, False]
    assert [h.tokens for h in hessians] == [30, 8, 8, 8]
    assert [h.borrowed_tokens for h in hessians] == [0, 6, 8, 0]
    nothing = Hessian("expert", 8)
    complete_from_all_experts([nothing], merged([nothing]))
    assert (nothing.tokens, nothing.borrowed_tokens) == (0, 0)


class Mixture(nn.Module):
    """Experts as modules of their own; a row's first value says which one gets it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(16, 16)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = x[:, 0].round().long()
        x = self.before(x)
        output = torch.zeros_like(x)
        for number in at.unique().tolist():
            output[at == number] = self.experts[number](x[at == number])
        return output


def test_experts_that_the_first_batch_does_not_reach_are_no_later_and_none_is_forgotten() -> None:
    torch.manual_seed(0)
    mixture = Mixture()
    batches = [torch.randn(64, 16) for _ in range(3)]
    for batch, numbers in zip(batches, ([0], [0, 2], [2, 1]), strict=True):
        batch[:, 0] = torch.tensor(numbers * 64)[:64]
    tokens: dict[str, tuple[int, int]] = {}

    def note(layer: Any) -> tuple[torch.Tensor, None]:
        tokens[layer.name] = (layer.hessian.tokens, layer.hessian.borrowed_tokens)
        return layer.weight, None

    names = [n for n, _ in quantize_block(mixture, [BlockInputs(x) for x in batches], note)]
    firsts, seconds = ([f"experts.{i}.{j}" for i in range(4)] for j in (0, 2))
    assert names[0] == "before"
    assert sorted(names[1:5]) == firsts
    assert sorted(names[5:]) == seconds
    assert [tokens[n] for n in firsts] == [(96, 0), (32, 0), (64, 0), (16, 16)]
    assert tokens["experts.3.2"] == (32, 32)
    assert tokens["before"] == (192, 0)


def test_experts_that_are_gathered_one_after_the_other_are_lent_the_mean_of_all_of_them_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2, 96, 16)
    inputs[..., 0] = torch.tensor([0] * 50 + [1] * 40 + [2] * 6)  # and none for the last

    def note(layer: Any) -> tuple[torch.Tensor, Any]:
        return layer.weight, (layer.hessian.matrix.clone(), layer.hessian.tokens, layer.hessian.borrowed_tokens)

    mixture = Mixture()
    together = dict(quantize_block(mixture, [BlockInputs(x) for x in inputs], note))
    monkeypatch.setattr(stages, "HESSIANS", 1)
    apart = dict(quantize_block(mixture, [BlockInputs(x) for x in inputs], note))
    assert [apart[f"experts.{i}.2"][1:] for i in range(4)] == [(100, 0), (80, 0), (32, 20), (32, 32)]
    for name, (matrix, *tokens) in together.items():
        assert [*apart[name][1:]] == tokens
        torch.testing.assert_close(apart[name][0], matrix)


def test_layers_that_no_token_reaches_are_rounded_as_if_all_inputs_counted_alike() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    found = dict(
        quantize_block(Halves(), [BlockInputs(torch.randn(64, 16))], Method(groups(4, 16, False), sweeps=0).layer)
    )
    assert list(found) == ["used", "unused"]
    assert found["unused"].damping == 0.01
