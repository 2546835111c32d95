"""The model card of what was made: the README.md of a Hub repository, written from the report.

What a checkpoint says of its origin is read from the front matter of its own README.md, its config.json, and the
folder's name in huggingface_hub's cache. No path of this machine gets into a card.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bridge
from bridge.checkpoint.files.hub import is_repository
from bridge.checkpoint.repack import Rewritten
from bridge.checkpoint.write.report import Written
from bridge.conversion.checkpoints.repack import Repacked
from bridge.conversion.writing.report import CALIBRATED, CARRIED, PARTLY, Report
from bridge.gguf_file.purpose import purpose
from bridge.gguf_file.reader import read_gguf
from bridge.models.config.provenance import repository_of
from bridge.system.fields import table
from bridge.system.storage.files import files_below, read_json
from bridge.system.text import size_text

CARD = "README.md"
MARK = "<!-- by gguf-bridge -->"  # a card with it may be replaced by a new one
_PASSED_ON = ("license", "license_name", "license_link", "language", "pipeline_tag")  # of the checkpoint's own card
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]*")  # the Hub's names of licenses


@dataclass(frozen=True)
class Origin:
    """Where a checkpoint comes from.

    repository   its Hub id, or that of the model it was made from, if it is known
    front_matter  what it says of its license, languages and task
    """

    repository: str | None
    front_matter: dict[str, Any]

    @property
    def license(self) -> str | None:
        license = self.front_matter.get("license_name") or self.front_matter.get("license")
        return str(license) if license else None


def origin_of(folder: Path) -> Origin:
    """What a checkpoint's folder tells of its origin; what it cannot be read from is left out."""
    from huggingface_hub import metadata_load

    try:
        front_matter = metadata_load(folder / CARD) if (folder / CARD).is_file() else None
    except Exception:  # a card is written by hand and may contain anything
        front_matter = None
    labels = table(front_matter)
    config = read_json(folder / "config.json", optional=True)
    if "license" not in labels and _LICENSE.fullmatch(str(config.get("license", ""))):
        labels["license"] = config["license"]
    bases = labels.get("base_model")
    base = bases[0] if isinstance(bases, list) and bases else bases
    name = base if is_repository(base) else config.get("_name_or_path")
    repository = repository_of(name, folder)
    return Origin(repository, {key: labels[key] for key in _PASSED_ON if labels.get(key)})


def files_of_result(result: Report | Repacked | Rewritten | Written) -> dict[str, Path]:
    """What is uploaded besides the card: name in the repository -> file."""
    if isinstance(result, Report):
        return {file.name: file for file in result.outputs}
    names = {file.relative_to(result.out).as_posix(): file for file in files_below(result.out)}
    return {name: file for name, file in names.items() if name != CARD}


def model_card(result: Report | Repacked | Rewritten | Written, repository: str) -> str:
    """The text of the card for what is uploaded to a repository."""
    from huggingface_hub import ModelCardData

    origin = origin_of(result.home) if result.home is not None else Origin(None, {})
    base: Any = {"base_model": origin.repository, "base_model_relation": "quantized"} if origin.repository else {}
    if isinstance(result, Report):
        library, tags, body = "gguf", ["gguf", "llama.cpp"], _gguf_body(result, origin, repository)
    else:
        library, tags, body = "transformers", [_method(result)], _folder_body(result, origin)
    front = ModelCardData(**base, library_name=library, tags=tags, **origin.front_matter)
    license = origin.license or "not named in it"
    lines = [
        "---", front.to_yaml().strip(), "---", MARK, "", f"# {repository.partition('/')[2]}", "", *body,
        "", "## License", "", f"The license of {_link(origin)} applies: {license}.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _gguf_body(report: Report, origin: Origin, repository: str) -> list[str]:
    file = report.outputs[0]
    outcomes = {t.outcome for t in report.tensors}
    lines = [
        f"GGUF for llama.cpp, Ollama and other programs, made from {_link(origin)} ({report.checkpoint_format}) with "
        f"gguf-bridge {bridge.__version__}."
    ]
    if outcomes & {CARRIED, PARTLY}:
        lines[0] += " Its integer codes were carried over instead of being quantized a second time."
    if CALIBRATED in outcomes:
        lines[0] += " Layers were quantized with a calibration text."
    use, runs = purpose(read_gguf(file).metadata), [f"llama-cli -hf {repository}", f"ollama run hf.co/{repository}"]
    here = {"text": f"run {file.name} -p Hello", "guesses": f"run MODEL.gguf --draft {file.name}"}
    if use not in ("text", "text elsewhere"):
        runs = []
    if use != "text elsewhere":
        runs.append(f"hf download {repository} --include '*.gguf' --local-dir .")
        runs.append(f"gguf-bridge {here.get(use, f'serve {file.name}')}")
    sizes = [(f.name, size_text(f.stat().st_size)) for f in report.outputs]
    weights = sum(math.prod(t.shape) for t in report.tensors)
    return [
        *lines, "", "## Run it", "", "```sh", *runs, "```",
        "", "## Files", "", *_table([("file", "size"), *sizes]),
        "", f"{weights / 1e6:.1f} M weights, {report.bpw():.2f} bits per weight.",
        "", "## Types and errors", "", *_table(report.rows()),
        "", "NMSE: squared error of the weights, divided by their squares, compared with the checkpoint's. "
        + "".join(f"{line[0].upper()}{line[1:]}. " for line in report.legend()).strip(),
    ]  # fmt: skip


def _folder_body(result: Repacked | Rewritten | Written, origin: Origin) -> list[str]:
    verb = "repacked" if isinstance(result, Repacked | Rewritten) else "quantized"
    return [
        f"A {_method(result).upper()} checkpoint, {verb} from {_link(origin)} with gguf-bridge {bridge.__version__}.",
        "", *_table([("", ""), *result.facts()]),
        "", "Run it with transformers or vLLM; `gguf-bridge convert` makes a GGUF of it.",
    ]  # fmt: skip


def _method(result: Repacked | Rewritten | Written) -> str:
    return result.format.partition("_")[0]


def _link(origin: Origin) -> str:
    name = origin.repository
    return f"[{name}](https://huggingface.co/{name})" if name else "the checkpoint"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table; the first row is its head."""
    head, *rest = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [head, "|" + "---|" * len(rows[0]), *rest]
