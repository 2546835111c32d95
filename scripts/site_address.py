"""Gives the site the addresses that pyproject.toml has under [project.urls]: a hook (`hooks` in mkdocs.yml).

Without them, the site has no link to a repository.
"""

import tomllib
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def on_config(config: Any) -> Any:
    """The site's configuration with the addresses of the repository and of the site, if they are set."""
    urls = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"].get("urls", {})
    if "Repository" in urls:
        config.repo_url = urls["Repository"]
        config.repo_name = config.repo_url.rstrip("/").partition("://")[2].partition("/")[2]
    if "Documentation" in urls:
        config.site_url = urls["Documentation"]
    return config
