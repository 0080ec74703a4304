import json
import math
import re
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

import pytest
from damage import flip

from tidegate._json import open_sealed, parse_json, read_as, seal


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
    return read_as(kind, json.loads(json.dumps(asdict(value))))


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


@pytest.mark.parametrize("value", [Leaf(value=1.0), Branch()], ids=repr)
def test_kinds_tell_the_dataclasses_of_a_union_apart(value):
    assert through_json(value, Leaf | Branch) == value


def test_missing_fields_take_their_defaults():
    assert read_as(Branch, {}) == Branch()


def test_an_unknown_field_is_refused():
    with pytest.raises(ValueError, match="Leaf has no field colour, size"):
        read_as(Leaf, {"value": 1.0, "size": 2, "colour": 3})


@pytest.mark.parametrize("data", [{"kind": "root"}, {}])
def test_an_unknown_kind_is_refused(data):
    with pytest.raises(ValueError, match="kind must be one of branch, leaf; got"):
        read_as(Leaf | Branch, data)


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


GOOD = {"name": "a", "count": 3, "loss": 0.5, "state": "failed"}
MISFITS = [
    ({"name": 3}, "name must be a text; got 3."),
    ({"count": 1.0}, "count must be a whole number; got 1.0."),
    ({"count": True}, "count must be a whole number; got True."),
    ({"count": None}, "count must be a whole number; got None."),
    ({"loss": "abc"}, "loss must be a number or null; got 'abc'."),
    ({"loss": False}, "loss must be a number or null; got False."),
    ({"loss": 10**400}, "loss must be a number or null; got 1000"),
    ({"state": "junk"}, "state must be 'finished' or 'failed'; got 'junk'."),
    ({"state": ["failed"]}, "state must be 'finished' or 'failed'; got ['failed']."),
    ({"done": 1}, "done must be true or false; got 1."),
    ({"pair": [1.0]}, "pair must be a list of 2; got [1.0]."),
    ({"pair": [1.0, "x"]}, "pair[1] must be a number; got 'x'."),
    ({"cell": [1]}, "cell must be a number or a text or null; got [1]."),
    ({"shares": 1.0}, "shares must be a list; got 1.0."),
    ({"shares": {"0": 1.0}}, "shares must be a list; got {'0': 1.0}."),
    ({"curve": [{"value": 1.0}, {"value": "abc"}]}, "curve[1].value must be a number or null; got 'abc'."),
    ({"curve": [{}]}, "curve[0].value is missing."),
    ({"curve": [{"value": 1.0, "size": 2}]}, "curve[0] has no field size."),
    ({"curve": [[]]}, "curve[0] must be an object of fields; got []."),
    ({"named": [1]}, "named must be an object of fields; got [1]."),
    ({"named": {"a": [1, None]}}, "named.a[1] must be a whole number; got None."),
    ({"x" * 10_000: 1}, f"Sample has no field {'x' * 200}… (10,000 characters)."),
]


@pytest.mark.parametrize(("change", "words"), MISFITS, ids=[row[1] for row in MISFITS])
def test_what_does_not_fit_its_type_is_refused_by_its_path(change, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        read_as(Sample, GOOD | change)


@pytest.mark.parametrize("name", GOOD)
def test_a_missing_field_without_a_default_is_refused(name):
    with pytest.raises(ValueError, match=f"^{name} is missing"):
        read_as(Sample, {own: value for own, value in GOOD.items() if own != name})


def test_what_fits_comes_back_whole():
    full = {
        **GOOD, "count": 10**30, "loss": 1, "pair": [1, 2.5], "cell": "x", "shares": [0.5, 1], "curve": [{"value": 2}],
        "named": {"a": [1, 2]}, "anything": {"deep": [{"a": [None]}]},
    }  # fmt: skip
    assert json.loads(json.dumps(asdict(read_as(Sample, full)))) == {
        **full, "done": False, "curve": [{"value": 2, "kind": "leaf"}]
    }  # fmt: skip


def test_null_may_stand_for_nan_where_a_number_belongs_and_nowhere_else():
    read = read_as(Sample, GOOD | {"loss": None, "shares": [None, 1.0]}, null_is_nan=True)
    assert read.loss is None
    assert math.isnan(read.shares[0])
    with pytest.raises(ValueError, match="count must be a whole number; got None"):
        read_as(Sample, GOOD | {"count": None}, null_is_nan=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        (b"\xff\xfe\x00", "decode"),
        ("NaN", "NaN is no number"),
        ("[-Infinity]", "-Infinity is no number"),
        ("1e999", "'1e999' is too large"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("1" * 5000, "digits"),
    ],
    ids=["empty", "cut", "bytes", "nan", "infinity", "overflow", "lists", "objects", "digits"],
)
def test_a_text_that_is_no_json_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        parse_json(text)


class TestASeal:
    value: ClassVar = {"b": [1, 2.5, None], "a": {"text": "tide", "flag": True}}

    def test_opens_to_what_was_sealed_however_it_is_written(self):
        for text in (json.dumps(seal(self.value)), json.dumps(seal(self.value), indent=3, sort_keys=True)):
            assert open_sealed(parse_json(text)) == self.value

    def test_notices_every_flipped_bit_that_changes_the_content(self):
        text = json.dumps(seal(self.value)).encode()
        for bit in range(8 * len(text)):
            try:
                assert open_sealed(parse_json(flip(text, bit))) == self.value
            except ValueError:
                continue

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda sealed: {name: value for name, value in sealed.items() if name != "digest"}, "has no digest"),
            (lambda sealed: sealed | {"digest": "0" * 16}, "does not fit its digest"),
            (lambda sealed: sealed | {"digest": None}, "does not fit its digest"),
            (lambda sealed: sealed | {"b": [1, 2.5, 0]}, "does not fit its digest"),
            (lambda sealed: sealed | {"c": None}, "does not fit its digest"),
            (lambda sealed: [sealed], "must be an object of fields"),
        ],
        ids=["none", "another", "null", "a value", "a field", "a list"],
    )
    def test_is_broken_by_a_change(self, change, words):
        with pytest.raises(ValueError, match=words):
            open_sealed(change(seal(self.value)))

    def test_of_what_is_nested_too_deeply_is_refused(self):
        deep = []
        for _ in range(5_000):
            deep = [deep]
        with pytest.raises(ValueError, match="nested too deeply"):
            open_sealed({"a": deep, "digest": ""})
