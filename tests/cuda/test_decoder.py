"""Models on CUDA, as far as a machine without a GPU can tell: machine code, and what is said without a driver."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from bridge.cuda.attention.attention_shape import shape, spans, supported
from bridge.cuda.attention.kv_cache import KVForm
from bridge.cuda.product.matvec_shape import MatvecShape
from bridge.cuda.toolchain.device import available, require

import bridge
from bridge.blocks import TYPES
from bridge.cli import main
from bridge.errors import BridgeError
from tests.support.gpu.device import pretended_gpu
from tests.support.gpu.memory import GpuError
from tests.support.gpu.parse import parse
from tests.support.places import ROOT
from tests.support.ptx import assembled, ptx_of, unavailable
from tests.support.random_blocks import random_matrix
from tests.support.tiny_gguf import write_decoder

pytest.importorskip("numba_cuda")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cuda") / "model.gguf"
    bridge.convert(ROOT / "tests" / "data" / "qwen3-gptq-4bit-g128-sym", out)
    return out


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.cuda.toolchain.device.available", lambda: "no NVIDIA driver can be used; install one")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("command", ["run {} -p hello", "perplexity {} -f {}", "bench {}", "bench Q4_K"])
def test_a_command_without_a_gpu_says_so_in_one_line(command: str, model: Path, capsys: Any) -> None:
    arguments = command.replace("{} -f {}", f"{{}} -f {ROOT / 'README.md'}").format(model).split()
    assert main([*arguments, "--device", "cuda"]) == 2
    found = capsys.readouterr()
    assert found.err == "error: device 'cuda': no NVIDIA driver can be used; install one\n"
    assert found.out == ""


@pytest.mark.usefixtures("no_gpu")
def test_auto_is_the_cpu_where_cuda_cannot_be_used_and_says_why(model: Path, capsys: Any) -> None:
    assert main(["run", str(model), "-p", "The", "-n", "2", "--temp", "0", "--device", "auto"]) == 0
    found = capsys.readouterr()
    assert found.err.startswith("running on the CPU: no NVIDIA driver can be used; install one\n")
    own = bridge.Model.load(model, device="auto")
    assert own.device == "cpu"
    assert found.out == "The" + "".join(own.generate("The", 2, temperature=0)) + "\n"
    assert bridge.Model.load(model).note is None


def test_the_kind_of_cache_asked_for_is_the_device_s(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    given = []

    def decoder(file: Any, config: Any, context: int, kv: str, precision: str, device: str) -> None:
        given.append((kv, precision, device))
        raise BridgeError("enough")

    monkeypatch.setattr("bridge.cuda.toolchain.device.require", lambda device: device)
    monkeypatch.setattr("bridge.cuda.decoder.Decoder", decoder)
    assert main(["run", str(model), "-p", "The", "--device", "cuda:1", "--kv", "q8_0"]) == 2
    assert capsys.readouterr().err == "error: enough\n"
    with pytest.raises(BridgeError, match="enough"):
        bridge.Model.load(model, kv="f32", precision="f32", device="cuda")
    assert given == [("q8_0", "int8", "cuda:1"), ("f32", "f32", "cuda")]


def test_without_numba_cuda_the_extra_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.cuda.toolchain.device._missing", lambda: "numba-cuda is not installed; pip install x")
    with pytest.raises(BridgeError, match="numba-cuda is not installed; pip install x"):
        bridge.Model.load(model, device="cuda")


def test_the_check_for_gpus_says_what_is_missing_in_one_line() -> None:
    if available() is None:
        pytest.skip("there is a GPU here")
    script = ROOT / "scripts" / "gpu_check.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"no check: .+\n", done.stderr)


def test_a_step_of_an_8b_model_is_at_most_170_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its 32 layers and types: sizes change no launch, so they are small here."""
    from bridge.cuda.decoder import Decoder
    from bridge.cuda.toolchain.launch import Kernel

    from bridge.runtime.config.config_reader import read_config

    file = bridge.open_gguf(write_decoder(tmp_path / "8b.gguf", layers=32, types={"output": "Q8_0"}))
    mixed = bridge.open_gguf(write_decoder(tmp_path / "mixed.gguf", layers=32, types={"attn_v": "Q8_0"}))
    floats = bridge.open_gguf(write_decoder(tmp_path / "floats.gguf", layers=2, types={"attn_q": "F16"}))
    found = []
    with pretended_gpu(), monkeypatch.context() as patch:
        launched: list[bool] = []
        patch.setattr(Kernel, "run", lambda self, *given: launched.append(self.dependent))
        for one in (file, mixed, floats):
            for dependent in (False, True) if one is file else (True,):
                decoder = Decoder(one, read_config(one.metadata, one.path), 24, "f16", "int8", "cuda")
                decoder.dependent = dependent
                decoder.prepare()
                launched.clear()
                decoder._launch(None)
                assert set(launched) == {dependent}
            found.append(len(launched))
    # rows of two types are one launch; where torch multiplies (q of floats), the norm before it stays one
    assert found == [164, 164, 4 + 2 * 5 + 1]
    assert found[0] <= 170


def test_a_layer_of_a_prompt_of_16_tokens_is_8_launches_of_ours_and_few_of_torch_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model with normalized heads, biases and rows of two types, after other tokens: torch did 67 a layer."""
    import torch
    from bridge.cuda.decoder import Decoder
    from bridge.cuda.toolchain.launch import Kernel
    from torch.utils._python_dispatch import TorchDispatchMode

    from bridge.runtime.config.config_reader import read_config

    class Work(TorchDispatchMode):
        """Operations that take a launch on a GPU: neither views nor new memory."""

        done: ClassVar[list[str]] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            schema = function._schema
            if not any(r.alias_info for r in schema.returns) or function.overloadpacket is torch.ops.aten.copy_:
                self.done.append(schema.name)
            return function(*args, **kwargs or {})

    ran: list[str] = []
    monkeypatch.setattr("torch.empty", torch.zeros)  # no kernel runs: numbers must still be finite
    found = []
    for layers in (1, 3):
        options: dict[str, Any] = {"arch": "qwen3", "biases": ("attn_q", "attn_output", "ffn_down")}
        types = {"": "Q4_0", "attn_v": "Q8_0", "output": "Q8_0"}
        file = bridge.open_gguf(write_decoder(tmp_path / f"{layers}.gguf", layers=layers, types=types, **options))
        with pretended_gpu(), monkeypatch.context() as patch:
            patch.setattr(Kernel, "run", lambda self, *given: ran.append(self.name))
            decoder = Decoder(file, read_config(file.metadata, file.path), 64, "f16", "int8", "cuda")
            decoder.prepare()
            decoder.cache.length = 16
            ran.clear()
            Work.done.clear()
            with Work():
                decoder._prompt(list(range(16)), 1)
        work = [name for name in Work.done if name not in ("aten::zeros", "aten::scalar_tensor")]
        found.append((len(ran), len(work)))
    assert found[1][0] - found[0][0] == 2 * 9  # 8, and one more for v
    assert found[1][1] - found[0][1] <= 2 * 6


@pytest.mark.parametrize("arch", ["llama", "lfm2"])
def test_prepare_compiles_what_generating_launches(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from bridge.cuda.decoder import Decoder
    from bridge.cuda.toolchain.launch import Kernel

    from bridge.runtime.config.config_reader import read_config
    from bridge.runtime.sampling import Sampler, Sampling

    if arch == "llama":
        types = {"": "Q4_0", "attn_v": "Q5_0", "output": "Q8_0"}
        file = bridge.open_gguf(write_decoder(tmp_path / "tiny.gguf", types=types))
    else:  # its states are kept before a prompt's last token
        from tests.support.gpu.small_models import converted

        file = bridge.open_gguf(converted(arch, tmp_path, "Q4_0"))
    compiled: list[Any] = []
    compile = Decoder._compile
    with pretended_gpu(), monkeypatch.context() as patch:
        patch.setattr(Decoder, "_compile", compile)
        patch.setattr("bridge.cuda.decoder.compile_all", lambda kernels, capability, progress: compiled.extend(kernels))
        patch.setattr("bridge.cuda.decoder.LENGTHS", (1, 2, 4, 16, 65, 128))
        launched: list[Any] = []
        patch.setattr(Kernel, "run", lambda self, *given: launched.append(self))
        patch.setattr("torch.empty", torch.zeros)  # no kernel runs: logits must still be finite
        decoder = Decoder(file, read_config(file.metadata, file.path), 128, "f16", "int8", "cuda")
        decoder.prepare()
        assert not launched
        prompts = (1, Sampling(0)), (3, Sampling(0)), (12, Sampling(seed=1)), (100, Sampling(0, repeat_penalty=2.0))
        for length, how in prompts:
            assert len(list(islice(decoder.draw(range(length), Sampler(how)), 2))) == 2
    assert {kernel.name for kernel in launched} <= {kernel.name for kernel in compiled}
    assert len({kernel.name for kernel in launched}) > 12


def test_logits_of_many_positions_are_on_the_device_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from bridge.cuda.decoder import Decoder

    monkeypatch.setattr("bridge.cuda.decoder._SCORED", 8)
    parts: list[int] = []

    def multiply(states: Any) -> Any:
        parts.append(len(states))
        return torch.arange(5) + states[:, :1]

    decoder: Any = object.__new__(Decoder)
    decoder.cache, decoder._active = SimpleNamespace(length=0), nullcontext
    decoder._prompt = lambda tokens, keep: torch.arange(keep)[:, None].repeat(1, 4)
    decoder._logits = multiply
    found = decoder.scores(list(range(20)), 20)
    assert parts == [7, 7, 6]
    np.testing.assert_array_equal(found, np.arange(20)[:, None] + np.arange(5))


def test_a_long_prompt_takes_hardly_more_memory_than_a_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch allocates besides weights and cache; most of it grows with the tokens of a part."""
    import torch
    from bridge.cuda.decoder import Decoder, token_bytes
    from bridge.cuda.toolchain.launch import Kernel

    from bridge.runtime.config.config_reader import read_config

    def most(tokens: int) -> int:
        decoder.cache.length = 0
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            decoder._prompt([0] * tokens, 1)
        events = (event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
        return int(np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]).max())

    monkeypatch.setattr("bridge.cuda.decoder.BATCHES", (64,))
    monkeypatch.setattr("torch.empty", torch.zeros)  # no kernel runs: numbers must still be finite
    path = write_decoder(tmp_path / "tiny.gguf", hidden=256, inner=1024, types={"": "Q4_0"})
    file = bridge.open_gguf(path)
    with pretended_gpu(), monkeypatch.context() as patch:
        patch.setattr(Kernel, "run", lambda *given: None)
        decoder = Decoder(file, read_config(file.metadata, file.path), 512, "f16", "int8", "cuda")
        decoder.prepare()
        part, long = most(64), most(512)
        decoder.batch = 512
        whole = most(512)
    assert part > 64 * 4 * 2 * 1024  # gate and up
    assert long < 1.3 * part
    counted = token_bytes(decoder.config, 512, "int8")
    assert counted / 3 < (whole - part) / (512 - 64) < counted


@pytest.mark.parametrize(
    ("spare", "batch"),
    [(0, 512), (1024 * 512 - 1, 512), (1024 * 512, 1024), (1024 * 1536 - 1, 1024), (1024 * 1536, 2048)],
)
def test_prompts_go_through_in_batches_that_memory_suffices_for(
    spare: int, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`spare`: bytes beyond what batches of 512 need, at 1024 a token."""
    from bridge.cuda.decoder import _WORK, Decoder

    from bridge.runtime.config.config_reader import read_config

    file = bridge.open_gguf(write_decoder(tmp_path / "tiny.gguf"))
    monkeypatch.setattr("bridge.cuda.decoder.token_bytes", lambda *given: 1024)
    given = file, read_config(file.metadata, file.path), 64, "f16", "int8", "cuda"
    with pretended_gpu(), monkeypatch.context() as patch:  # undone before the GPU is
        needed = Decoder(*given).nbytes + _WORK
        patch.setattr("bridge.cuda.toolchain.device.Device.free", lambda device: needed + spare)
        assert Decoder(*given).batch == batch
        patch.setattr("bridge.cuda.toolchain.device.Device.free", lambda device: needed - 1)
        with pytest.raises(BridgeError, match="are free"):
            Decoder(*given)


@pytest.mark.parametrize(("kind", "copies"), [("f16", 0), ("q8_0", 1)])
def test_keys_and_values_of_a_prompt_are_not_repeated_for_the_query_heads_that_share_them(
    kind: str, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After other tokens; `copies`: what is made of keys and values besides steps, as q8_0 becomes halves."""
    import torch
    from bridge.cuda.attention.attention_kind import AttentionKind
    from bridge.cuda.attention.kv_cache import KVSlot
    from bridge.cuda.attention.prompt_attention import PromptAttention
    from torch.utils._python_dispatch import TorchDispatchMode

    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    heads, kv, head_dim, start, n = 8, 2, 32, 200, 3
    made: dict[int, int] = {}

    class Memory(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **kwargs or {})
            for part in found if isinstance(found, tuple) else (found,):
                if isinstance(part, torch.Tensor):
                    memory = part.untyped_storage()
                    made[memory.data_ptr()] = max(memory.nbytes(), made.get(memory.data_ptr(), 0))
            return found

    rng = torch.Generator().manual_seed(0)
    form = KVForm(kind, head_dim)
    cache = [torch.zeros(form.words(kv * 256), dtype=torch.int32) for _ in range(2)]
    for part in cache:
        form.store(part, 0, torch.randn((start, kv, head_dim), generator=rng))
    qkv = torch.randn((n, (heads + 2 * kv) * head_dim), generator=rng)
    cos, sin = torch.ones((256, head_dim // 2)), torch.zeros((256, head_dim // 2))
    config: Any = SimpleNamespace(stored={0: 0}, norm_eps=1e-6, attention_scale=0.2)
    monkeypatch.setattr(AttentionKind, "of", lambda *given: AttentionKind(head_dim, heads // kv, head_dim))
    slots: Any = SimpleNamespace(slots=[KVSlot(form, kv, 256, *cache)])
    positions: Any = SimpleNamespace(of=lambda layer: (cos.reshape(-1), sin.reshape(-1), None))
    with pretended_gpu() as gpu:
        prompt = PromptAttention(config, slots, positions, False, require("cuda"), start, n)
        mask = prompt.mask(AttentionKind.of(config, 0, False), "cpu")
        before = {x.untyped_storage().data_ptr() for x in (*cache, mask, qkv, cos, sin)}
        with Memory():
            y = prompt.attend(0, qkv)
    assert gpu.names == [f"_prepare_{head_dim}_4_{head_dim}_{kind}"]
    keys, values = (form.load(part, start + n, kv, torch.float64).repeat_interleave(4, 0) for part in cache)
    scores = qkv[:, : heads * head_dim].reshape(n, heads, head_dim).transpose(0, 1).double() @ keys.mT * 0.2
    later = torch.arange(start + n) > start + torch.arange(n)[:, None]
    expected = scores.masked_fill(later, -torch.inf).softmax(-1) @ values
    torch.testing.assert_close(y.double().reshape(n, heads, -1).transpose(0, 1), expected, rtol=0, atol=3e-3)
    once = 2 * kv * (start + n) * head_dim * 2
    small = 4 * 2 * n * heads * head_dim + once // 8  # queries, results, steps
    assert sum(nbytes for place, nbytes in made.items() if place not in before) <= copies * once + small


def test_a_decoder_works_on_one_stream_whichever_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply that nobody reads to its end leaves a step on its way, which writes to the cache, maybe a freed one."""
    from bridge.cuda.decoder import Decoder

    one, other, chosen = object(), object(), []

    @contextmanager
    def current(stream: Any) -> Iterator[None]:
        chosen.append(stream)
        yield
        chosen.append(None)

    monkeypatch.setattr("torch.cuda.stream", current)
    monkeypatch.setattr("torch.cuda.device", lambda index: nullcontext())
    decoder: Any = object.__new__(Decoder)
    decoder.device, decoder._stream = SimpleNamespace(index=0, active=nullcontext), None
    for stream in (one, one, other, other, one):
        monkeypatch.setattr("torch.cuda.current_stream", lambda stream=stream: stream)
        with decoder._active():
            assert chosen.pop() is one
        assert chosen.pop() is None


def test_spans_follow_the_multiprocessors_and_end_with_the_context() -> None:
    assert spans(132, 8, 8192) == 33  # of a KV head: two blocks for each multiprocessor
    assert spans(132, 8, 131072) == 33
    assert spans(132, 1, 131072) == 264  # more than a warp has lanes
    assert spans(132, 8, 1000) == 16  # of 64 positions
    assert spans(20, 32, 8192) == 1
    assert spans(20, 64, 8192) == 1


@pytest.mark.parametrize("kind", ["f16", "q8_0", "f32"])
def test_every_known_shape_of_heads_has_a_block_whose_shared_memory_a_kernel_may_declare(kind: str) -> None:
    known = [(64, 1), (64, 8), (80, 5), (96, 1), (128, 1), (128, 7), (128, 8), (128, 16), (256, 8), (256, 16), (512, 8)]
    for head_dim, group in known:
        assert supported(head_dim, group, kind)
        found = shape(KVForm(kind, head_dim), group)
        assert found.shared <= 48 << 10
        assert found.pitch % 2
        assert found.rows * found.quads <= 4 * found.threads  # loads that a thread keeps in registers
        cores = shape(KVForm(kind, head_dim), group, (8, 0))
        assert cores.cores == (kind != "f32" and head_dim % 32 == 0)
        assert not shape(KVForm(kind, head_dim), group, (7, 5)).cores
        assert cores.shared <= 48 << 10
    assert not supported(64, 65, kind)
    assert not supported(2048, 4, kind)


@pytest.mark.parametrize("kind", ["f16", "q8_0", "f32"])
def test_every_supported_head_has_a_block_that_a_gpu_takes(kind: str) -> None:
    """Threads, registers and shared memory of a block; on tensor cores as many registers as sums need unspilled."""
    cores = set()
    for head_dim in range(16, 2049, 16):
        for group in (*range(1, 13), 16, 20, 24, 32, 64):
            if not supported(head_dim, group, kind):
                continue
            found = shape(KVForm(kind, head_dim), group, (9, 0))
            assert found.threads <= 1024
            assert found.registers * found.threads <= 64 << 10
            assert found.shared <= 48 << 10
            if found.cores:
                cores.add((head_dim, group))
                assert 4 * found.sums <= found.registers
            else:
                assert found.sums <= 16
    assert ((512, 8) in cores) == ((256, 16) in cores) == (kind != "f32")
    assert not any(head_dim > 512 for head_dim, _ in cores)


@pytest.mark.xdist_group("attention")
@pytest.mark.parametrize(
    "name", ["llama 3, tensor cores", "llama 3, q8_0, tensor cores", "llama 3", "heads of 512, tensor cores"]
)
def test_shared_memory_of_a_shape_is_what_its_kernel_declares(name: str) -> None:
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    form = KVForm("q8_0" if "q8_0" in name else "f16", 512 if "512" in name else 128)
    expected = shape(form, 4, (8, 0) if "tensor cores" in name else (7, 5)).shared
    declared = parse(ptx_of(kernels(dependent=True)[name], (9, 0))).shared
    assert sum(nbytes for _, nbytes, _ in declared) == expected


# --- launches that begin while the one before them ends ---


def test_a_kernel_that_does_not_wait_or_takes_for_constant_what_others_make_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels of the decoder with what keeps them apart left out."""
    import numpy as np
    from bridge.cuda.forms.matrix import DeviceMatrix
    from bridge.cuda.product import matvec, matvec_kernel
    from bridge.cuda.product.activations import Records, quantizer
    from bridge.cuda.toolchain.launch import Kernel

    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    x, shape = np.ones((1, 64), np.float32), MatvecShape(2, 1, 1, 4)
    plain = quantizer("f32", True)
    with pretended_gpu(overlapping=True):
        hasty = Kernel(plain.function, plain.signature, dependent=True)
        monkeypatch.setattr("bridge.cuda.product.activations.quantizer", lambda *kind: hasty)
        with pytest.raises(GpuError, match=r"_quantize_f32_f32: .*global memory before griddepcontrol\.wait"):
            Records(64, 1, "cuda", "f32").quantize(x, 1, dependent=True)
    monkeypatch.undo()

    def step() -> list[str]:
        with pretended_gpu(overlapping=True) as gpu:
            matrix = DeviceMatrix.upload(random_matrix(TYPES["Q4_0"], 4, 64)[0], "cuda")
            records = Records(64, 1, "cuda", "f32").quantize(x, 1, dependent=True)
            matvec.launch(matrix, records, np.zeros((1, 4), np.float32), 1, 0, shape=shape, dependent=True)
            return gpu.dependent

    assert len(step()) == 2
    monkeypatch.setattr(matvec_kernel, "load_16f", matvec_kernel.cached_16f)
    monkeypatch.setattr(matvec, "kernel", matvec_kernel.kernel.__wrapped__)
    with pytest.raises(GpuError, match="4096 bytes that a launch stored are read past the coherent cache by another"):
        step()


# --- machine code ---


def kernels(dependent: bool = False) -> dict[str, Any]:
    """The model's own, for the shapes of known models: Llama 3 8B, Llama 2 7B, Qwen2.5 7B, Qwen3 8B, a head of 80."""
    from bridge.cuda import bench, norm, sampling
    from bridge.cuda.attention import attention, prompt_attention
    from bridge.cuda.attention.attention_kind import AttentionKind
    from bridge.cuda.forms import dequantize
    from bridge.cuda.product import activations, matvec, matvec_kernel

    def attend(
        head_dim: int, group: int, rotated: int, neighbours: bool, normed: bool, exact: bool, kv: str = "f16",
        cores: bool = False,
    ) -> Any:  # fmt: skip
        kind = AttentionKind(head_dim, group, rotated, neighbours, normed)
        return attention.kernel(kind, exact, kv, dependent, (8, 0) if cores else (7, 5))

    def product(type: str, exact: bool, epilogue: str) -> Any:
        return matvec_kernel.kernel(type, 1, MatvecShape(2, 1 if exact else 2, 1, 4), exact, epilogue, dependent)

    def pair(*types: str) -> Any:
        shapes = MatvecShape(2, 2, 1, 4), MatvecShape(2, 2, 4, 4)  # 5120 rows and 1024
        return matvec.pair_kernel(types, shapes, False, "bias_normed", dependent)

    return {
        "embedding": dequantize.kernel("Q4_K", "f32", True, dependent),
        "q, k, v": product("Q6_K", True, "bias_normed"),
        "q, k in Q4_K, v in Q6_K": pair("Q4_K", "Q6_K"),
        "q, k in Q3_K, v in Q5_K": pair("Q3_K", "Q5_K"),
        "q, k in IQ3_XXS, v in Q4_K": pair("IQ3_XXS", "Q4_K"),
        "records": activations.quantizer("f32", False, dependent),
        "output and down": product("Q4_K", False, "bias_accumulate_recorded_gain"),
        "gate and up": product("Q4_K", False, "silu_normed_recorded"),
        "llama 3": attend(128, 4, 128, True, False, False),
        "llama 3, tensor cores": attend(128, 4, 128, True, False, False, cores=True),
        "heads of 64, tensor cores": attend(64, 8, 64, True, False, False, cores=True),
        "heads of 256, tensor cores": attend(256, 2, 256, False, True, False, cores=True),
        "heads of 512, tensor cores": attend(512, 4, 512, False, True, False, cores=True),
        "heads of 512, q8_0, tensor cores": attend(512, 4, 512, False, True, False, "q8_0", cores=True),
        "llama 3, q8_0, tensor cores": attend(128, 4, 128, True, False, False, "q8_0", cores=True),
        "heads of 64, q8_0, tensor cores": attend(64, 8, 64, True, False, False, "q8_0", cores=True),
        "heads of 256, q8_0, tensor cores": attend(256, 2, 256, False, True, False, "q8_0", cores=True),
        "llama 2": attend(128, 1, 128, True, False, False),
        "qwen2": attend(128, 7, 128, False, False, True),
        "qwen3": attend(128, 4, 128, False, True, False),
        "heads of 64": attend(64, 8, 64, True, False, False),
        "heads of 80": attend(80, 5, 40, False, False, False),
        "llama 3, q8_0": attend(128, 4, 128, True, False, False, "q8_0"),
        "llama 3, f32": attend(128, 4, 128, True, False, False, "f32"),
        "qwen2, q8_0": attend(128, 7, 128, False, False, True, "q8_0"),
        "heads of 64, q8_0": attend(64, 8, 64, True, False, False, "q8_0"),
        "heads of 80, q8_0": attend(80, 5, 40, False, False, True, "q8_0"),
        "prompts": prompt_attention.kernel(AttentionKind(128, 4, 128, True), False, "f16"),
        "prompts, q8_0": prompt_attention.kernel(AttentionKind(128, 7, 128, False, True), False, "q8_0"),
        "norm": norm.norm_kernel(4096, False, dependent),
        "norm, floats": norm.norm_kernel(5120, True, dependent),
        "norm of a normalized sum": norm.norm_kernel(2560, False, dependent, "normed"),
        "layer norm": norm.norm_kernel(8192, False, dependent, "as it is", True, True, True),
        "no norm": norm.norm_kernel(4096, False, dependent, "as it is", weighted=False),
        "silu": norm.activation_kernel(False, dependent),
        "greedy": sampling.greedy_kernel(sampling.GREEDY_THREADS, dependent),
        "draw": sampling.draw_kernel(sampling.DRAW_THREADS, dependent),
        "read": bench._reader(),
    }


# other shapes of what is compiled in any case
ALIKE = {"llama 2", "qwen2", "qwen3", "heads of 64", "heads of 80"}
ALIKE |= {
    "heads of 64, tensor cores",
    "heads of 256, tensor cores",
    "q, k in Q3_K, v in Q5_K",
    "q, k in IQ3_XXS, v in Q4_K",
    "heads of 64, q8_0, tensor cores",
    "heads of 256, q8_0, tensor cores",
    "heads of 512, q8_0, tensor cores",
    "prompts, q8_0",
    "llama 3, f32",
    "qwen2, q8_0",
    "heads of 64, q8_0",
    "heads of 80, q8_0",
}


@pytest.mark.xdist_group("attention")
@pytest.mark.parametrize(
    ("capability", "alike"),
    [
        pytest.param((9, 0), {False}, id="9.0"),
        pytest.param((9, 0), {True}, id="9.0, other shapes", marks=pytest.mark.exhaustive),
        pytest.param((10, 0), {False, True}, id="10.0", marks=pytest.mark.exhaustive),
        pytest.param((12, 0), {False, True}, id="12.0", marks=pytest.mark.exhaustive),
        pytest.param((8, 9), {False, True}, id="8.9", marks=pytest.mark.exhaustive),
        pytest.param((8, 0), {False, True}, id="8.0", marks=pytest.mark.exhaustive),
        pytest.param((7, 5), {False, True}, id="7.5", marks=pytest.mark.exhaustive),
    ],
)
def test_machine_code_keeps_everything_in_registers(capability: tuple[int, int], alike: set[bool]) -> None:
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    for name, kernel in kernels(dependent=capability >= (9, 0)).items():
        if (name in ALIKE) not in alike or kernel.oldest > capability:
            continue
        made = assembled(ptx_of(kernel, min(capability, (9, 0))), capability, kernel.registers)
        ways = 2 if ", v in" in name else 1  # blocks of one type or the other
        assert made.ptx.count("griddepcontrol.wait") == ways * kernel.dependent, name
        assert (made.stack, made.spills) == (0, 0), name
        assert ".local" not in made.ptx, name
        assert made.registers <= kernel.registers, name


@pytest.mark.xdist_group("attention")
@pytest.mark.parametrize(
    "name",
    [
        "llama 3, tensor cores",
        "llama 3, q8_0, tensor cores",
        pytest.param("llama 3, q8_0", marks=pytest.mark.exhaustive),
        pytest.param("llama 3", marks=pytest.mark.exhaustive),
        pytest.param("llama 3, f32", marks=pytest.mark.exhaustive),
    ],
)
def test_keys_are_loaded_sixteen_bytes_at_a_time_and_not_past_what_the_step_has_stored(name: str) -> None:
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    ptx = ptx_of(kernels(dependent=True)[name], (9, 0))
    assert len(re.findall(r"ld\.global\.v4\.u32", ptx)) >= (2 if "q8_0" in name else 4)
    assert ptx.count("mma.sync") == (16 if "tensor cores" in name else 0)  # of 8 positions, and of 16 columns
    assert "ld.global.nc" not in ptx
    # the count of finished spans: released by one thread, acquired in the last block alone
    assert len(re.findall(r"atom\.release\.gpu", ptx)) == len(re.findall(r"fence\.acq_rel\.gpu", ptx)) == 1
    assert "membar" not in ptx
