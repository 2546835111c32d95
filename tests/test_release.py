"""A release: the changelog, CITATION and the workflow agree, and what .github names is there."""

from __future__ import annotations

import datetime
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

import bridge
from bridge.cli.program import _parser
from scripts import release
from tests.conftest import ROOT, posix

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(file for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if file.stem != "config")
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def loaded(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in loaded(workflow)["jobs"].values() for step in job["steps"]]


def test_releases_are_dated_and_the_newest_comes_first() -> None:
    headings = re.findall(r"^## .*$", CHANGELOG, flags=re.MULTILINE)
    dates = release.releases()
    assert headings == ["## [Unreleased]", *(f"## [{name}] - {date}" for name, date in dates.items())]
    assert next(iter(dates)) == bridge.__version__
    assert all(Version(later) > Version(earlier) for later, earlier in pairwise(dates))
    days = [datetime.date.fromisoformat(date) for date in dates.values()]
    assert days == sorted(days, reverse=True)


def test_the_changelogs_sections_are_those_of_keep_a_changelog() -> None:
    sections = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    for part in re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)[1:]:
        named = re.findall(r"^### (.*)$", part, flags=re.MULTILINE)
        assert named == [section for section in sections if section in named]


def test_the_citation_is_of_this_version_and_of_the_day_of_its_release() -> None:
    citation = loaded(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert citation["version"] == bridge.__version__
    assert citation["date-released"] == datetime.date.fromisoformat(release.releases()[bridge.__version__])
    assert citation["license"] == "MIT"


def copy_of_what_is_checked(folder: Path) -> Path:
    """The files that the first step of a release reads, and its script."""
    for name in ("bridge/__init__.py", "scripts/release.py", "CHANGELOG.md", "CITATION.cff", "README.md"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    return folder


def run_step(name: str, folder: Path, tag: str) -> subprocess.CompletedProcess[str]:
    """What a step of the release workflow does in a folder, with this Python, when the tag was pushed."""
    (script,) = [step["run"] for step in steps(ROOT / ".github/workflows/release.yml") if step.get("name") == name]
    (folder / "bin").mkdir(exist_ok=True)
    for program in ("python", "python3"):
        if not (folder / "bin" / program).exists():
            (folder / "bin" / program).symlink_to(sys.executable)
    environment = {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.defpath}", "GITHUB_REF_NAME": tag,
        "GITHUB_SERVER_URL": "https://example.org", "GITHUB_REPOSITORY": "o/r",
    }  # fmt: skip
    return subprocess.run(["bash", "-ec", script], cwd=folder, env=environment, capture_output=True, text=True)


@posix
def test_a_tag_that_is_not_the_version_is_no_release(tmp_path: Path) -> None:
    folder = copy_of_what_is_checked(tmp_path)
    done = run_step("The tag is the version", folder, f"v{bridge.__version__}")
    assert (done.returncode, done.stderr) == (0, "")
    for tag in (bridge.__version__, f"v{bridge.__version__}.1", "v0.0.1"):
        done = run_step("The tag is the version", folder, tag)
        assert done.returncode == 1
        assert f"the tag must be v{bridge.__version__}" in done.stdout


@posix
@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("CHANGELOG.md", "## [{}] - ", "## [{}] ", "CHANGELOG.md has no heading '## [{}] - YYYY-MM-DD'"),
        ("CHANGELOG.md", "## [Unreleased]", "## [9.0.0] - 2030-01-01", "CHANGELOG.md lists 9.0.0 above {}"),
        ("CITATION.cff", "version: {}", "version: 0.0.1", "CITATION.cff has version 0.0.1, not {}"),
        ("CITATION.cff", "date-released: 2", "date-released: 3", "CITATION.cff has date-released 3"),
    ],
)
def test_a_file_with_another_version_is_named(file: str, old: str, new: str, message: str, tmp_path: Path) -> None:
    folder = copy_of_what_is_checked(tmp_path)
    old, new, message = (text.replace("{}", bridge.__version__) for text in (old, new, message))
    text = (folder / file).read_text(encoding="utf-8")
    assert old in text
    (folder / file).write_text(text.replace(old, new), encoding="utf-8")
    done = run_step("The tag is the version", folder, f"v{bridge.__version__}")
    assert done.returncode == 1
    assert message in done.stdout


@posix
def test_links_of_the_readme_are_absolute_on_pypi(tmp_path: Path) -> None:
    folder = copy_of_what_is_checked(tmp_path)
    (folder / "README.md").write_text(
        "[a](docs/a.md#b) ![c](docs/c.svg) [d](https://x.org/e) [f](#g)", encoding="utf-8"
    )
    done = run_step("Links of the README lead to the tag's files, as PyPI has no others", folder, "v1.2.3")
    assert done.returncode == 0, done.stderr
    address = "https://example.org/o/r"
    assert (folder / "README.md").read_text(encoding="utf-8") == (
        f"[a]({address}/blob/v1.2.3/docs/a.md#b) ![c]({address}/raw/v1.2.3/docs/c.svg) [d](https://x.org/e) [f](#g)"
    )


def test_the_notes_of_a_release_are_its_section_of_the_changelog() -> None:
    notes = release.notes("0.1.0")
    assert notes.startswith("### Added\n\n- `gguf-bridge convert`")
    assert "## [" not in release.notes(bridge.__version__)
    with pytest.raises(SystemExit, match=r"no section '## \[0.0.1\]'"):
        release.notes("0.0.1")


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_take_actions_by_version_and_run_what_is_there(file: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for step in steps(file):
        assert ("uses" in step) != ("run" in step)
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+(\.\d+)*", step["uses"])
            continue
        for line in step["run"].splitlines():
            words = shlex.split(line, comments=True)
            assert words[0] in ("make", "pip", "pytest", "python", "python3", "git", "mike", "gh")
            if words[0] == "make":
                assert words[1] in targets
            for word in words:
                if re.match(r"(scripts|tests)/", word):
                    assert (ROOT / word).exists()
            if "scripts/release.py" in words:
                release.parser().parse_args(list(takewhile(lambda word: word != ">", words[2:])))


def test_a_release_is_tried_before_it_is_published_and_only_publishing_may_write() -> None:
    workflow = loaded(ROOT / ".github" / "workflows" / "release.yml")
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML takes the key `on` for a boolean
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]
    assert {name: job.get("needs") for name, job in jobs.items()} == {
        "build": None, "try": "build", "pypi": "try", "github": "pypi", "docs": "pypi",
    }  # fmt: skip
    assert {name: job["permissions"] for name, job in jobs.items() if "permissions" in job} == {
        "pypi": {"id-token": "write"}, "github": {"contents": "write"}, "docs": {"contents": "write"},
    }  # fmt: skip


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.stem)
def test_an_issue_form_is_one_that_github_takes_and_names_commands_that_are_there(file: Path) -> None:
    form = loaded(file)
    assert form.keys() == {"name", "description", "labels", "body"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["type"] in ("input", "textarea") and field["attributes"]["label"] for field in fields)
    ids = [field["id"] for field in fields]
    assert len(ids) == len(set(ids))
    assert any(field["validations"]["required"] for field in fields if "validations" in field)
    assert "versions" in ids
    for command in re.findall(r"`gguf-bridge ([^`]*)`", file.read_text(encoding="utf-8")):
        if command != "--version":
            assert callable(_parser().parse_args(shlex.split(command.replace("TYPE", "Q4_K"))).run)


def test_there_is_a_form_for_each_kind_of_issue() -> None:
    assert {file.stem for file in FORMS} == {"checkpoint", "crash", "docs", "speed", "wrong-output"}
    asked = {file.stem for file in FORMS if "inspect MODEL --json`" in file.read_text(encoding="utf-8")}
    assert asked == {"checkpoint", "crash", "speed", "wrong-output"}
