import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

import pytest
from damage import flip
from errors import rejects

from tidegate import InputError
from tidegate._json import add_checksum, decode, decode_part, encode, parse_json, verify_checksum


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    value: float | None
    kind: Literal["leaf"] = "leaf"


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    leaves: tuple[Leaf, ...] = ()
    numbers: tuple[tuple[float, ...], ...] | None = None
    first: Leaf | None = None
    kind: Literal["branch"] = "branch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    parts: tuple[Leaf | Branch, ...]
    named: dict[str, Leaf]


def through_json(value, kind):
    return decode(kind, json.loads(json.dumps(asdict(value))))


VALUES = [
    Leaf(value=None),
    Leaf(value=0.1 + 0.2),
    Branch(),
    Branch(leaves=(Leaf(value=1.0), Leaf(value=None)), numbers=((1.0, 2.0), ()), first=Leaf(value=5e-324)),
    Tree(parts=(Branch(), Leaf(value=3.0)), named={"a": Leaf(value=None)}),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_what_goes_through_json_comes_back_equal(value):
    assert through_json(value, type(value)) == value


@pytest.mark.parametrize("data", [{"kind": "root"}, {"kind": ["leaf"]}, {}])
def test_an_unknown_kind_is_an_error(data):
    with rejects("kind"):
        decode(Leaf | Branch, data)


@dataclass(frozen=True)
class Even:
    half: int

    def __post_init__(self):
        if self.half < 0:
            raise InputError("half", expected="at least 0")

    def to_dict(self):
        return {"half": self.half}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    name: str
    count: int
    loss: float | None
    state: Literal["finished", "failed"]
    done: bool = False
    pair: tuple[float, float] = (0.0, 0.0)
    cell: float | str | None = None
    shares: tuple[float, ...] = ()
    curve: list[Leaf] = field(default_factory=list)
    named: dict[str, tuple[int, ...]] = field(default_factory=dict)
    anything: dict[str, Any] = field(default_factory=dict)
    widths: int | tuple[int, ...] | None = None
    even: Even = field(default=Even(half=0), metadata={"decode": lambda value: decode_part(Even, value)})


GOOD = {"name": "a", "count": 3, "loss": 0.5, "state": "failed"}
MISFITS = [
    ({"name": 3}, "name", "a text"),
    ({"count": 1.0}, "count", "a whole number"),
    ({"count": True}, "count", "a whole number"),
    ({"loss": "abc"}, "loss", "a number or null"),
    ({"loss": 10**400}, "loss", "a number or null"),
    ({"state": "junk"}, "state", "'finished' or 'failed'"),
    ({"state": ["failed"]}, "state", "'finished' or 'failed'"),
    ({"done": 1}, "done", "true or false"),
    ({"pair": [1.0]}, "pair", "a list of 2"),
    ({"cell": [1]}, "cell", "a number or a text or null"),
    ({"shares": "12"}, "shares", "a list"),
    ({"shares": {"0": 1.0}}, "shares", "a list"),
    ({"widths": [1, "x"]}, "widths[1]", "a whole number"),
    ({"curve": [{"value": 1.0}, {"value": "abc"}]}, "curve[1].value", "a number or null"),
    ({"curve": [{}]}, "curve[0].value", "given"),
    ({"curve": [{"value": 1.0, "size": 2}]}, "curve[0].size", "a field of Leaf: value, kind"),
    ({"named": {"a": [1, None]}}, "named.a[1]", "a whole number"),
    ({"even": {"half": 0.5}}, "even.half", "a whole number"),
    ({"even": {"half": -1}}, "even.half", "at least 0"),
]


@pytest.mark.parametrize(("change", "path", "expected"), MISFITS, ids=[repr(row[0]) for row in MISFITS])
def test_what_does_not_fit_its_type_is_rejected_by_its_path(change, path, expected):
    with rejects(path) as rejected:
        decode(Sample, GOOD | change)
    assert rejected.value.expected == expected
    with rejects(f"line.{path}"):
        decode(Sample, GOOD | change, where="line")


@pytest.mark.parametrize("value", [3, None, [GOOD]])
def test_a_document_of_another_shape_is_rejected(value):
    with rejects("value"):
        decode(Sample, value)


def test_a_long_name_is_cut_short_in_the_error():
    with rejects(f"{'x' * 200}… (10,000 characters)"):
        decode(Sample, GOOD | {"x" * 10_000: 1})


@pytest.mark.parametrize("name", GOOD)
def test_a_missing_field_without_a_default_is_rejected(name):
    with rejects(name):
        decode(Sample, {own: value for own, value in GOOD.items() if own != name})


def test_what_fits_comes_back_whole():
    full = {
        **GOOD, "count": 10**30, "loss": 1, "pair": [1, 2.5], "cell": "x", "shares": [0.5, 1], "curve": [{"value": 2}],
        "named": {"a": [1, 2]}, "anything": {"deep": [{"a": [None]}]}, "widths": [3, 4], "even": {"half": 2},
    }  # fmt: skip
    read = decode(Sample, full)
    assert read.even == Even(2)
    assert json.loads(json.dumps(encode(read))) == {**full, "done": False, "curve": [{"value": 2, "kind": "leaf"}]}


def test_null_may_stand_for_nan_where_a_number_belongs_and_nowhere_else():
    read = decode(Sample, GOOD | {"loss": None, "shares": [None, 1.0]}, null_is_nan=True)
    assert read.loss is None
    assert math.isnan(read.shares[0])
    with rejects("count"):
        decode(Sample, GOOD | {"count": None}, null_is_nan=True)


@pytest.mark.parametrize(
    "text",
    ["", "{", b"\xff\xfe\x00", "NaN", "[-Infinity]", "1e999", "[" * 100_000, '{"a":' * 100_000, "1" * 5000],
    ids=["empty", "cut", "bytes", "nan", "infinity", "overflow", "lists", "objects", "digits"],
)
def test_a_text_that_is_not_json_is_rejected(text):
    with rejects("text"):
        parse_json(text)


class TestAChecksum:
    value: ClassVar = {"b": [1, 2.5, None], "a": {"text": "tide", "flag": True}}

    def test_does_not_depend_on_the_layout(self):
        for text in (
            json.dumps(add_checksum(self.value)),
            json.dumps(add_checksum(self.value), indent=3, sort_keys=True),
        ):
            assert verify_checksum(parse_json(text)) == self.value

    def test_notices_every_flipped_bit_that_changes_the_content(self):
        text = json.dumps(add_checksum(self.value)).encode()
        for bit in range(8 * len(text)):
            try:
                assert verify_checksum(parse_json(flip(text, bit))) == self.value
            except ValueError:
                continue

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            (lambda whole: {name: value for name, value in whole.items() if name != "digest"}, "digest"),
            (lambda whole: whole | {"digest": "0" * 16}, "digest"),
            (lambda whole: whole | {"digest": None}, "digest"),
            (lambda whole: whole | {"b": [1, 2.5, 0]}, "digest"),
            (lambda whole: whole | {"c": None}, "digest"),
            (lambda whole: [whole], "value"),
        ],
        ids=["none", "another", "null", "a value", "a field", "a list"],
    )
    def test_notices_a_change(self, change, field):
        with rejects(field):
            verify_checksum(change(add_checksum(self.value)))

    def test_of_what_is_nested_too_deeply_is_rejected(self):
        deep = []
        for _ in range(5_000):
            deep = [deep]
        with rejects("value"):
            verify_checksum({"a": deep, "digest": ""})
