"""README and docs/: links work, commands and Python snippets run, figures are those of the pictures."""

from __future__ import annotations

import importlib
import inspect
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache, partial
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest

import bridge
from bridge.cli import main
from bridge.cli.program import _parser
from bridge.cli.use import warmup
from scripts.tables.guide_tables import measured, tables
from tests.conftest import CHECKPOINT, PATIENCE, ROOT
from tests.models.template.test_hub import Hub
from tests.support.adapters import low_rank, write_adapter
from tests.support.command_line import edit_json
from tests.support.encoder_models import ENCODERS, RERANKERS, new_encoder

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
_LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """A page without its code: fenced, indented, and in backticks inside a line."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    return text


@cache
def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub and mkdocs both make them; a heading they name otherwise is none."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        github = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        mkdocs = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip())
        if github == mkdocs:
            found.add(github)
    return found


def broken(page: Path) -> list[str]:
    """The links of a page, inside the project, that lead nowhere."""
    missing = []
    for target in _LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.is_file() or (anchor and anchor not in anchors(file)):
            missing.append(target)
    return missing


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "b.md").write_text("# A heading, `with` code\n\n```\n# no heading\n```\n")
    page = tmp_path / "a.md"
    page.write_text(
        "# Top\n[1](b.md) [2](b.md#a-heading-with-code) [3](#top) [4](https://x.org/#y) ![5](p.svg) [6](c.md)\n"
        "[7](b.md#no-heading) [8](#bottom)\n\n    [9](in-code.md)\n"
    )
    assert broken(page) == ["p.svg", "c.md", "b.md#no-heading", "#bottom"]


@pytest.mark.parametrize("name", NAMES)
def test_every_link_leads_to_a_file_and_a_heading(name):
    assert broken(ROOT / name) == []


@pytest.mark.parametrize("name", NAMES)
def test_pages_of_the_site_link_to_nothing_outside_it(name):
    if name.startswith("docs/"):
        page = ROOT / name
        inside = [target for target in _LINK.findall(prose(page)) if not re.match("[a-z]+:|#", target)]
        files = {target: (page.parent / target.partition("#")[0]).resolve() for target in inside}
        assert [target for target, file in files.items() if not file.is_relative_to(ROOT / "docs")] == []


def test_every_page_is_in_the_sites_navigation():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"^ +- [^:]+: (\S+\.md)$", text, flags=re.MULTILINE)
    assert sorted(named) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md"))


def test_messages_of_the_troubleshooting_page_are_those_of_the_program():
    programs = [*(ROOT / "bridge").rglob("*.py"), *(ROOT / "cuda").rglob("*.py")]
    source = "".join(file.read_text(encoding="utf-8") for file in programs)
    source = source.replace("{parameter('force', True)}", "--force")
    headings = re.findall(r'^## "(.*)"$', (ROOT / "docs" / "troubleshooting.md").read_text("utf-8"), re.MULTILINE)
    assert len(headings) > 15
    for heading in headings:
        for piece in heading.split("..."):
            assert piece.strip(":, ") in source, heading


GUIDE = [
    "README.md",
    *(f"docs/tutorial-{name}.md" for name in ("gguf", "convert", "quantize", "products", "formats")),
    *(f"docs/{name}.md" for name in ("index", "commands", "checkpoints", "formats", "quantize", "python", "serve")),
    *(f"docs/{name}.md" for name in ("troubleshooting", "limits")),
]


def test_the_guide_has_at_most_12_000_words():
    words = {name: len((ROOT / name).read_text(encoding="utf-8").split()) for name in GUIDE}
    assert sum(words.values()) <= 12_000, words


def test_the_sites_tutorials_and_guide_are_the_pages_that_are_counted():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    parts = dict(re.findall(r"^  - (\w+):\n((?:      - .*\n)+)", text, flags=re.MULTILINE))
    listed = re.findall(r": (\S+\.md)$", parts["Tutorials"] + parts["Guide"], flags=re.MULTILINE)
    assert {f"docs/{name}" for name in listed} == set(GUIDE) - {"README.md", "docs/index.md"}


@pytest.mark.parametrize("table", list(tables()), ids=lambda table: f"{table.page}-{table.head[0]}")
def test_a_table_of_figures_is_of_what_was_measured(table):
    assert "\n".join(table.lines) in (ROOT / table.page).read_text(encoding="utf-8")


def test_the_reference_lists_names_that_exist_and_all_that_bridge_exports():
    listed = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "reference.md").read_text(encoding="utf-8"), re.MULTILINE)
    for path in listed:
        module, _, name = path.rpartition(".")
        assert inspect.getdoc(getattr(importlib.import_module(module), name)), path
    assert {path.rpartition(".")[2] for path in listed} >= set(bridge._LAZY)


def test_pages_of_the_site_include_files_of_the_checkout():
    pytest.importorskip("mkdocstrings")
    from scripts.site_pages import on_page_markdown
    from scripts.site_reference import with_lists

    home = on_page_markdown((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    assert "pip install ." in home
    targets = [target.partition("#")[0] for target in _LINK.findall(home) if not re.match("[a-z]+:|#", target)]
    assert [target for target in targets if not (ROOT / "docs" / target).is_file()] == []
    assert on_page_markdown("# Another page") == "# Another page"
    text = "Convert.\n\npath   a folder,\n       or a file\nforce  replace\n\nRaises."
    assert with_lists(text) == "Convert.\n\n\n- `path`: a folder,\n  or a file\n- `force`: replace\n\nRaises."


def test_the_site_builds(tmp_path):
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    home = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "tutorial-convert/" in home
    assert "pictures/sizes.svg" in home
    reference = (tmp_path / "site" / "reference" / "index.html").read_text(encoding="utf-8")
    assert "sweeps of refinement after GPTQ</li>" in reference
    assert "Unpack" not in reference  # keywords have names, types and defaults
    assert "md-source" not in reference  # no repository is named


def test_links_to_the_repository_are_those_that_a_publisher_names(tmp_path, monkeypatch):
    pytest.importorskip("mkdocstrings")
    from mkdocs.config import load_config

    from scripts import site_pages

    class Page:
        edit_url = None

    included = "<!-- README.md -->"
    (tmp_path / "README.md").write_text(
        "[a](docs/a.md#b) [changes](CHANGELOG.md) [examples](examples/README.md) [LICENSE](LICENSE)"
    )
    monkeypatch.setattr(site_pages, "ROOT", tmp_path)
    monkeypatch.delenv("SITE_REPOSITORY", raising=False)
    alone = site_pages.on_config(load_config(str(ROOT / "mkdocs.yml")))
    assert (alone.repo_url, alone.edit_uri) == (None, None)
    text = site_pages.on_page_markdown(included, page=Page(), config=alone)
    assert text == "[a](a.md#b) [changes](changelog.md) examples (`examples/README.md`) `LICENSE`"

    monkeypatch.setenv("SITE_REPOSITORY", "https://github.com/someone/gguf-bridge")
    named = site_pages.on_config(load_config(str(ROOT / "mkdocs.yml")))
    page, files = Page(), "https://github.com/someone/gguf-bridge/blob/main"
    text = site_pages.on_page_markdown(included, page=page, config=named)
    assert text.endswith(f"[examples]({files}/examples/README.md) [LICENSE]({files}/LICENSE)")
    assert page.edit_url == "https://github.com/someone/gguf-bridge/edit/main/README.md"
    assert named.edit_uri == "edit/main/docs/"


def commands() -> list[str]:
    """The program's commands in the pages, whole lines of code."""
    lines = {
        match[1]
        for page in PAGES
        for match in re.finditer(
            r"^(?: {4}|\$ )(gguf-bridge .*?)(?:\s+#.*)?$", page.read_text(encoding="utf-8"), flags=re.MULTILINE
        )
    }
    return sorted(line for line in lines if "COMMAND" not in line)


def test_commands_are_found():
    assert len(commands()) > 15


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_pages_is_one_that_the_program_takes(command):
    arguments = _parser().parse_args(shlex.split(command)[1:])
    assert callable(arguments.run)


def test_scripts_and_modules_that_the_pages_name_exist():
    for page in PAGES:
        for name in re.findall(
            r"(?<![\w/.])((?:scripts|bridge|tests|cuda)/[\w/.-]+\w)", page.read_text(encoding="utf-8")
        ):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


@pytest.mark.parametrize("page", ["architecture.md", "extending.md"])
def test_files_that_are_named_by_the_end_of_their_paths_exist(page):
    ours = {
        f"/{file.relative_to(ROOT)}"
        for part in ("bridge", "cuda", "scripts", "tests")
        for file in (ROOT / part).rglob("*.py")
    }
    named = re.findall(r"(?<![\w/.*])[\w/]+\.py\b", (ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert len(named) > 15
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in ours)] == []


def test_the_floors_of_architecture_are_those_of_the_imports():
    from tests.test_layout import ALLOWED

    floors = {
        row[1].strip("`").removesuffix(".py").rstrip("/"): int(row[0]) for row in cells("architecture.md", "| floor")
    }
    assert floors.keys() == ALLOWED.keys()
    for package, below in ALLOWED.items():
        assert floors[package] == max((floors[other] + 1 for other in below), default=0)


def test_the_table_of_architectures_is_of_those_that_run():
    from scripts.tables.architecture_table import HEAD, rows

    assert [f"| {' | '.join(row)} |" for row in cells("architectures.md", HEAD)] == rows()


def test_the_table_of_types_is_of_their_records():
    from scripts.tables.type_table import HEAD, rows

    assert [f"| {' | '.join(row)} |" for row in cells("formats.md", HEAD)] == rows()


def test_the_table_of_checkpoints_names_every_row_and_those_of_4_bits_are_what_convert_makes():
    for needed in ("torch", "transformers"):
        pytest.importorskip(needed)
    from tests.support.convert_table import HEAD, ROWS, rows

    shown = {row[0]: f"| {' | '.join(row)} |" for row in cells("checkpoints.md", HEAD)}
    assert [*shown] == [*ROWS]
    some = [name for name in ROWS if name == "NVFP4; MXFP4" or name.startswith("integers¹, 4 bits, sym")]
    assert [shown[name] for name in some] == [*rows(some)]


@pytest.mark.exhaustive  # most of a minute, in which kernels are compiled
@pytest.mark.parametrize(
    ("page", "table"), [("checkpoints.md", "convert_table"), ("both-directions.md", "export_table")]
)
def test_the_tables_of_layers_are_what_the_program_makes_of_them(page, table):
    for needed in ("torch", "transformers"):
        pytest.importorskip(needed)
    module = importlib.import_module(f"tests.support.{table}")
    shown = [f"| {' | '.join(row)} |" for row in cells(page, module.HEAD)]
    assert shown == [*module.rows()], f"run python -m tests.support.{table}"


def cells(page: str, head: str) -> list[list[str]]:
    """The rows of the table of a page whose first line begins so."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(head)) + 2
    rows = list(takewhile(lambda line: line.startswith("|"), lines[start:]))
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]


def test_the_table_of_products_is_of_the_figures_that_the_picture_shows():
    head = "| type | 40960 x 4096, 1 thread |"
    page = "measurements/cpu.md"
    (line,) = (line for line in (ROOT / "docs" / page).read_text("utf-8").splitlines() if line.startswith(head))
    places = re.findall(r"(\d+ x \d+), (\d) thread", line)
    shown = {(row[0], *place): cell for row in cells(page, head) for place, cell in zip(places, row[1:], strict=True)}
    products = measured("matvec")["products"]
    assert len(shown) == len(products)
    for p in products:
        key = p["type"], f"{p['shape'][0]} x {p['shape'][1]}", str(p["threads"])
        assert shown[key] == f"{p['gbs']:.1f}, {p['read_gbs']:.1f}, {p['of_read']:.0%}, {p['ggml_gbs']:.1f}"


def test_the_table_of_fidelity_is_of_the_figures_that_the_picture_shows():
    from scripts.quality import fidelity

    shown = cells("measurements/conversion.md", "| checkpoint | type of its linears | bpw | MB |")
    assert shown == [fidelity.cells(row, True, True) for row in measured("fidelity")["checkpoints"]]


def test_the_table_of_trained_models_is_of_figures_that_were_measured():
    head = "| checkpoint | type of its linears | bpw | codes"
    shown = {row[0]: row[-3:] for row in cells("measurements/conversion.md", head)}
    rows = measured("trained")["checkpoints"]
    names = "kl_linears", "kl_file", "kl_checkpoint"
    assert shown == {row["name"]: [f"{row[name]:.1e}" for name in names] for row in rows}


def test_the_changelogs_first_release_is_this_version():
    entries = re.findall(
        r"^## \[([^\]]+)\](?: - \d{4}-\d{2}-\d{2})?$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M
    )
    assert entries[:2] == ["Unreleased", bridge.__version__]


PRINTING = ("python.md", "tutorial-products.md")  # every snippet of these pages shows something
SNIPPETS = [
    pytest.param(
        match[1],
        page.name in PRINTING,
        id=f"{page.name}-{number}",
        marks=[pytest.mark.exhaustive] if "quantize_gguf(" in match[1] else [],  # minutes
    )
    for page in PAGES
    for number, match in enumerate(
        re.finditer(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    )
]


def test_snippets_are_found():
    assert len(SNIPPETS) > 6


@pytest.fixture(scope="module")
def trellis_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random Llama of one layer in the codes of EXL3 and QTIP."""
    from tests.support.encode_trellis import EXL3, QTIP, Coding, exl3_tensors, qtip_tensors, write_trellis
    from tests.support.tiny_models import save_model

    root = tmp_path_factory.mktemp("trellis")
    floats = save_model(root / "float", "LlamaConfig", num_hidden_layers=1)
    mcg, mad = Coding("mcg", 3, multiplier=0xCBAC1FED), Coding("1mad", 2)
    exl3 = partial(exl3_tensors, coding=mcg, search=False)
    qtip = partial(qtip_tensors, coding=mad, layout="swizzled", search=False)
    write_trellis(root / "exl3", floats, lambda n, w, i: exl3(n, w, seed=i), {"quantization_config": EXL3})
    write_trellis(root / "qtip", floats, lambda n, w, i: qtip(n, w, seed=i), {"quip_params": QTIP})
    return {"llama-exl3": root / "exl3", "llama-qtip": root / "qtip"}


X = np.ones((4, 256), np.float32)


@pytest.mark.parametrize(("code", "prints"), SNIPPETS)
def test_a_python_snippet_runs(code, prints, tmp_path, small_model, request, monkeypatch, capsys):
    """In a folder that has the files that it names."""
    torch = pytest.importorskip("torch")
    if '.to("cuda")' in re.sub("#.*", "", code) and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if "transformers" in code or "llama-" in code:
        pytest.importorskip("transformers")
    if "gguf_file" in code:
        pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    checkpoint = CHECKPOINT
    if ".chat(" in code:
        checkpoint = tmp_path / "with a chat template"
        shutil.copytree(CHECKPOINT, checkpoint)
        edit_json(checkpoint / "tokenizer_config.json", chat_template=CHAT)
    files = {"model-gptq": checkpoint, "org/model-gptq": checkpoint, "org/model": small_model}
    if "llama-" in code:
        files |= request.getfixturevalue("trellis_checkpoints")
    (tmp_path / "text.txt").write_text("KING RICHARD:\nNow is the winter of our discontent. " * 80)
    for name, there in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(there)
    for name, kind in (("model-embedding", "bert"), ("model-reranker", "bert-reranker")):
        if name in code:
            pytest.importorskip("transformers")
            new_encoder((ENCODERS | RERANKERS)[kind], tmp_path / name)
    if "bridge.convert(" not in code:
        bridge.convert(checkpoint, tmp_path / ("my-model.gguf" if "my-model.gguf" in code else "model.gguf"))
    capsys.readouterr()
    exec(compile(code, "snippet", "exec"), {"bridge": bridge, "torch": torch, "x": X[0], "X": X})
    if prints:
        assert capsys.readouterr().out.strip()


def lines_of(page: Path) -> list[str]:
    """The program's commands that a page has for pasting, which are indented."""
    return re.findall(
        r"^ {4}((?:gguf-bridge|python (?:-m )?scripts[/.]) ?.*)$", page.read_text(encoding="utf-8"), re.MULTILINE
    )


NOT_RUN = {
    "a Hub id": "--template org/",
    "runs until it is stopped: tests/serve": "gguf-bridge serve",
    "a vision model: tests/models/test_towers.py": "org/vision-gptq",
    "shards: tests/conversion/test_from_gguf.py": "model-00001-of-00003.gguf",
    "no names of a real file: tests/conversion/test_edit.py": "--rename OLD=NEW",
    "a pickle of the real LLaMA": "llama-7b-4bit.pt",
    "minutes: tests/conversion/test_size_budget.py": "--size",
    "seconds of timing: tests/cli/test_run.py": "bench Q4_K",
    "hours: tests/scripts/test_bench_formats.py": "python -m scripts.quality.bench_formats",
}
CHAT = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
SHELL_PAGES = [name for name in NAMES if lines_of(ROOT / name)]


def test_pages_with_commands_are_found():
    assert {"README.md", "docs/commands.md", "docs/quantize.md", "docs/scale-out.md"} <= set(SHELL_PAGES)
    assert all(any(skipped in line for page in PAGES for line in lines_of(page)) for skipped in NOT_RUN.values())


@pytest.fixture(scope="module")
def files_of_the_pages(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small models under the names that the pages use."""
    pytest.importorskip("torch")
    from bridge.conversion.checkpoints.to_checkpoint import quantize_checkpoint
    from bridge.quantize.settings import Calibration

    folder = tmp_path_factory.mktemp("pages")
    for name in ("model-gptq", "org/model-gptq", "falcon-gptq"):
        shutil.copytree(CHECKPOINT, folder / name)
        edit_json(folder / name / "tokenizer_config.json", chat_template=CHAT)
    shutil.copytree(small_model, folder / "Qwen3-0.6B")
    (folder / "text.txt").write_text("KING RICHARD:\nNow is the winter of our discontent. " * 600)
    chat = json.dumps({"text": "A chat about the winter, and about what comes after it. " * 20})
    (folder / "chats.jsonl").write_text(f"{chat}\n" * 8)
    for name in ("falcon-f16", "other"):
        bridge.convert(CHECKPOINT, folder / f"{name}.gguf")
    for name in ("my-model", "smollm2", "damaged"):  # with a chat template
        bridge.convert(folder / "model-gptq", folder / f"{name}.gguf")
    bridge.convert(small_model, folder / "model-BF16.gguf", type="BF16")
    (folder / "chat.jinja").write_text(CHAT)
    (folder / "schema.json").write_text('{"type": "object", "properties": {"city": {"type": "string"}}}')
    write_adapter(folder / "adapter", low_rank({"model.layers.0.self_attn.q_proj": (256, 256)}))
    text = Calibration(folder / "text.txt", samples=2, length=64, sweeps=0, act_order="free")
    quantize_checkpoint(small_model, folder / "actorder-gptq", "gptq_v2", calibrate=text)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("README.md", "docs/commands.md") else [pytest.mark.exhaustive])
        for name in SHELL_PAGES
    ],
)
def test_the_commands_of_a_page_run_one_after_the_other(name, files_of_the_pages, tmp_path, monkeypatch, capfd):
    """In a folder that has only what the user brings; less text is used, smaller shards and fewer kernels are made."""
    shutil.copytree(files_of_the_pages, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Hub(monkeypatch, tmp_path, {"falcon-f16.gguf": 1})  # org/model-GGUF is a repository of it
    monkeypatch.setattr("bridge.cli.use.run._piped", lambda: True)
    monkeypatch.setattr(warmup, "_types", lambda blocks, make=warmup._types: make({"Q8_0": blocks["Q8_0"]}))  # seconds
    for line in lines_of(ROOT / name):
        if not any(skipped in line for skipped in NOT_RUN.values()):
            words, _, file = line.replace("4G", "700K").replace(":Q4_K_M", ":F16").partition(" < ")
            words = shlex.split(words, comments=True)
            piped = Path(file).read_bytes()[:200] if file else b"KING RICHARD:\n"
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(piped)))
            if words[1] in ("run", "chat"):
                words += ["-n", "4"]
            if words[1] == "quantize" or "--calibrate" in words:
                words += ["--samples", "5", "--sequence-length", "128"]
            code = main(words[1:])
            assert code == 0, f"{line}: {capfd.readouterr().err}"
