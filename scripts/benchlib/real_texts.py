"""Texts of several kinds that need no network but a package registry, and windows of them.

    python         modules of the running interpreter's standard library
    manual         Python's language reference, as `help()` shows it
    law            licences and terms of use in English, of PyPI's licensedcode-data
    french-german  licences in these two languages, of the same package

Windows lie evenly over a whole text, so that all its documents are in them.
"""

import importlib.util
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from bridge.quantize.text.texts import bos_of, token_ids

from .real_models import wheel

KINDS = ("python", "manual", "law", "french-german")
_LICENCES = "licensedcode-data==32.1.0"
_MODULES = (
    "argparse", "asyncio.base_events", "csv", "difflib", "email.message", "fractions", "heapq", "json.decoder",
    "logging", "shutil", "statistics", "subprocess", "tarfile", "textwrap", "threading", "tokenize", "unittest.case",
    "urllib.parse", "zipfile",
)  # fmt: skip
_ENGLISH = (
    "apache-2.0", "cddl-1.1", "eupl-1.2", "oasis-ipr-2013", "solace-software-eula-2020", "splunk-sla",
    "tenable-nessus", "winzip-eula",
)  # fmt: skip
_FRENCH_GERMAN = (
    "cecill-2.1-fr", "cc-by-sa-3.0-de", "lal-1.3", "d-fsl-1.0-de", "liliq-rplus-1.1", "cc-by-3.0-at", "etalab-2.0-fr",
)  # fmt: skip
_MOST = 4 << 20  # characters of a text that are tokenized


def text_of(kind: str, packages: Path) -> str:
    """One of KINDS; packages are downloaded into a folder if they are not there."""
    if kind == "python":
        return "\n".join(map(_source, _MODULES))
    if kind == "manual":
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics))
    return "\n".join(_licences(_ENGLISH if kind == "law" else _FRENCH_GERMAN, packages))


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.origin:
        sys.exit(f"{module}: this Python has no source of it; give another text by --text python=FILE")
    return Path(spec.origin).read_text(encoding="utf-8")


def _licences(names: tuple[str, ...], packages: Path) -> list[str]:
    """The texts without what the package says of them: YAML between two lines of dashes."""
    with zipfile.ZipFile(wheel(_LICENCES, packages)) as archive:
        stored = [archive.read(f"licensedcode/data/licenses/{name}.LICENSE").decode("utf-8") for name in names]
    return [text.partition("\n---\n")[2] for text in stored]


def windows_of(text: str, tokenizer: Any, count: int, length: int) -> np.ndarray:
    """int64 [count, length]: windows that lie evenly over a text; each starts with BOS if the tokenizer adds it."""
    ids = token_ids(text[:_MOST], tokenizer)
    if len(ids) < count * length:
        raise ValueError(f"the text has {len(ids)} tokens, {count} windows of {length} take {count * length}")
    starts = np.linspace(0, len(ids) - length, count).astype(np.int64)
    windows = np.stack([ids[start : start + length] for start in starts])
    if (bos := bos_of(tokenizer)) is not None:
        windows[:, 0] = bos
    return windows
