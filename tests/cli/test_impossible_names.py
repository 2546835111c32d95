"""Names that no file can have, for every argument that is one: one line, and no file changed."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

import bridge
from bridge.cli import main
from bridge.cli.program import _parser
from bridge.errors import BridgeError
from bridge.runtime.bench import tensors_to_time
from tests.conftest import CHECKPOINT
from tests.support.adapters import low_rank, write_adapter

LONG, NUL = "a" * 5000, "a\0b"
NAMES = [pytest.param(LONG, id="long"), pytest.param(NUL, id="NUL"), pytest.param("a" * 300 + ".gguf", id="long GGUF")]

# @ is the name, GGUF a converted model, MODEL its checkpoint, ADAPTER one of it, TEXT any text; the argument in front
# is its own
RUNS = """
convert checkpoint      @
convert out             MODEL @
convert --config        MODEL out.gguf --config @
convert --template      MODEL out.gguf --template @
convert --imatrix       MODEL out.gguf --imatrix @
convert --target-model  MODEL out.gguf --target-model @
convert --plan          MODEL out.gguf --plan @
convert --calibrate     MODEL out.gguf --type Q2_K --calibrate @
convert --offload       MODEL out.gguf --type Q2_K --calibrate TEXT --offload @
convert --imatrix-out   MODEL out.gguf --type Q2_K --calibrate TEXT --imatrix-out @
convert --plan-out      MODEL out.gguf --calibrate TEXT --size 1G --plan-out @
convert --merge         MODEL out.gguf --merge @
convert --report        MODEL out.gguf --report @
convert --card-only     MODEL out.gguf --upload a/b --card-only @
quantize checkpoint     @ out.gguf --type Q2_K --calibrate TEXT
quantize out            MODEL @ --type Q2_K --calibrate TEXT
quantize out            MODEL @ --format gptq --calibrate TEXT
quantize --config       MODEL out.gguf --type Q2_K --calibrate TEXT --config @
quantize --template     MODEL out.gguf --type Q2_K --calibrate TEXT --template @
quantize --target-model MODEL out.gguf --type Q2_K --calibrate TEXT --target-model @
quantize --calibrate    MODEL out.gguf --type Q2_K --calibrate @
quantize --offload      MODEL out.gguf --type Q2_K --calibrate TEXT --offload @
quantize --imatrix-out  MODEL out.gguf --type Q2_K --calibrate TEXT --imatrix-out @
quantize --plan-out     MODEL out.gguf --size 1G --calibrate TEXT --plan-out @
convert --tensor-types-out   MODEL out.gguf --calibrate TEXT --size 1G --tensor-types-out @
quantize --tensor-types-out  MODEL out.gguf --size 1G --calibrate TEXT --tensor-types-out @
quantize --report       MODEL out.gguf --type Q2_K --calibrate TEXT --report @
quantize --card-only    MODEL out.gguf --type Q2_K --calibrate TEXT --upload a/b --card-only @
convert-lora adapter    @ out.gguf --base MODEL
convert-lora out        ADAPTER @ --base MODEL
convert-lora --config   ADAPTER out.gguf --base MODEL --config @
convert-lora --template ADAPTER out.gguf --base MODEL --template @
plan checkpoint         @
plan --out              MODEL --out @
plan --config           MODEL --config @
plan --template         MODEL --template @
plan --target-model     MODEL --target-model @
plan --imatrix          MODEL --imatrix @
plan --calibrate        MODEL --calibrate @
verify gguf             @ MODEL
verify checkpoint       GGUF @
verify --config         GGUF MODEL --config @
verify --template       GGUF MODEL --template @
verify --target-model   GGUF MODEL --target-model @
verify --text           GGUF MODEL --text @
verify --report         GGUF MODEL --report @
verify --mtp-text       GGUF MODEL --mtp-text @
verify --mmproj         GGUF MODEL --mmproj @
inspect path            @
inspect --config        MODEL --config @
repack source           @ out
repack out              MODEL @
repack --config         MODEL out --config @
repack --card-only      MODEL out --upload a/b --card-only @
repack --calibrate      MODEL out --format gptq_v2 --bits 3 --calibrate @
repack --offload        MODEL out --format gptq_v2 --bits 3 --calibrate TEXT --offload @
export model            @ out --config MODEL
export out              GGUF @ --config MODEL
export --config         GGUF out --config @
export --calibrate      GGUF out --config MODEL --format gptq --bits 3 --calibrate @
export --offload        GGUF out --config MODEL --format gptq --bits 3 --calibrate TEXT --offload @
edit model              @ --set general.name=x
edit --out              GGUF --set general.name=x --out @
edit --chat-template    GGUF -o out.gguf --chat-template @
run model               @ -p x
run --config            MODEL -p x --config @
run --lora              GGUF -p x --lora @
run --schema            GGUF -p x --schema @
run --tools             GGUF -p x --chat --tools @
run --documents         GGUF -p x --chat --documents @
chat model              @
chat --config           MODEL --config @
chat --lora             GGUF --lora @
chat --schema           GGUF --schema @
chat --tools            GGUF --tools @
chat --documents        GGUF --documents @
serve model             @ --port 0
serve --config          MODEL --port 0 --config @
serve --lora            GGUF --port 0 --lora @
warmup model            @
warmup --config         MODEL --config @
perplexity gguf         @ -f TEXT
perplexity --file       GGUF -f @
perplexity --reference  GGUF -f TEXT --reference @
perplexity --lora       GGUF -f TEXT --lora @
bench what              @
plot source             @
plot --out              REPORT --out @
"""
TABLE = [(command, argument, rest) for command, argument, *rest in map(str.split, RUNS.strip().splitlines())]


@pytest.fixture(scope="module")
def inputs(auto, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("inputs")
    text, report = folder / "text.txt", folder / "report.json"
    text.write_text("Once upon a time. " * 500)
    assert main(["convert", str(CHECKPOINT), str(folder / "m.gguf"), "--report", str(report)]) == 0
    adapter = write_adapter(folder / "adapter", low_rank({"model.layers.0.self_attn.q_proj": (256, 256)}))
    paths = {"MODEL": CHECKPOINT, "GGUF": auto, "TEXT": text, "REPORT": report, "ADAPTER": adapter}
    return {word: str(path) for word, path in paths.items()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("command", "argument", "rest"), TABLE, ids=[" ".join(row[:2]) for row in TABLE])
def test_a_name_that_no_file_can_have_is_told(command, argument, rest, name, inputs, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = refused(command, *(name if word == "@" else inputs.get(word, word) for word in rest))
    assert "unexpected" not in error
    assert error.startswith("error: a")


@pytest.mark.parametrize("name", NAMES)
def test_inspect_tells_that_a_template_cannot_exist(name, run):
    assert "convert would stop: a" in run("inspect", CHECKPOINT, "--template", name)


def test_the_table_has_every_argument_that_is_a_path():
    (commands,) = (a.choices for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    names = {"--template", "--calibrate", "--reference"}
    found = {
        (command, (action.option_strings or [action.dest])[-1])
        for command, parser in commands.items()
        for action in parser._actions
        if action.type is Path or not action.option_strings or names & {*action.option_strings}
    }
    # the second is refused whatever its name is, those of the last line are no names
    others = {("inspect", "--template"), ("export", "--imatrix-out"), ("repack", "--imatrix-out")}
    others |= {("run", "words"), ("completion", "shell")}
    assert found - others == {row[:2] for row in TABLE}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "call",
    [
        lambda name, out: bridge.convert(name, out),
        lambda name, out: bridge.convert(CHECKPOINT, name),
        lambda name, out: bridge.convert(CHECKPOINT, out, config=name),
        lambda name, out: bridge.convert(CHECKPOINT, out, imatrix=name),
        lambda name, out: bridge.convert(CHECKPOINT, out, template=name),
        lambda name, out: bridge.convert(CHECKPOINT, out, merge=name),
        lambda name, out: bridge.open_checkpoint(name),
        lambda name, out: bridge.open_checkpoint(CHECKPOINT, config=name),
        lambda name, out: bridge.open_gguf(name),
        lambda name, out: bridge.convert_lora(name, out, base=CHECKPOINT),
        lambda name, out: bridge.Model.load(name),
        lambda name, out: bridge.repack(name, out, "gptq_v2"),
        lambda name, out: bridge.repack(CHECKPOINT, name, "gptq_v2"),
        lambda name, out: bridge.export(name, out, config=CHECKPOINT),
        lambda name, out: bridge.verify(name, CHECKPOINT),
        lambda name, out: tensors_to_time(name, []),
    ],
)
def test_python_raises_its_own_error_for_such_a_name(call, name, tmp_path):
    with pytest.raises(BridgeError):
        call(name, tmp_path / "out.gguf")
