"""Numbers and texts that other programs wrote."""

import pytest
from cells import walk

from jetstream_ext.protocol.numbers import LARGEST, json_number, json_text, parse_number


@walk("text, number", [("0", 0), ("7", 7), ("007", 7), (str(LARGEST), LARGEST)])
def test_decimal_digits_are_a_number(text: str, number: int) -> None:
    assert parse_number(text) == number
    assert parse_number(text.encode()) == number


@walk("text", [
    "", "-5", "+7", " 7", "7 ", "7\n", "1_000", "0x7", "7.0", "1e3", "٣", "\uff15", "²", "∞", "\ud800",
    str(LARGEST + 1),
])  # fmt: skip
def test_other_text_is_no_number(text: str) -> None:
    assert parse_number(text) is None
    assert parse_number(text.encode("utf-8", "surrogatepass")) is None


def test_a_json_number_is_an_integer_within_its_limits() -> None:
    assert json_number(0, "seq") == 0
    assert json_number(LARGEST, "seq") == LARGEST
    assert json_number(-1, "max_age", low=-1) == -1


@walk("value", [None, True, 1.0, "1", [], {}, -1, LARGEST + 1, float("inf")])
def test_any_other_json_value_is_no_number(value: object) -> None:
    with pytest.raises(ValueError, match="'seq' is not an integer from 0 to"):
        json_number(value, "seq")


def nested(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    return value


@walk("value", [None, 1, True, {}, nested(2000)])
def test_a_json_value_that_is_no_string_is_refused_without_showing_it(value: object) -> None:
    assert json_text("", "name") == ""
    with pytest.raises(ValueError, match="'name' is not a string"):
        json_text(value, "name")
