"""The site's pages that are not in docs/: README, CHANGELOG and CONTRIBUTING; and docstrings as lists.

A hook (`hooks` in mkdocs.yml): a page that says `<!-- README.md -->` becomes that file of the checkout, with links
adjusted to the site.

An extension of griffe, which reads docstrings for mkdocstrings: lines `name  description` become a list.
"""

import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parent.parent
_INCLUDED = re.compile(r"<!-- (\w+\.md) -->")
_PARAMETER = re.compile(r"(\w+)  +(\S.*)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page's text, or that of the file that it names."""
    if not (match := _INCLUDED.search(markdown)):
        return markdown
    text = (ROOT / match[1]).read_text(encoding="utf-8")
    text = re.sub(r"\]\(docs/", "](", text)
    text = re.sub(r"\[(\w+)\]\(examples/[^)]*\)", r"\1 (`examples/`)", text)
    return re.sub(r"\]\((CHANGELOG|CONTRIBUTING)\.md", lambda m: f"]({m[1].lower()}.md", text)


def with_lists(docstring: str) -> str:
    """A docstring whose aligned lines `name  description` are a list in Markdown."""
    lines: list[str] = []
    inside = False
    for line in docstring.splitlines():
        if match := _PARAMETER.fullmatch(line):
            lines += [] if inside else [""]
            lines.append(f"- `{match[1]}`: {match[2]}")
            inside = True
        elif inside and line.startswith("  "):
            lines.append(f"  {line.strip()}")
        else:
            lines += ["", line] if inside and line else [line]
            inside = False
    return "\n".join(lines)


class Docstrings(griffe.Extension):
    """Rewrites each docstring once it is read, and gives options the help of their flags."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        attributes = [member for member in cls.members.values() if isinstance(member, griffe.Attribute)]
        if any(str(attribute.value).startswith("option(") for attribute in attributes):
            dataclass = getattr(import_module(cls.module.canonical_path), cls.name)
            helps = {field.name: field.metadata["flag"].help for field in fields(dataclass) if "flag" in field.metadata}
            for attribute in attributes:
                if attribute.name in helps:
                    attribute.docstring = griffe.Docstring(helps[attribute.name], parent=attribute)
