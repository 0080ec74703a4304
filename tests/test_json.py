import json
from dataclasses import asdict, dataclass
from typing import Literal

import pytest

from tidegate._json import read_as


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
