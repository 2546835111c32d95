"""The options that commands share: how they are asked for, and what they come to as arguments of the calls."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from bridge.blocks import TYPES
from bridge.errors import BridgeError


def add_config(p: argparse.ArgumentParser) -> None:
    """Where config and tokenizer are, for weights that came without."""
    p.add_argument(
        "--config",
        metavar="DIR",
        type=Path,
        help="folder with config.json and tokenizer, for a bare .pt or .safetensors that came without them: that of "
        "the model it was made from",
    )


def as_flag(name: str, value: object = None) -> str:
    """How the command line spells an argument of Python."""
    flag = f"--{name.replace('_', '-')}"
    return flag if value is None or value is True else f"{flag} {value}"


def add_calibration(p: argparse.ArgumentParser, text: str) -> None:
    """The options of `bridge.conversion.calibrate_plan.Calibration`."""
    group = p.add_argument_group("calibration")
    group.add_argument("--calibrate", metavar="FILE", type=Path, help=text)
    group.add_argument("--samples", type=positive, metavar="N", help="sequences at most (default: 128)")
    group.add_argument("--sequence-length", type=positive, metavar="N", help="tokens in each (default: 2048)")
    group.add_argument("--seed", type=int, metavar="N", help="choose sequences at random (default: the first ones)")
    group.add_argument(
        "--method",
        metavar="NAME",
        help="gptaq (default): GPTQ that makes good what the layers before have lost; gptq; awq; rtn: round to nearest",
    )
    group.add_argument("--act-order", metavar="ORDER", help="of columns: none, free, static or fixed (default: fixed)")
    group.add_argument("--damping", type=float, metavar="X", help="of H, times its mean diagonal (default: 0.01)")
    group.add_argument(
        "--alpha", type=float, metavar="X", help="the most of the loss that gptaq makes good (default: 1)"
    )
    group.add_argument("--sweeps", type=_count, metavar="N", help="of refinement after GPTQ (default: 2)")
    group.add_argument("--feed", metavar="WHAT", help="the next layer's inputs: of quantized (default) or float layers")
    group.add_argument("--device", metavar="NAME", help="cpu (default) or cuda")
    group.add_argument("--offload", metavar="DIR", type=Path, help="keep activations in this folder, not in memory")
    group.add_argument(
        "--imatrix-out", metavar="FILE", type=Path, help="write llama.cpp's imatrix of the same tokens too"
    )


def add_budget(p: argparse.ArgumentParser, requantize: bool = False) -> None:
    """The options of `bridge.conversion.size_budget.Budget`."""
    group = p.add_argument_group("size budget (with --calibrate)")
    group.add_argument(
        "--size",
        metavar="SIZE",
        type=_size,
        help="of the whole file, e.g. 4.2G, never exceeded: each tensor gets the type with which the model loses least",
    )
    group.add_argument("--bpw", type=float, metavar="X", help="instead of --size: bits a weight over all tensors' data")
    group.add_argument("--plan-out", metavar="PLAN.json", type=Path, help="write the types found, and KL against size")
    group.add_argument(
        "--swaps", type=_count, metavar="N", help="trial models that are measured to better them (default: 24)"
    )
    if requantize:
        group.add_argument(
            "--requantize", action="store_true", help="choose types for tensors that could keep their codes too"
        )


def budget(a: argparse.Namespace, progress: Any) -> Any:
    """What `add_budget` asked for, as `convert` takes it; None where it asked for nothing."""
    given = {name: getattr(a, name) for name in ("plan_out", "swaps", "requantize") if getattr(a, name, None)}
    if a.swaps is not None:
        given["swaps"] = a.swaps
    if a.size is None and a.bpw is None:
        if given:
            raise BridgeError(f"--{next(iter(given)).replace('_', '-')} is for a size budget: give --size or --bpw")
        return None
    from bridge.conversion.size_budget import Budget

    return Budget(a.size, a.bpw, **given, progress=progress)


def add_choices(p: argparse.ArgumentParser) -> None:
    """The options that decide what a plan says."""
    types = add_types(
        p,
        "auto",
        "auto (default): the smallest K-quant (Q8_0 for 8 bits) that keeps the codes and adds under 1%% of the "
        "checkpoint's own quantization noise, or where no type does, the smallest that adds under 15%%, Q8_0 at worst; "
        f"a block type ({', '.join(TYPES)}); or a llama.cpp preset (Q4_K_M, Q3_K_L, ...): its "
        "mixture for tensors that arrive as floats, and an upper bound for those that arrive as codes",
    )
    types.add_argument(
        "--exact", action="store_true", help="the smallest bit-exact type of each tensor, auto's where there is none"
    )
    types.add_argument(
        "--detect-lattice",
        action="store_true",
        help="look for floats that lie on a hidden grid (models that somebody dequantized, or trained for it), and "
        "carry the codes that they stand for; `inspect` says where there are any",
    )
    types.add_argument(
        "--for",
        dest="target",
        metavar="llama.cpp@BUILD",
        help="what must load the file. Since build 10015 (July 2026) llama.cpp has Q2_0, 2.25 bits a weight, which "
        "holds symmetric 2-bit codes bit for bit: auto takes it for such builds alone, --exact unless an earlier one "
        "is named",
    )
    types.add_argument(
        "--actorder-type",
        metavar="TYPE",
        help="of act-order tensors, whose codes GGUF cannot hold (default: the smallest that adds under 15%% of "
        "the noise)",
    )
    types.add_argument(
        "--imatrix",
        metavar="FILE",
        type=Path,
        help="llama.cpp's importance matrix (GGUF), for tensors that are requantized",
    )
    add_file(p)


def add_types(p: argparse.ArgumentParser, default: str | None, help: str) -> Any:
    """The types that are asked for by name; returns the group."""
    types = p.add_argument_group("types")
    types.add_argument("--type", default=default, metavar="TYPE", help=help)
    types.add_argument(
        "--output-type", metavar="TYPE", help="of the output head: a block type, F16, BF16 or F32 (default: by --type)"
    )
    types.add_argument("--token-embd-type", metavar="TYPE", help="of the token embeddings, likewise")
    types.add_argument(
        "--tensor-type",
        action="append",
        default=[],
        metavar="REGEX=TYPE",
        type=_pair,
        help="of tensors whose GGUF name matches, e.g. 'ffn_down=Q6_K'; may be repeated, the last match wins",
    )
    return types


def add_file(p: argparse.ArgumentParser) -> None:
    """What else decides on the GGUF."""
    p.add_argument(
        "--template",
        metavar="MODEL.gguf",
        help="a GGUF that llama.cpp's converter made of the same model, in any type, or a Hub repository that has some "
        "(org/model-GGUF: the smallest file that will do): for architectures that are not known here. Names, metadata "
        "and tokenizer are taken from it, and tensors that are not in the checkpoint",
    )
    p.add_argument(
        "--split-max-size", metavar="SIZE", type=_size, help="write shards of at most this size, e.g. 4G or 500M"
    )
    p.add_argument(
        "--pre", metavar="NAME", help="tokenizer.ggml.pre, where the pre-tokenizer is not recognised (e.g. qwen2)"
    )


def add_output(p: argparse.ArgumentParser) -> None:
    """What is written, and by how many threads."""
    output = p.add_argument_group("output")
    output.add_argument("--force", action="store_true", help="replace files that exist")
    output.add_argument("--modelfile", action="store_true", help="write an Ollama Modelfile beside the GGUF")
    output.add_argument("--report", metavar="FILE.json", type=Path, help="write the fidelity of each tensor as JSON")
    output.add_argument("--threads", type=positive, metavar="N", help="worker threads (default: one per CPU)")


def choices(a: argparse.Namespace) -> dict[str, Any]:
    """What `add_choices` asked for, as `convert` takes it."""
    if a.exact and a.type != "auto":
        raise BridgeError("--exact and --type ask for different things; give one")
    names = (
        "output_type", "token_embd_type", "actorder_type", "target", "detect_lattice", "imatrix", "pre", "template",
        "split_max_size",
    )  # fmt: skip
    given = {name: getattr(a, name) for name in names}
    return {**given, "type": "exact" if a.exact else a.type, "tensor_types": a.tensor_type}


def calibration(a: argparse.Namespace, progress: Any) -> Any:
    """What `add_calibration` asked for, as `convert` takes it; None where it asked for nothing."""
    names = "samples", "seed", "method", "act_order", "damping", "alpha", "sweeps", "feed", "device", "offload"
    given = {name: getattr(a, name) for name in (*names, "imatrix_out") if getattr(a, name) is not None}
    if a.sequence_length is not None:
        given["length"] = a.sequence_length
    if a.calibrate is None and a.method != "rtn":
        if given:
            raise BridgeError(
                f"--{next(iter(given)).replace('_', '-')} is for calibration: give the text, --calibrate FILE"
            )
        return None
    from bridge.conversion.calibrate_plan import Calibration
    from bridge.system.malloc import return_freed_memory

    return_freed_memory()
    return Calibration(a.calibrate, **given, progress=progress)


def _pair(text: str) -> tuple[str, str]:
    pattern, sign, name = text.rpartition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text!r} is not REGEX=TYPE")
    return pattern, name


def shard(text: str) -> tuple[int, int]:
    """(3, 12) of "3/12"."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N such as 3/12")
    return int(match[1]), int(match[2])


def positive(text: str) -> int:
    """A count of at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of threads")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return int(text)


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", text.upper())
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4G or 500M")
    return int(float(match[1]) * 1000 ** ("KMGT".index(match[2]) + 1 if match[2] else 0))
