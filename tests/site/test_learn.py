"""Each page of docs/learn names, below every displayed formula, a function that exists and a test that exists."""

import re
from pathlib import Path

import pytest
from public_names import public_names

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "learn").glob("*.md"))
DERIVATIONS = [page for page in PAGES if page.name != "index.md"]
TEST_LINK = r"\[`(\w+)`\]\((\S+?)\)"
CAPTION = re.compile(rf"Computed by (`\w+`(?:, `\w+`)*); checked by ({TEST_LINK}(?:, {TEST_LINK})*)\.")
NAMES = {name.name for name in public_names()}


def captions(text: str) -> list[str]:
    """The line below each displayed formula."""
    return [part.split("\n\n")[1].strip() for part in re.split(r"^(?=\$\$)", text, flags=re.MULTILINE)[1:]]


def complaint(caption: str, folder: Path) -> str | None:
    """What is wrong with a line that should name functions and a test; None if nothing is."""
    match = CAPTION.fullmatch(caption)
    if match is None:
        return f"names no function and no test: {caption}"
    functions, tests = match.group(1, 2)
    unknown = [name for name in re.findall(r"`(\w+)`", functions) if name not in NAMES]
    if unknown:
        return f"in no public package: {unknown}"
    for test, file in re.findall(TEST_LINK, tests):
        path = folder / file
        if not path.is_file() or not re.search(rf"^ *def {test}\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            return f"{file} has no {test}"
    return None


@pytest.mark.parametrize("page", DERIVATIONS, ids=lambda page: page.stem)
def test_below_every_formula_stand_its_function_and_its_test(page):
    text = page.read_text(encoding="utf-8")
    found = captions(text)
    assert len(found) == len(re.findall(r"^\$\$", text, re.MULTILINE)) > 3
    assert [fault for caption in found if (fault := complaint(caption, page.parent))] == []


@pytest.mark.parametrize("page", DERIVATIONS, ids=lambda page: page.stem)
def test_a_page_shows_the_picture_that_its_code_saves(page):
    text = page.read_text(encoding="utf-8")
    (saved,) = re.findall(r"^figure\.savefig\(\"(.+)\"\)$", text, re.MULTILINE)
    (shown,) = re.findall(r"!\[.+\]\((.+)\)", text)
    assert shown == f"../pictures/learn/{saved}"
    assert (page.parent / shown).is_file()


def test_the_first_page_lists_all_others_in_their_order():
    text = (ROOT / "docs" / "learn" / "index.md").read_text(encoding="utf-8")
    (contents,) = re.findall(r"\{toctree\}\n:hidden:\n\n(.+?)\n```", text, re.DOTALL)
    assert contents.split() == re.findall(r"^\d+\. \[.+?\]\((.+?)\.md\)", text, re.MULTILINE)
    assert sorted(contents.split()) == [page.stem for page in DERIVATIONS]


TEST = "[`test_separation_is_the_smallest_gap_in_overlap`](../../tests/tensors/test_hopfield.py)"


@pytest.mark.parametrize(
    ("caption", "fault"),
    [
        (f"Computed by `separation_quality`; checked by {TEST}.", None),
        (f"Computed by `separation_quality`; checked by {TEST}, {TEST}.", None),
        (
            f"Computed by `separation_quality`; checked by {TEST}, {TEST.replace('test_separation_is', 'test_it_is')}.",
            "../../tests/tensors/test_hopfield.py has no test_it_is_the_smallest_gap_in_overlap",
        ),
        ("It follows that", "names no function and no test: It follows that"),
        (f"Computed by `separation_of`; checked by {TEST}.", "in no public package: ['separation_of']"),
        (
            f"Computed by `entropy`; checked by {TEST.replace('test_separation_is', 'test_it_is')}.",
            "../../tests/tensors/test_hopfield.py has no test_it_is_the_smallest_gap_in_overlap",
        ),
    ],
)
def test_a_name_that_does_not_exist_is_found(caption, fault):
    assert complaint(caption, ROOT / "docs" / "learn") == fault
    assert captions(f"Text\n\n$$x$$\n\n{caption}\n\nmore") == [caption]
