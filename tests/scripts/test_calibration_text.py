"""The made-up calibration texts are those that their script makes."""

from __future__ import annotations

import pytest

from scripts.make_calibration_text import FOLDER, Author, text_of


@pytest.mark.parametrize("name", ["articles.txt", "chats.jsonl", "lists.txt", "tables.txt"])
def test_a_text_of_the_package_is_what_the_script_makes(name: str) -> None:
    assert text_of(name) == (FOLDER / name).read_text(encoding="utf-8")


def test_templates_take_ranges_choices_and_what_is_given() -> None:
    filled = Author(0).fill("«1..1:02» «0..0:.1f» «y+2..2» «x|x» «town:<6»| «Town» «n»", y=40, town="port", n=lambda: 7)
    assert filled == "01 0.0 42 x port  | Port 7"
