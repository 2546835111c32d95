"""`gguf-bridge run`: its options are those of Python."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

import bridge
from bridge.cli import main
from bridge.cli.options import add_options, given
from bridge.runtime.sampling import Sampling
from tests.conftest import CHECKPOINT


def parsed(*arguments: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_options(parser, "sampling", Sampling)
    return given(parser.parse_args(arguments), Sampling)


def test_every_field_of_sampling_has_a_flag_and_only_what_is_given_is_passed_on() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, "sampling", Sampling)
    assert {action.dest for action in parser._actions} == {"help"} | {field.name for field in fields(Sampling)}
    assert parsed() == {}
    found = parsed("--temp", "0", "--seed", "3", "--logit-bias", "5-inf", "--logit-bias=7+1.5")
    assert found == {"temperature": 0.0, "seed": 3, "logit_bias": [(5, float("-inf")), (7, 1.5)]}
    assert Sampling(**found).biases == {5: float("-inf"), 7: 1.5}  # type: ignore[arg-type]
    assert "(default: 0.95)" in parser.format_help()


def test_the_command_line_samples_as_python_does(tmp_path: Path, capsys) -> None:
    path = tmp_path / "model.gguf"
    bridge.convert(CHECKPOINT, path)
    hot = {"temperature": 1.3, "top_k": 9, "logit_bias": {5: 2}}
    for options, sampling in (([], {}), (["--temperature", "1.3", "--top-k", "9", "--logit-bias", "5+2"], hot)):
        assert main(["run", str(path), "-p", "KING", "-n", "12", "--seed", "4", *options]) == 0
        text = "".join(bridge.Model.load(path).generate("KING", 12, seed=4, **sampling))
        assert capsys.readouterr().out == f"KING{text}\n"
