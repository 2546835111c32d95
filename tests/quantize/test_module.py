"""Any module, and a `transformers` decoder, quantized in place by hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from bridge.errors import BridgeError
from bridge.quantize import Method, gptq, groups, quantize_model, superblocks
from bridge.quantize.quantizer import LayerHooks, LayerInput
from bridge.quantize.solve.hessian import Hessian
from bridge.runtime.cpu.engines.dequantize import rows as dequantize_blocks


class Net(nn.Module):
    """An image through a convolution, a Conv1D and two linears that share an input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3, padding=1)
        self.mix = Conv1D(64, 32)
        self.left, self.right = nn.Linear(64, 16), nn.Linear(64, 16, bias=False)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv(image)).flatten(2).transpose(1, 2).contiguous()
        x = torch.relu(self.mix(x))
        return self.left(x) * torch.sigmoid(self.right(x))


def net_and_batches() -> tuple[Net, list[torch.Tensor]]:
    torch.manual_seed(0)
    net = Net()
    nn.init.normal_(net.mix.weight, std=0.2)
    random = torch.rand(3, 32, 1, 1)
    return net, [torch.randn(8, 3, 8, 8) + random[i % 3, :3] for i in range(4)]


@torch.no_grad()
def lost(net: nn.Module, expected: torch.Tensor, image: torch.Tensor) -> float:
    return float((net(image) - expected).square().mean())


def test_a_module_of_linear_conv1d_and_conv2d_is_quantized_in_place_and_its_outputs_are_nearer_than_by_rtn() -> None:
    errors = {}
    for name, options in {"rtn": {"damping": float("inf")}, "gptq": {}, "refined": {"sweeps": 3}}.items():
        net, batches = net_and_batches()
        with torch.no_grad():
            expected = net(batches[0])
        done = gptq(net, batches, bits=4, group_size=16, **options)
        assert list(done) == ["conv", "mix", "left", "right"]
        torch.testing.assert_close(net.left.weight.detach(), torch.from_numpy(done["left"].tensor().dequantize()))
        torch.testing.assert_close(net.mix.weight.detach().T, torch.from_numpy(done["mix"].tensor().dequantize()))
        kernel = torch.from_numpy(done["conv"].tensor().dequantize())
        torch.testing.assert_close(net.conv.weight.detach().flatten(1), kernel)
        assert (done["conv"].damping == float("inf")) == (name == "rtn")
        errors[name] = lost(net, expected, batches[0])
    assert errors["refined"] < errors["gptq"] < errors["rtn"]


def test_act_order_ends_in_the_same_weights_as_the_module_got() -> None:
    for act_order in ("none", "free", "static", "fixed"):
        net, batches = net_and_batches()
        done = gptq(net, [(b,) for b in batches], group_size=16, symmetric=False, act_order=act_order, sweeps=1)
        tensor = done["mix"].tensor()
        assert tensor.sequential == (act_order != "free")
        torch.testing.assert_close(net.mix.weight.detach().T, torch.from_numpy(tensor.dequantize()))


def test_ternary_weights_are_minus_a_scale_zero_or_the_scale() -> None:
    net, batches = net_and_batches()
    done = gptq(net, [{"image": b} for b in batches], bits=0, group_size=-1)
    assert set(np.unique(done["left"].codes)) == {0, 1, 2}
    assert (done["left"].tensor().zeros == 1).all()
    assert all(len(row.unique()) <= 3 for row in net.left.weight.detach())


def test_what_cannot_be_quantized_is_refused_in_one_line() -> None:
    net, batches = net_and_batches()
    with pytest.raises(BridgeError, match="no calibration batches"):
        gptq(net, [])
    with pytest.raises(BridgeError, match="must be 2 to 8"):
        gptq(net, batches, bits=9)
    with pytest.raises(BridgeError, match="rows of 27 weights do not fill Q4_0 blocks of 32"):
        gptq(net, batches, type="Q4_0")
    with pytest.raises(BridgeError, match="unknown act_order 'desc'"):
        gptq(net, batches, act_order="desc")


def decoder() -> tuple[Any, torch.Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=128, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval(), torch.randint(0, 128, (24, 48))


@torch.no_grad()
def divergence(model: Any, expected: torch.Tensor, tokens: torch.Tensor) -> float:
    p, q = (x.log_softmax(-1) for x in (expected, model(tokens).logits))
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_a_decoder_is_quantized_stage_by_stage_and_each_step_brings_it_nearer_to_the_floats() -> None:
    found = {}
    for name, sweeps, cross in (("gptq", 0, False), ("refined", 3, False), ("gptaq", 3, True)):
        model, tokens = decoder()
        with torch.no_grad():
            expected = model(tokens).logits
        method = Method(superblocks("Q4_0"), sweeps=sweeps)
        done = dict(quantize_model(model, tokens[:16], method.layer, batch=5, cross=cross))
        assert len(done) == 14
        assert list(done)[:4] == [f"model.layers.0.self_attn.{n}_proj" for n in "qkvo"]
        name_of = "model.layers.1.mlp.down_proj"
        blocks = dequantize_blocks("Q4_0", done[name_of].blocks())
        np.testing.assert_array_equal(model.get_submodule(name_of).weight.detach().numpy(), blocks)
        found[name] = divergence(model, expected[16:], tokens[16:])
    assert found["gptaq"] < found["refined"] < found["gptq"]


def test_the_next_layer_sees_the_quantized_layers_outputs_unless_the_float_ones_are_asked_for() -> None:
    seen: dict[str, torch.Tensor] = {}
    for feed in ("quantized", "float"):
        model, tokens = decoder()

        def zeroed(layer: Any, feed: str = feed) -> tuple[torch.Tensor, None]:
            if layer.name == "model.layers.1.self_attn.q_proj":
                seen[feed] = layer.hessian.matrix.clone()
            return layer.weight * 0.5, None

        list(quantize_model(model, tokens, zeroed, feed=feed))
    inputs: list[torch.Tensor] = []
    model, tokens = decoder()
    model.model.layers[1].self_attn.q_proj.register_forward_pre_hook(lambda _m, args: inputs.append(args[0]))
    with torch.no_grad():
        model(tokens)
    x = inputs[0].flatten(0, 1)
    torch.testing.assert_close(seen["float"], 2 / len(x) * x.T @ x, rtol=1e-3, atol=1e-3)
    assert (seen["quantized"] - seen["float"]).abs().max() > 0.01


def rounded(layer: Any) -> tuple[torch.Tensor, Any]:
    values = (layer.weight * 16).round() / 16
    return values, (values, layer.hessian)


def test_activations_on_disk_give_the_same_codes_and_leave_nothing_behind(tmp_path: Path) -> None:
    found = []
    for offload in (None, tmp_path):
        model, tokens = decoder()
        found.append(dict(quantize_model(model, tokens, rounded, cross=True, offload=offload)))
        if offload:
            assert not list(tmp_path.iterdir())
    assert list(found[0]) == list(found[1])
    for (_, one), (_, other) in zip(found[0].values(), found[1].values(), strict=True):
        torch.testing.assert_close(one.matrix, other.matrix, rtol=0, atol=0)
        torch.testing.assert_close(one.cross, other.cross, rtol=0, atol=0)
    steps = quantize_model(model, tokens, rounded, offload=tmp_path)
    next(steps)
    assert len(list(tmp_path.glob("*/*.pt"))) == 2
    steps.close()
    assert not list(tmp_path.iterdir())


def test_activations_that_cannot_be_written_are_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = decoder()
    with pytest.raises(BridgeError, match="cannot create a folder for activations there"):
        next(quantize_model(model, tokens, rounded, offload=tmp_path / "none"))

    def full(*_: Any) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed\nmore")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(BridgeError, match=r"activations cannot be written \(Pytorch.*\); free disk space"):
        next(quantize_model(model, tokens, rounded, offload=tmp_path))
    assert not list(tmp_path.iterdir())


def test_sequences_beyond_the_models_positions_are_refused() -> None:
    model, tokens = decoder()
    model.config.max_position_embeddings = 40
    with pytest.raises(BridgeError, match=r"the model has 40 positions; use shorter ones: length=40"):
        next(quantize_model(model, tokens, rounded))


def test_layers_that_are_known_already_are_put_in_and_not_quantized_again() -> None:
    model, tokens = decoder()
    expected = dict(quantize_model(model, tokens, rounded, cross=True))
    done = list(expected)[:10]  # a whole block, and q, k and v of the next

    def known(name: str) -> torch.Tensor | None:
        return expected[name][0] if name in done else None

    resumed, tokens = decoder()
    found = dict(quantize_model(resumed, tokens, rounded, cross=True, layers=LayerHooks(finished=known)))
    assert list(found) == list(expected)[10:]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(resumed.get_parameter(name), parameter, rtol=0, atol=0)


def test_every_block_is_called_with_its_own_mask() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(1)
    config = Gemma2Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=128, head_dim=32, sliding_window=4,
    )  # fmt: skip
    assert len(set(config.layer_types)) == 2
    model, tokens = Gemma2ForCausalLM(config).eval(), torch.randint(0, 128, (4, 16))
    inputs: list[torch.Tensor] = []
    last = model.model.layers[1].mlp.down_proj
    handle = last.register_forward_pre_hook(lambda _m, args: inputs.append(args[0]))
    with torch.no_grad():
        model(tokens)
    handle.remove()
    seen = {}

    def kept(layer: Any) -> tuple[torch.Tensor, None]:
        seen[layer.name] = layer.hessian.matrix
        return layer.weight, None

    list(quantize_model(model, tokens, kept))
    x = inputs[0].flatten(0, 1)
    torch.testing.assert_close(seen["model.layers.1.mlp.down_proj"], 2 / len(x) * x.T @ x)


def test_groups_that_no_gguf_holds_and_blocks_that_no_checkpoint_holds_say_so() -> None:
    model, tokens = decoder()
    _, done = next(iter(quantize_model(model, tokens, Method(groups(4, 32, True)).layer)))
    with pytest.raises(BridgeError, match="groups are not GGUF blocks"):
        done.blocks()
    model, tokens = decoder()
    _, done = next(iter(quantize_model(model, tokens, Method(superblocks("Q8_0")).layer)))
    with pytest.raises(BridgeError, match="a checkpoint cannot hold Q8_0 blocks"):
        done.tensor()


def test_the_error_of_many_rows_is_told_by_some_of_them() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(512, 64, generator=random) @ torch.randn(64, 64, generator=random)
    weight, hessian = torch.randn(1100, 64, generator=random), Hessian("layer", 64)
    hessian.add(x)
    values, done = Method(groups(3, 32, True), sweeps=0).layer(LayerInput("layer", weight, hessian))
    exact = (x @ (weight - values).T).square().sum() / (x @ weight.T).square().sum()
    assert done.error == pytest.approx(float(exact), rel=0.1)
    assert done.error != pytest.approx(float(exact), rel=1e-6)
