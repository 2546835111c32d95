"""`gguf-bridge verify`."""

import argparse
from pathlib import Path
from typing import Any

from bridge.cli.json_output import add_json, print_json
from bridge.cli.options import SOURCE, add_options, add_report, command
from bridge.conversion.planning.options import PlanOptions
from bridge.encode.limits import FLOAT_LIMIT, REQUANTIZED_LIMIT
from bridge.errors import BridgeError
from bridge.system.progress import Bar, say
from bridge.system.text import printable


def add_parser(commands: Any) -> None:
    p = command(commands, "verify", run)
    p.add_argument("gguf", metavar="model", help=f"what is measured: {SOURCE}")
    p.add_argument(
        "checkpoint", metavar="reference",
        help="what it was made of, or any other checkpoint or GGUF of the same model, named in the same ways",
    )  # fmt: skip
    add_options(p, "model", PlanOptions, ["config", "target_model"])
    p.add_argument("--template", metavar="MODEL.gguf", help="the template that the GGUF was made with, if any")
    p.add_argument(
        "--text", type=Path, metavar="FILE",
        help="let both predict a text and print the KL divergence from the reference; a checkpoint is converted to a "
        "temporary GGUF of F32 for that",
    )  # fmt: skip
    p.add_argument("--windows", type=int, metavar="N", help="windows of the text (default: the whole text)")
    p.add_argument("--length", type=int, default=256, metavar="N", help="tokens in a window (default: 256)")
    p.add_argument(
        "--mtp-text", type=Path, metavar="FILE",
        help="also try the layer that predicts a token further (MTP) on a text: how many tokens it guesses as the "
        "model chooses them",
    )  # fmt: skip
    p.add_argument(
        "--mmproj", type=Path, metavar="FILE",
        help="the file of the vision tower, which is compared too (default: the one that convert wrote beside it)",
    )  # fmt: skip
    p.add_argument(
        "--allow-missing", action="store_true",
        help="compare what both have; a note lists the tensors that only one of the two has",
    )  # fmt: skip
    p.add_argument(
        "--exact", action="store_true",
        help="fail (exit code 1) unless every weight is the reference's bit for bit, both as floats",
    )  # fmt: skip
    p.add_argument(
        "--max-share", type=float, metavar="X",
        help="fail (exit code 1) where a tensor that came as codes adds more than this share of the checkpoint's own "
        f"quantization noise (default: {REQUANTIZED_LIMIT}; Q8_0 may instead meet --max-nmse). Codes that the type "
        "holds bit for bit must be there in any case",
    )  # fmt: skip
    p.add_argument(
        "--max-nmse", type=float, default=FLOAT_LIMIT, metavar="X",
        help="fail where a tensor that came as floats has a squared error beyond this share of its squared weights "
        f"(default: {FLOAT_LIMIT:g}, which Q8_0 meets)",
    )  # fmt: skip
    add_report(p)
    add_json(p)


def run(a: argparse.Namespace) -> int:
    """Verify, with progress bars, and print the report; 1 where a tensor is beyond a threshold."""
    if a.windows is not None and a.text is None:
        raise BridgeError("--windows is of a text; give --text too")
    say(f"reading {a.checkpoint}")
    from bridge.conversion.writing.verify import failures, verify

    with Bar("verifying") as bar, Bar("predicting the text", unit=" windows") as text_bar:
        report = verify(
            a.gguf, a.checkpoint, config=getattr(a, "config", None), template=a.template, mtp_text=a.mtp_text,
            mmproj=a.mmproj, target_model=getattr(a, "target_model", None), allow_missing=a.allow_missing, text=a.text,
            window=a.length, n_windows=a.windows, progress=bar, text_progress=text_bar, save_as=a.report,
        )  # fmt: skip
    if a.report:
        report.save(a.report)
    failed = failures(report, a.max_share, a.max_nmse, a.exact)
    if a.json:
        print_json({"passed": not failed, "failures": failed, "predictions": None, **report.as_dict()})
        return 1 if failed else 0
    print(report.table())
    for line in failed:
        print(f"FAILED {printable(line)}")
    limits = "--exact" if a.exact else "--max-share, --max-nmse"
    if failed:
        print(f"{len(failed)} of {len(report.tensors)} tensors failed (thresholds: {limits})")
    elif a.exact:
        print("OK: every tensor is equal, weight by weight (--exact)")
    else:
        print(f"OK: every tensor is as close to the reference as its limit asks ({limits})")
    return 1 if failed else 0
