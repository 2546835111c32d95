"""Files damaged at random (`tests.support.mutations`): each is read, or refused in one line; all written is finite."""

from __future__ import annotations

import pytest

from tests.support.mutations import KINDS, Seeds, mutate


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Seeds:
    return Seeds(tmp_path_factory.mktemp("seeds"))


@pytest.mark.parametrize(("kind", "count"), [("modules", 120), ("adapter", 20), ("imatrix", 20)])
def test_some_damaged_files(seeds, kind, count):
    assert [(n, *rest) for n in range(count) if (rest := mutate(n, seeds, [kind]))[2]] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(10))
def test_many_damaged_files_of_all_formats(seeds, part):
    assert [(n, *rest) for n in range(200 * part, 200 * part + 200) if (rest := mutate(n, seeds, list(KINDS)))[2]] == []
