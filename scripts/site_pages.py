"""A hook of mkdocs: README, CHANGELOG and CONTRIBUTING as pages of the site, and its links to the repository.

A page that says `<!-- README.md -->` becomes that file of the checkout, with links adjusted to the site.

The environment variable SITE_REPOSITORY (`repo_url` in mkdocs.yml) is where the publisher's repository is, such as
https://github.com/OWNER/gguf-bridge. With it, the header links to the repository, each page to its source, and links to
files outside docs/ lead there. Without it there are none of these, and such files are named instead.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_INCLUDED = re.compile(r"<!-- (\w+\.md) -->")
_PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """No links to sources where no repository is named."""
    if not config.repo_url:
        config.repo_url = config.repo_name = config.edit_uri = None
    return config


def on_page_markdown(markdown: str, *, page: Any = None, config: Any = None, **_: Any) -> str:
    """The page's text, or that of the file that it names."""
    if not (match := _INCLUDED.search(markdown)):
        return markdown
    repository = config.repo_url.rstrip("/") if config is not None and config.repo_url else None
    if repository is not None and page is not None:
        page.edit_url = f"{repository}/{config.edit_uri.removesuffix('docs/')}{match[1]}"

    def adjusted(link: re.Match[str]) -> str:
        label, (name, sign, anchor) = link[1], link[2].partition("#")
        if name.startswith("docs/"):
            return f"[{label}]({name.removeprefix('docs/')}{sign}{anchor})"
        if name in _PAGES:
            return f"[{label}]({_PAGES[name]}{sign}{anchor})"
        if repository is None:
            return f"{label} (`{name}`)" if label.strip("`") != name else f"`{name}`"
        return f"[{label}]({repository}/{_blob(config.edit_uri)}{name}{sign}{anchor})"

    text = (ROOT / match[1]).read_text(encoding="utf-8")
    return _LINK.sub(adjusted, re.sub(r'(\]\(|(?:src|srcset)=")docs/(?=pictures/)', r"\1", text))


def _blob(edit_uri: str) -> str:
    """Where files of the repository are shown: "blob/main/" of "edit/main/docs/"."""
    return edit_uri.removesuffix("docs/").replace("edit/", "blob/", 1)
