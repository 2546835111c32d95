"""`gguf-bridge plan`."""

import argparse
from pathlib import Path
from typing import Any

from bridge.cli.files.convert import add_plan_options, choices
from bridge.cli.json_output import add_json, print_json
from bridge.cli.options import SOURCE, add_no_mmproj, add_options, calibration, command
from bridge.conversion.planning.options import PlanOptions
from bridge.quantize.settings import Calibration
from bridge.system.progress import Bar, say


def add_parser(commands: Any) -> None:
    p = command(commands, "plan", run)
    p.add_argument("checkpoint", help=SOURCE)
    p.add_argument(
        "-o", "--out", metavar="PLAN.json", type=Path,
        help="write the plan for `convert --plan`; types in it may be edited",
    )  # fmt: skip
    add_plan_options(p)
    add_options(p, "calibration", Calibration, ["text", "method"])
    add_options(
        p, "output", PlanOptions, ["mmproj_type", "no_mtp", "target_model", "split_max_size", "force", "threads"]
    )
    add_no_mmproj(p)
    add_json(p)


def run(a: argparse.Namespace) -> int:
    say(f"reading {a.checkpoint}")
    from bridge.cli.files.describe import plan_record, plan_table
    from bridge.conversion.converter import plan_as

    with Bar("planning", unit=" tensors") as bar:
        options = PlanOptions(**choices(a), calibrate=calibration(a, None))
        plan = plan_as(a.checkpoint, a.out, options, bar)
    if a.json:
        print_json(plan_record(plan))
        return 0
    print("\n".join(plan_table(plan)))
    if a.out:
        print(f"wrote {a.out}")
    return 0
