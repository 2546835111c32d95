"""Fields of JSON: what is taken for each kind, and what the errors say."""

from typing import Any

import pytest

from bridge.system.fields import (
    FieldError,
    Fields,
    Kind,
    flag,
    integers,
    list_of,
    number,
    object_,
    one_of,
    optional,
    table,
    text,
    whole,
    whole_number,
)

WRONG: list[tuple[Kind, Any, str]] = [
    (text, 3, "key is 3, must be a text"),
    (text, "\ud800", "must be a text"),
    (number, True, "key is True, must be a number"),
    (number, 1 << 2000, "must be a number"),
    (flag, 1, "key is 1, must be true or false"),
    (object_, [], r"key is \[\], must be an object"),
    (whole(1), 0, "key is 0, must be a whole number from 1 on"),
    (whole(), True, "key is True, must be a whole number from 0 on"),
    (whole(), 4.0, "must be a whole number"),
    (list_of(), "ab", "key is 'ab', must be a list"),
    (list_of(least=1), [], "must be a list that is not empty"),
    (list_of(text), ["a", 3], "key's item is 3, must be a text"),
    (one_of(("a", "b")), "c", "unknown key 'c': choose one of a, b"),
    (one_of(("a", "b")), ["a"], r"unknown key \['a'\]"),
    (optional(flag), 1, "must be true or false"),
]


@pytest.mark.parametrize(("kind", "value", "message"), WRONG)
def test_a_value_of_another_kind_is_refused_with_what_it_must_be(kind: Kind, value: Any, message: str) -> None:
    with pytest.raises(FieldError, match=message):
        Fields({"key": value}, "the body").take("key", kind)


def test_a_field_may_be_missing_only_with_a_default() -> None:
    fields = Fields({"other": 1}, "the body")
    assert fields.take("key", text, "a") == "a"
    with pytest.raises(FieldError, match="'key' is missing"):
        fields.take("key", text)
    with pytest.raises(FieldError, match="the body is 3, must be an object"):
        Fields(3, "the body")


def test_a_field_is_taken_once_and_the_object_stays_as_it_is() -> None:
    values = {"key": None, "left": 1}
    fields = Fields(values, "the body")
    assert fields.take("key", optional(text)) is None
    assert fields.left == {"left": 1}
    assert len(values) == 2


def test_a_config_is_read_with_what_it_holds() -> None:
    assert [table(value) for value in ({"a": 1}, [], None)] == [{"a": 1}, {}, {}]
    assert [whole_number(value) for value in (4, 4.0, "4", "-1", 4.5, "4.0", True, None)] == [4, 4, 4, -1] + 4 * [None]
    assert integers([1, 2], 2)
    assert integers([0, -2], 2)
    assert not integers([0, 2], 2, least=1)
    assert not integers([1, 2.0], 2)
    assert not integers([1, True], 2)
    assert not integers([1], 2)
    assert not integers("ab", 2)
