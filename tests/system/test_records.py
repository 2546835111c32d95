"""Records are dataclasses but for what they cost."""

from __future__ import annotations

import pickle
from dataclasses import asdict, field, fields, replace

import pytest

from bridge.system.records import record


@record
class Point:
    x: int
    y: int = 2
    names: list[str] = field(default_factory=list, compare=False)

    @property
    def sum(self) -> int:
        return self.x + self.y


@record(frozen=False)
class Place:
    x: int
    y: int = 2


def test_values_come_by_place_by_name_or_by_default() -> None:
    assert vars(Point(1)) == {"x": 1, "y": 2, "names": []}
    assert vars(Point(1, y=3, names=["a"])) == vars(Point(1, 3, ["a"])) == {"x": 1, "y": 3, "names": ["a"]}
    assert Point(1).names is not Point(1).names
    assert Point(1).sum == 3


@pytest.mark.parametrize(
    ("values", "named", "said"),
    [
        ((), {}, "Point needs x"),
        ((1, 2, [], 4), {}, "takes each of x, y, names once"),
        ((1,), {"x": 1}, "takes each of x, y, names once"),
        ((1,), {"z": 1}, "takes each of x, y, names once"),
    ],
)
def test_other_values_are_an_error(values: tuple[int, ...], named: dict[str, int], said: str) -> None:
    kind: type = Point
    with pytest.raises(TypeError, match=said):
        kind(*values, **named)


def test_records_are_equal_and_have_the_same_hash_where_their_fields_do() -> None:
    assert Point(1) == Point(1, 2, ["not compared"])
    assert hash(Point(1)) == hash(Point(1, names=["not compared"]))
    assert Point(1) != Point(2)
    assert Point(1) != Place(1)
    place = Place(1)
    assert place == place
    assert place != Place(1)
    place.x = 4
    assert place.x == 4


def test_what_works_on_dataclasses_works_on_them() -> None:
    assert [f.name for f in fields(Point)] == ["x", "y", "names"]
    assert replace(Point(1), y=5) == Point(1, 5)
    assert asdict(Point(1)) == {"x": 1, "y": 2, "names": []}
    assert repr(Point(1)) == "Point(x=1, y=2, names=[])"
    assert pickle.loads(pickle.dumps(Point(3))) == Point(3)
