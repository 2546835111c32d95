"""Damages checkpoints of every format, GGUFs, adapters and importance matrices at random, and runs the program on them.

    python -m tests.support.mutations [--count N] [--first SEED] [--only KIND ...]

Each mutation has a number, so a finding can be made again: `--first SEED --count 1`. A finding is an error that the
program calls unexpected, a refusal of more than one line, a GGUF or checkpoint that is written with values that are not
finite, or 60 seconds of CPU time. Prints findings as they come; the exit code is 1 where there are any.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np

import bridge
from bridge.cli import main
from bridge.errors import BridgeError
from tests.conftest import ROOT
from tests.support import (
    encode,
    encode_compressed,
    encode_formats,
    encode_fp4,
    encode_legacy,
    encode_trellis,
    make_families,
)
from tests.support.adapters import low_rank, write_adapter
from tests.support.corpus import unfold
from tests.support.raw import Raw, edit_raw
from tests.support.tiny_models import save_model

SECONDS = 60.0  # of CPU time, after which a mutation is a finding
HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**63, 10**30, 0.0, -0.5, 1e-9, 1e308, math.inf, math.nan,
    "", "x", "0", "a" * 3000, "../x", "\ud800", "model", "int4", "float8_e4m3fn", [], [[]], {}, [None], {"": None},
    [1, 2], ["re:(a+)+$"], {"re:.*": {"bits": 4}},
)  # fmt: skip
FAMILIES = (
    "gemma3", "gemma4-moe", "phi3-longrope", "deepseek3", "gpt-oss", "qwen3-next", "granite-4", "olmo3", "llama4",
    "lfm2-moe", "falcon-h1", "glm4-moe", "hunyuan", "gpt2",
)  # fmt: skip
_DTYPES = (
    "F64",
    "F32",
    "F16",
    "BF16",
    "I64",
    "I32",
    "I16",
    "I8",
    "U8",
    "BOOL",
    "F8_E4M3",
    "F8_E5M2",
    "U16",
    "U32",
    "X9",
)


class Seeds:
    """What is damaged: folders of a kind and a name, each made when it is first wanted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[str, str], Path] = {}
        data = ROOT / "tests/data"
        self._makers: dict[tuple[str, str], Callable[[Path], Any]] = {
            ("checkpoint", name): maker for name, maker in self._checkpoints().items()
        }
        self._makers |= {("checkpoint", name): partial(make_families.save_checkpoint, name) for name in FAMILIES}
        tools = (*sorted((data / "tools").iterdir()), data / "hqq", data / "hqq/pt", data / "hqq/meta", data / "mlx")
        self._makers |= {("modules", home.name): partial(_files_of, home) for home in tools}
        outlines = sorted((data / "corpus").glob("*.json"))
        self._makers |= {("outline", file.stem): partial(unfold, json.loads(file.read_text())) for file in outlines}
        for name, more in {"float": {"type": "Q4_K"}, "mixture": {"type": "Q8_0"}, "gptq": {}, "mlx fp4": {}}.items():
            self._makers["gguf", name] = partial(self._convert, name, **more)
        self._makers |= {("gguf", name): partial(self._convert, name, type="F16") for name in FAMILIES}
        self._makers["adapter", "lora"] = _save_adapter
        self._makers["imatrix", "gguf"] = _save_imatrix

    def names(self, kind: str) -> list[str]:
        return [name for k, name in self._makers if k == kind]

    def place(self, kind: str, name: str) -> Path:
        """The folder, which nobody may change."""
        if (kind, name) not in self._made:
            place = self._folder / f"{kind} {name}"
            with contextlib.redirect_stderr(io.StringIO()):  # progress bars
                self._makers[kind, name](place)
            self._made[kind, name] = place
        return self._made[kind, name]

    @property
    def llama(self) -> Path:
        return self.place("checkpoint", "float")

    def _checkpoints(self) -> dict[str, Callable[[Path], Any]]:
        coding = encode_trellis.Coding("mcg", 2, multiplier=0xCBAC1FED)

        def exl3(name: str, weight: np.ndarray, number: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
            return encode_trellis.exl3_tensors(name, weight, coding, search=False, seed=number)

        def legacy(to: Path) -> None:
            encode_legacy.config_folder(to, self.llama)
            encode_legacy.write_legacy(to / "model-4bit-128g.pt", encode.load_floats(self.llama), "g_idx", 4, 128)

        return {
            "float": lambda to: save_model(to, "LlamaConfig", num_hidden_layers=1),
            "mixture": lambda to: save_model(
                to, "Qwen3MoeConfig", num_hidden_layers=1, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
                moe_intermediate_size=256, head_dim=64,
            ),
            "gptq": lambda to: encode.write_gptq(to, self.llama),
            "gptq_v2, act-order": lambda to: encode.write_gptq(
                to, self.llama, sym=False, desc_act=True, group_size=64, checkpoint_format="gptq_v2"
            ),
            "gptq_p": lambda to: encode.write_gptq(to, self.llama, bits=3, checkpoint_format="gptq_p"),
            "gptq, two files": lambda to: encode.write_gptq(to, self.llama, bits=8, shards=2),
            "awq": lambda to: encode.write_awq(to, self.llama),
            "awq, gemv": lambda to: encode.write_awq(to, self.llama, "gemv"),
            "packed": lambda to: encode_compressed.write_packed(to, self.llama, 4),
            "int8": lambda to: encode_compressed.write_int8(to, self.llama),
            "mixed": lambda to: encode_compressed.write_mixed(to, self.llama),
            "float8": lambda to: encode_compressed.write_float8(to, self.llama, (128, 128)),
            "fp8": lambda to: encode_compressed.write_float8(to, self.llama, (128, 128), "fp8"),
            "mlx": lambda to: encode_formats.write_mlx(to, self.llama),
            "mxfp8": lambda to: encode_formats.write_mxfp8(to, self.llama),
            "hqq": lambda to: encode_formats.write_hqq(to, self.llama),
            "hqq, pt": lambda to: encode_formats.write_hqq_pt(to, self.llama),
            "marlin": lambda to: encode_formats.write_marlin(to, self.llama),
            "auto-round": lambda to: encode_formats.write_auto_round(to, self.llama, "auto_round:auto_gptq"),
            "modelopt": lambda to: encode_fp4.write_modelopt(to, self.llama),
            "modelopt, mixed": lambda to: encode_fp4.write_modelopt_mixed(to, self.llama),
            "nvfp4": lambda to: encode_fp4.write_compressed(to, self.llama, "nvfp4"),
            "mxfp4": lambda to: encode_fp4.write_compressed(to, self.llama, "mxfp4"),
            "mlx fp4": lambda to: encode_fp4.write_mlx_fp4(to, self.llama, "mxfp4"),
            "exl3": lambda to: encode_trellis.write_trellis(
                to, self.llama, exl3, {"quantization_config": encode_trellis.EXL3}
            ),
            "legacy": legacy,
        }  # fmt: skip

    def _convert(self, name: str, place: Path, **options: Any) -> None:
        home = self.place("checkpoint", name)
        place.mkdir()
        bridge.convert(home, place / "model.gguf", **options)


def _files_of(home: Path, place: Path) -> None:
    place.mkdir()
    for file in home.iterdir():
        if file.is_file() and file.suffix != ".npz":
            shutil.copyfile(file, place / file.name)


def _save_adapter(place: Path) -> None:
    shapes = {"model.layers.0.self_attn.q_proj": (256, 256), "model.layers.0.mlp.down_proj": (256, 256)}
    write_adapter(place, low_rank(shapes), rank_pattern={"q_proj": 4}, alpha_pattern={"down_proj": 16})


def _save_imatrix(place: Path) -> None:
    place.mkdir()
    writer = gguf.GGUFWriter(str(place / "imatrix.gguf"), "imatrix")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["x"])
    writer.add_uint32("imatrix.chunk_count", 2)
    writer.add_uint32("imatrix.chunk_size", 512)
    for part in ("attn_q", "ffn_down"):
        writer.add_tensor(f"blk.0.{part}.weight.in_sum2", np.full((1, 256), 2, np.float32))
        writer.add_tensor(f"blk.0.{part}.weight.counts", np.full((1, 1), 2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def damage_json(file: Path, rng: random.Random) -> str:
    """Change, remove or exchange one value somewhere in a JSON file; those near the root are likelier."""
    values = json.loads(file.read_text())
    holder: Any = None
    key: Any = None
    found = values
    while isinstance(found, (dict, list)) and found and (holder is None or rng.random() < 0.7):
        key = rng.choice(list(found) if isinstance(found, dict) else range(len(found)))
        holder, found = found, found[key]
    if holder is None:
        return f"{file.name} is empty"
    where = f"{file.name}: {str(key)[:60]}"
    action = rng.random()
    if action < 0.2:
        del holder[key]
        what = f"{where} removed"
    elif action < 0.35 and isinstance(found, (int, float)) and not isinstance(found, bool):
        holder[key] = rng.choice([found + 1, found - 1, -found, found * 2, found / 2, found // 2, str(found), [found]])
        what = f"{where} = {holder[key]!r:.40}"
    elif action < 0.45 and isinstance(holder, dict):
        holder[rng.choice(list(holder))] = found
        what = f"{where} stands elsewhere, too"
    else:
        holder[key] = rng.choice(HOSTILE)
        what = f"{where} = {holder[key]!r:.40}"
    file.write_text(json.dumps(values))
    return what


def damage_tensors(file: Path, rng: random.Random) -> str:
    """Change one tensor of a safetensors file: its entry in the header, or its data."""
    said = ""

    def change(tensors: Raw) -> None:
        nonlocal said
        name = rng.choice(list(tensors))
        entry, data = tensors[name]
        action = rng.choice(("remove", "rename", "exchange", "dtype", "shape", "size", "data", "data", "data"))
        said = f"{name}: {action}"
        if action == "remove":
            del tensors[name]
        elif action == "rename":
            tensors[name + rng.choice(("x", ".weight", "_2", ""))[:9]] = tensors.pop(name)
        elif action == "exchange":
            other = rng.choice(list(tensors))
            tensors[name], tensors[other] = tensors[other], tensors[name]
            said += f" with {other}"
        elif action == "dtype":
            entry["dtype"] = rng.choice(_DTYPES)
            if rng.random() < 0.5:
                entry["shape"] = [len(data)]
            said += f" {entry['dtype']}"
        elif action == "shape":
            shape = list(entry["shape"]) or [1]
            rng.shuffle(shape)
            entry["shape"] = rng.choice(
                (shape, shape[::-1], [*shape, 1], [1, *shape], shape[1:], [math.prod(shape)], [0])
            )
            if len(shape) == 2 and rng.random() < 0.5 and shape[0] % 2 == 0:
                entry["shape"] = [shape[0] // 2, shape[1] * 2]
            said += f" {entry['shape']}"
        elif action == "size":  # shape and data agree
            size = math.prod(entry["shape"]) or 1
            part = rng.choice((0, 1, max(size // 2, 1)))
            entry["shape"], entry_bytes = [part], len(data) // size * part
            tensors[name] = (entry, data[:entry_bytes])
        else:
            tensors[name] = (entry, damaged_bytes(data, rng))

    edit_raw(file, change)
    return f"{file.name}: {said}"


def damaged_bytes(data: bytes, rng: random.Random) -> bytes:
    """As many bytes: others, all alike, or with a few that are NaN or infinite in some float type."""
    found = bytearray(data)
    action = rng.randrange(5)
    if action == 0:
        return bytes([rng.choice((0, 0xFF, 0x7F, 0x80))]) * len(found)
    if action == 1:
        return rng.randbytes(len(found))
    for _ in range(rng.choice((1, 3, 30))):
        if not found:
            break
        at = rng.randrange(len(found))
        word = rng.choice(
            (b"\xff", b"\x00\x7e", b"\x00\x7c", b"\xc0\x7f", b"\x80\x7f", b"\x00\x00\x80\x7f", rng.randbytes(4))
        )
        at -= at % len(word)
        found[at : at + len(word)] = word[: len(found) - at]
    return bytes(found)


def damage_file(file: Path, rng: random.Random) -> str:
    """Cut a file, empty it, remove it, name it otherwise, add to it, or change single bytes of it."""
    action = rng.choice(("cut", "emptied", "removed", "renamed", "longer", "bytes"))
    data = file.read_bytes()
    if action == "removed":
        file.unlink()
    elif action == "renamed":
        file.rename(file.with_name("x" + file.name))
    elif action == "emptied":
        file.write_bytes(b"")
    elif action == "longer":
        file.write_bytes(data + rng.randbytes(rng.choice((1, 100))))
    elif action == "cut":
        file.write_bytes(data[: rng.randrange(len(data) + 1)])
    else:
        file.write_bytes(damaged_bytes(data[:4000], rng) + data[4000:])
    return f"{file.name}: {action}"


def damage_gguf(file: Path, rng: random.Random) -> str:
    """Change a value, a length or a type in a GGUF's header, or the data of a tensor, in place."""
    reader = gguf.GGUFReader(file, "r+")
    if rng.random() < 0.3:
        tensor = rng.choice(reader.tensors)
        if rng.random() < 0.5:
            flat = tensor.data.reshape(-1).view(np.uint8)
            flat[:] = np.frombuffer(damaged_bytes(flat.tobytes(), rng), np.uint8)
            said = f"{tensor.name}: data"
        else:
            part = rng.choice(tensor.field.parts)
            said = f"{tensor.name}: {_damage_array(part, rng)}"
    else:
        field = rng.choice(list(reader.fields.values()))
        parts = field.parts if rng.random() < 0.3 or not field.data else [field.parts[rng.choice(field.data)]]
        said = f"{field.name}: {_damage_array(rng.choice(parts), rng)}"
    del reader
    return f"{file.name}: {said}"


def _damage_array(part: np.ndarray, rng: random.Random) -> str:
    if not part.size:
        return "empty"
    at = rng.randrange(part.size)
    if part.dtype.kind == "f":
        part[at] = rng.choice((0, -1, 1e-30, 1e30, math.inf, math.nan, float(part[at]) * 2))
    else:
        top = 2 ** (8 * part.dtype.itemsize)
        new = (
            rng.choice((0, 1, 2, 3, 17, int(part[at]) + 1, int(part[at]) * 2, top - 1, top // 2, rng.randrange(top)))
            % top
        )
        part[at : at + 1].view(f"u{part.dtype.itemsize}")[0] = new
    return f"[{at}] = {part[at]}"


def damage(folder: Path, kind: str, rng: random.Random) -> str:
    """One to three damages of a copy; what they are."""
    said = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        files = sorted(f for f in folder.iterdir() if f.is_file())
        texts = [f for f in files if f.suffix == ".json"]
        weights = [f for f in files if f.suffix == ".safetensors"]
        action = rng.random()
        try:
            if kind in ("gguf", "imatrix"):
                said.append((damage_gguf if action < 0.9 else damage_file)(rng.choice(files), rng))
            elif texts and (action < 0.5 or kind == "outline"):
                small = [f for f in texts if "tokenizer" not in f.name and "index" not in f.name]
                said.append(damage_json(rng.choice(small if small and rng.random() < 0.75 else texts), rng))
            elif weights and action < 0.93:
                said.append(damage_tensors(rng.choice(weights), rng))
            else:
                said.append(damage_file(rng.choice(files), rng))
        except (ValueError, IndexError, KeyError, OverflowError):  # what an earlier one left is no such file any more
            said.append("nothing more")
    return "; ".join(said)


def command(kind: str, place: Path, seeds: Seeds, out: Path, rng: random.Random) -> list[object]:
    """The program's arguments for a damaged folder."""
    new, file = out / "new.gguf", place / "model.gguf"
    if kind == "checkpoint":
        return ["convert", place, new, *rng.choice(([], [], ["--exact"], ["--type", "Q4_K"], ["--type", "F16"]))]
    if kind == "outline":
        return ["plan", place]
    if kind == "adapter" and rng.random() < 0.5:
        return ["convert-lora", place, new, "--base", seeds.llama]
    if kind == "adapter":
        return ["convert", seeds.llama, new, "--merge", place, "--type", "Q8_0"]
    if kind == "imatrix":
        return ["convert", seeds.llama, new, "--type", "Q4_K", "--imatrix", place / "imatrix.gguf"]
    form = rng.choice(("gptq_v2", "mlx", "floats", "awq", "compressed-tensors"))
    uses: tuple[list[object], ...] = (
        ["inspect", file],
        ["run", file, "-p", "The king", "-n", "2"],
        ["export", file, out / "new", "--format", form],
        ["export", file, out / "new", "--dtype", rng.choice(("F32", "BF16", "F16"))],
        ["convert", file, new, "--type", rng.choice(("Q4_0", "Q8_0", "F16", "BF16"))],
        ["edit", file, "--set", "general.name=x", "-o", out / "edited"],
    )
    return rng.choice(uses)


def _written(out: Path) -> str:
    """What is wrong with what a run wrote: values that are not finite."""
    for file in out.rglob("*"):
        if file.suffix == ".gguf":
            with bridge.open_gguf(file) as opened:
                for name in opened:
                    if not np.isfinite(opened[name].dequantize()).all():
                        return f"{name} is written with values that are not finite"
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            for name, tensor in load_file(file).items():
                if tensor.is_floating_point() and not tensor.float().isfinite().all():
                    return f"{name} is written with values that are not finite"
    return ""


def attempt(arguments: list[object], out: Path) -> tuple[str, str]:
    """How a run ended ("accepted", "refused"), and the finding, "" without one."""
    errors = io.StringIO()
    started = time.process_time()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            code = main([str(a) for a in arguments])
    except SystemExit as ended:  # of --help alone
        return "ended", f"SystemExit {ended.code}"
    seconds = time.process_time() - started
    said = [line for line in errors.getvalue().splitlines() if line.startswith("error: ")]
    if "please report it" in errors.getvalue() or "Traceback" in errors.getvalue():
        return "refused", errors.getvalue()[-600:]
    if code == 2 and len(said) != 1:
        return "refused", f"{len(said)} lines of error: {errors.getvalue()[-600:]}"
    if seconds > SECONDS:
        return "slow", f"{seconds:.0f} s of CPU time"
    return ("refused", "") if code else ("accepted", _written(out))


def read_modules(place: Path) -> tuple[str, str]:
    """Opens a folder that is no whole model, and reads all of it."""
    started = time.process_time()
    try:
        with bridge.open_checkpoint(place) as checkpoint:
            for name in checkpoint.modules:
                if not np.isfinite(checkpoint.read_module(name).dequantize()).all():
                    return "accepted", f"{name} is read with values that are not finite"
    except BridgeError as problem:
        return "refused", "a message of several lines" if "\n" in str(problem) else ""
    except Exception as problem:  # what a caller would see
        return "refused", "".join(traceback.format_exception(problem))[-700:]
    seconds = time.process_time() - started
    return ("slow", f"{seconds:.0f} s of CPU time") if seconds > SECONDS else ("accepted", "")


def mutate(number: int, seeds: Seeds, kinds: list[str]) -> tuple[str, str, str]:
    """One mutation: its kind and damage, how the run ended, and the finding."""
    rng = random.Random(number)
    kind = rng.choices(kinds, [KINDS[k] for k in kinds])[0]
    name = rng.choice(seeds.names(kind))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "damaged"
        shutil.copytree(seeds.place(kind, name), place, copy_function=_copy)
        out = Path(folder) / "out"
        out.mkdir()
        said = f"{kind} {name}: {damage(place, kind, rng)}"
        if kind == "modules":
            return said, *read_modules(place)
        arguments = command(kind, place, seeds, out, rng)
        return f"{said} [{' '.join(str(a).removeprefix(folder) for a in arguments)}]", *attempt(arguments, out)


def _copy(source: str, target: str) -> None:
    """Weights that keep their holes as they are linked, all else copied: an outline's weights are not damaged."""
    if os.path.getsize(source) > 2**24:
        os.link(source, target)
    else:
        shutil.copyfile(source, target)


# a kind of what is damaged -> how often it is chosen
KINDS = {"checkpoint": 10, "modules": 5, "outline": 1, "adapter": 2, "imatrix": 1, "gguf": 8}


def run(count: int, first: int, kinds: list[str]) -> int:
    """Mutations `first` to `first + count - 1`; prints findings, and returns how many there are."""
    ends: Counter[str] = Counter()
    findings = 0
    with tempfile.TemporaryDirectory() as folder:
        seeds = Seeds(Path(folder))
        for number in range(first, first + count):
            said, ended, finding = mutate(number, seeds, kinds)
            ends[ended] += 1
            if finding:
                findings += 1
                print(f"{number}: {said}\n    {finding}", flush=True)
            if (number + 1 - first) % 100 == 0:
                print(f"{number + 1 - first} of {count}", file=sys.stderr, flush=True)
    print(f"{count} mutations: {', '.join(f'{n} {end}' for end, n in ends.items())}; {findings} findings")
    return findings


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    given = parser.parse_args()
    sys.exit(run(given.count, given.first, given.only) > 0)
