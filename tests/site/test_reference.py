"""The reference describes every public name once. The lists are read from the sources; the site is not built here."""

import re
from collections import Counter
from pathlib import Path

import pytest
from documents import python_blocks
from public_names import Origin, definition_of, described_by, names_from, public_names

import tidegate
import tidegate.tensors
import tidegate.torch

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))


def described() -> Counter[Origin]:
    return Counter(name.origin for page in PAGES for name in described_by(page.read_text(encoding="utf-8")))


def test_every_public_name_is_described():
    found = described()
    missing = [str(name) for name in public_names() if name.origin not in found]
    assert not missing, f"in no page of docs/reference: {missing}"


def test_no_name_is_described_twice():
    assert [origin for origin, times in described().items() if times > 1] == []


def test_the_list_of_public_names_is_that_of_the_packages():
    for package in (tidegate, tidegate.tensors, tidegate.torch):
        listed = [name for name in public_names() if name.package == package.__name__]
        assert [name.name for name in listed] == package.__all__


def test_a_page_that_leaves_out_a_module_leaves_out_its_names():
    page = (ROOT / "docs" / "reference" / "tensors.md").read_text(encoding="utf-8")
    without = page.replace(".. public:: tidegate.tensors tidegate.tensors.sink", "")
    assert {name.name for name in set(described_by(page)) - set(described_by(without))} >= {
        "sink_attention",
        "sink_mass",
    }


def test_a_name_is_described_where_the_outermost_package_has_it():
    assert "observe" in {name.name for name in names_from("tidegate.torch", "tidegate.torch.observing")}
    inner = {name.name for name in names_from("tidegate.torch.observing", "tidegate.torch.observing")}
    assert "Moments" in inner
    assert "observe" not in inner


def test_twenty_public_names_have_an_example_that_uses_them():
    page = ROOT / "docs" / "reference" / "examples.md"
    introduced = re.findall(r"^`(\w+)`(?: and `(\w+)`)?: ", page.read_text(encoding="utf-8"), re.MULTILINE)
    names = {name for pair in introduced for name in pair if name}
    code = "\n".join(source for _, source in python_blocks(page))
    assert len(names) == 20
    assert names <= {name.name for name in public_names()}
    assert [name for name in names if not re.search(rf"import .*\b{name}\b", code)] == []


@pytest.mark.parametrize(
    ("origin", "kind"),
    [
        (Origin("tidegate.gate", "Gate"), "class"),
        (Origin("tidegate.gate", "legal_gates"), "function"),
        (Origin("tidegate.gates", "GateLike"), "data"),
    ],
)
def test_a_definition_has_its_kind_and_its_docstring(origin, kind):
    assert definition_of(origin).kind == kind
    assert definition_of(origin).docstring


def test_a_name_that_is_not_defined_is_refused():
    with pytest.raises(LookupError, match=r"tidegate\.gate does not define Bridge"):
        definition_of(Origin("tidegate.gate", "Bridge"))
