"""Modules with quantized weights in torch's own machinery: compiled, moved to a GPU, and made without their floats."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bridge
from bridge.blocks import TYPES
from bridge.errors import BridgeError
from bridge.nn.torch_ops import number_of, product
from bridge.runtime import QuantTensor, open_gguf
from tests.support import ptx
from tests.support.random_blocks import FACTOR, random_matrix
from tests.support.tiny_gguf import write_decoder

SHAPE = {"hidden": 64, "inner": 96, "heads": 2, "kv_heads": 1, "vocab": 48}
TOKENS = torch.tensor([[5, 7, 11, 2]])


def config() -> Any:
    return transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, vocab_size=48, max_position_embeddings=128, rms_norm_eps=1e-5, tie_word_embeddings=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("torch") / "tiny.gguf", **SHAPE)  # type: ignore[arg-type]


def linear(**options: Any) -> bridge.nn.QuantLinear:
    tensor, _ = random_matrix(TYPES["NVFP4"], 6, 64, factors=FACTOR / 64)
    return bridge.nn.QuantLinear(tensor, torch.arange(6.0), np.array([3, 1, 2, 5, 4, 0]), **options)


# torch.compile


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """In one graph, or an error says where it breaks."""
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_and_its_gradient_are_in_one_graph(dtype: torch.dtype) -> None:
    layer = linear(precision="f32")
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, wanted = compiled(lambda x: layer(x).sigmoid())(found), layer(expected).sigmoid()
    assert y.dtype == dtype
    torch.testing.assert_close(y, wanted)
    y.sum().backward(), wanted.sum().backward()
    torch.testing.assert_close(found.grad, expected.grad)
    assert found.grad.abs().max() > 0


def test_a_whole_model_is_in_one_graph(path: Path) -> None:
    model = bridge.nn.load(config(), path)
    with torch.no_grad():
        graph = compiled(lambda tokens: model(tokens, use_cache=False).logits)
        torch.testing.assert_close(graph(TOKENS), model(TOKENS, use_cache=False).logits)


def test_operators_keep_to_what_torch_asks_of_them() -> None:
    layer, x = linear(), torch.randn(3, 64)
    operators = torch.ops.gguf_bridge
    checks = {"test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static"}
    for operator, arguments in (
        (operators.product, (x.requires_grad_(), layer.number, 6, "f32", None)),
        (operators.product, (x, layer.number, 6, "f32", torch.randn(6, requires_grad=True))),
        (operators.product_gradient, (torch.randn(3, 6, requires_grad=True), layer.number, 64)),
        (operators.rows, (torch.tensor([5, 0]), layer.number, 64)),
    ):
        found = torch.library.opcheck(operator.default, arguments, test_utils=sorted(checks))
        assert set(found) == checks
        assert set(found.values()) == {"SUCCESS"}


def test_a_copy_of_a_module_multiplies_when_the_original_is_gone() -> None:
    layer = linear()
    again = copy.deepcopy(layer)
    assert again.number != layer.number
    x = torch.randn(2, 64)
    expected = layer(x)
    del layer
    torch.testing.assert_close(again(x), expected)


# without floats


class Largest(TorchDispatchMode):
    """The largest tensor of floats that any operation of torch made outside of the meta device."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and made.is_floating_point() and made.device.type != "meta":
                self.numbers = max(self.numbers, made.untyped_storage().nbytes() // made.element_size())
        return result


def test_a_model_is_made_of_a_gguf_without_any_float_of_a_linear(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, dequantize = [0], QuantTensor.dequantize
    monkeypatch.setattr(
        QuantTensor, "dequantize", lambda self, *rest: whole.append(max(self.shape)) or dequantize(self, *rest)
    )
    smallest = 32 * 64  # of the linears: k and v
    with Largest() as seen:
        model = bridge.nn.load(config(), path)
    assert max(whole) <= 64  # norms
    assert 0 < seen.numbers <= 64
    with Largest() as seen:  # the measure has teeth
        replaced = bridge.nn.replace_linears(transformers.AutoModelForCausalLM.from_config(config()), path)
    assert seen.numbers > smallest
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, replaced.eval()(TOKENS).logits)
    linears = [m for m in model.modules() if isinstance(m, bridge.nn.QuantLinear)]
    assert len(linears) == 8
    assert not any(isinstance(m, torch.nn.Linear | torch.nn.Embedding) for m in model.modules())
    assert sum(p.numel() for p in model.parameters()) == 3 * 64


def test_a_model_is_loaded_by_its_folder_with_what_it_stops_at(path: Path, tmp_path: Path) -> None:
    made = config()
    made.quantization_config = {"quant_method": "gptq", "bits": 4}  # of the checkpoint that the GGUF came from
    made.save_pretrained(tmp_path)
    transformers.GenerationConfig(eos_token_id=[7, 9]).save_pretrained(tmp_path)
    model = bridge.nn.load(tmp_path, path, dtype=torch.bfloat16)
    assert model.generation_config.eos_token_id == [7, 9]
    assert model(TOKENS).logits.dtype == torch.bfloat16
    assert not hasattr(model.config, "quantization_config")
    assert model.generate(TOKENS, max_new_tokens=3, do_sample=False).shape[1] <= 7


def test_what_is_no_model_or_of_another_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match=r"nowhere: not a transformers config: ") as problem:
        bridge.nn.load(tmp_path / "nowhere", path)
    assert "\n" not in str(problem.value)
    wide = config()
    wide.vocab_size = 64
    with pytest.raises(BridgeError, match=r"token_embd\.weight: is \[48, 64\] in the GGUF, but \[64, 64\] by "):
        bridge.nn.load(wide, path)
    two = config()
    two.num_hidden_layers = 2
    with pytest.raises(BridgeError, match="has 1 layers, the model's config 2"):
        bridge.nn.load(two, path)
    qwen = transformers.Qwen3Config(**{k: v for k, v in config().to_dict().items() if k != "model_type"})
    with pytest.raises(BridgeError, match=r"self_attn\.q_norm\.weight: Qwen3ForCausalLM has it, but the GGUF does not"):
        bridge.nn.load(qwen, path)


# on a GPU


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="this torch captures whatever it compiles")
def test_layers_of_experts_are_not_captured_and_linears_are() -> None:
    """The host reads which experts were chosen, which a capture refuses."""
    own = torch.ops.gguf_bridge
    unsafe = [torch.Tag.cudagraph_unsafe in op.default.tags for op in (own.experts, own.product, own.rows)]
    assert unsafe == [True, False, False]


def test_shapes_and_devices_are_known_without_a_gpu() -> None:
    """As a compiler sees them: torch's fake tensors, which have a device and no memory."""
    layer = bridge.nn.QuantLinear(random_matrix(TYPES["Q4_0"], 6, 64)[0])
    with FakeTensorMode():
        y = layer(torch.empty(2, 3, 64, device="cuda:0", dtype=torch.float16))
    assert (str(y.device), y.shape, y.dtype) == ("cuda:0", (2, 3, 6), torch.float16)


@pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable()))
def test_a_model_goes_to_the_gpu_and_says_there_what_it_says_on_the_cpu(path: Path) -> None:
    """Kernels are compiled PTX; torch's tensors are those of the CPU, which refuse to meet those that are not there."""
    from tests.support.gpu.disguise import disguised_gpu

    model = bridge.nn.load(config(), path, precision="f32")
    with torch.no_grad():
        expected = model(TOKENS).logits
        with disguised_gpu() as launches:
            moved = model.to("cuda:0")
            assert moved.lm_head.tensor.to("cuda:0") is moved.lm_head.tensor
            assert open_gguf(path)["output.weight"].to("cuda:0") is not moved.lm_head.tensor
            places = {str(t.device) for t in [*moved.parameters(), *moved.buffers()]}
            assert places == {"cuda:0"}
            found = moved(TOKENS.to("cuda:0")).logits
            assert str(found.device) == "cuda:0"
            names = launches.names.copy()
            back = moved.to("cpu")
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
        assert sum("_product_" in name for name in names) == 8
        assert any(name.startswith("_dequantize_") and name.endswith("_rows") for name in names)
        torch.testing.assert_close(back(TOKENS).logits, expected)


@pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable()))
def test_halves_on_the_gpu_are_multiplied_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were copied to float32 for every linear."""
    from tests.support.gpu.disguise import disguised_gpu

    tensor, weights = random_matrix(TYPES["Q4_0"], 6, 64)
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).half()
    with disguised_gpu():
        layer = bridge.nn.QuantLinear(tensor, precision="f32").to("cuda:0")
        multiply, given = layer.tensor.matmul, []
        monkeypatch.setattr(layer.tensor, "matmul", lambda x, **how: given.append(x.dtype) or multiply(x, **how))
        y = layer(x.to("cuda:0"))
    assert given == [torch.float16]
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.cpu().double(), x.double() @ torch.from_numpy(weights).T, rtol=2e-3, atol=2e-3)


@pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable()))
@pytest.mark.parametrize("n", [2, 9])
def test_a_bias_is_added_by_the_product_and_stays_float32(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.gpu.disguise import disguised_gpu

    tensor, weights = random_matrix(TYPES["Q4_0"], 6, 64)
    x, bias = torch.randn(n, 64, generator=torch.Generator().manual_seed(1)).half(), torch.linspace(-1, 2, 6)
    with disguised_gpu() as launches:
        layer = bridge.nn.QuantLinear(tensor, bias).to("cuda:0").half()
        y = layer(x.to("cuda:0"))
        with pytest.raises(BridgeError, match=r"bias is torch.float32 \[5\]; must be contiguous float32 \[6\]"):
            layer.tensor.affine(x.to("cuda:0"), torch.zeros(5, device="cuda:0"))
    assert layer.bias.dtype == torch.float32
    assert [("_bias" in name, "_product_" in name) for name in launches.names][-1] == (True, True)
    expected = x.double() @ torch.from_numpy(weights).T + bias
    assert (y.cpu() - expected).norm() < 0.02 * expected.norm()


@pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable()))
def test_preparing_a_model_on_a_gpu_compiles_what_its_products_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge.cuda import first_products
    from bridge.cuda.toolchain.launch import Kernel

    from tests.support.gpu.disguise import disguised_gpu

    compiled: list[Any] = []
    launched: list[str] = []
    monkeypatch.setattr(first_products, "compile_all", lambda kernels, *given: compiled.extend(kernels))
    tensors = [random_matrix(TYPES[type], 6, 256)[0] for type in ("Q4_0", "Q4_K", "Q4_0")]
    with disguised_gpu(), monkeypatch.context() as patch:
        embedding = bridge.nn.QuantEmbedding(tensors[1])
        linears = [
            bridge.nn.QuantLinear(tensors[1], torch.zeros(6)),
            bridge.nn.QuantLinear(tensors[2], precision="f32"),
        ]
        model = torch.nn.ModuleList([embedding, torch.nn.LayerNorm(4), *linears]).to("cuda:0").half()
        patch.setattr(Kernel, "run", lambda self, *given: launched.append(self.name))
        assert bridge.nn.prepare(model) is model
        assert not launched
        embedding(torch.tensor([1], device="cuda:0"))
        for n in (1, 2, 3, 5, 9, 17, 40, 60, 70, 300):
            for layer in linears:
                layer(torch.zeros((n, 256), dtype=torch.float16, device="cuda:0"))
    names = [kernel.name for kernel in compiled]
    assert len(set(launched)) > 15
    assert set(launched) == set(names)
    assert len(names) == len(set(names))
    on_cpu = bridge.nn.QuantLinear(tensors[0])
    assert bridge.nn.prepare(on_cpu).tensor.prepared


@pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable()))
def test_sums_of_many_halves_on_a_gpu_are_not_rounded_to_halves() -> None:
    from tests.support.gpu.disguise import disguised_gpu

    tensor, weights = random_matrix(TYPES["Q4_0"], 6, 64)
    x = (6e4 * torch.from_numpy(weights[1]).sign()).half().expand(70, 64).contiguous()
    with disguised_gpu():
        y = tensor.to("cuda:0").matmul(x.to("cuda:0")).cpu()
    expected = x.double() @ torch.from_numpy(weights).T
    assert expected.abs().max() > 65504
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=100)  # activations have 8 bits


def test_the_gradient_of_halves_is_of_halves() -> None:
    class Tensor:
        def matmul(self, x: torch.Tensor, precision: str) -> torch.Tensor:
            return x.float() @ torch.ones(64, 6)

        def rows(self, indices: np.ndarray) -> torch.Tensor:
            return torch.ones(len(indices), 64)

    tensor = Tensor()
    x = torch.ones(2, 64, dtype=torch.float16, requires_grad=True)
    product(x, number_of(tensor), 6, "f32", None).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float16
    assert (x.grad == 6).all()
