import re

import pytest
from pages import SPECIAL, comparison_page, every_panel

from tidegate.report import markdown_page
from tidegate.report.page import Checks, Column, Page, Prose, Section, Snippet, Table, Verdicts

ESCAPED = r'wide \<b\>bold\</b\> & "quoted" \| \[gate\]'
TEXT = markdown_page(comparison_page())


def page_of(*panels, **options):
    return Page(title="t", summary="", sections=(Section(title="s", panels=panels),), data={}, **options)


def tables(text):
    """Each table's lines."""
    return [block.split("\n") for block in text.strip().split("\n\n") if block.startswith("| ")]


def columns(line):
    return len(re.findall(r"(?<!\\)\|", line)) - 1


def test_every_row_of_a_table_has_its_columns():
    found = tables(TEXT)
    assert found
    assert all(len({columns(line) for line in table}) == 1 for table in found)


def test_names_are_shown_as_they_are():
    code = re.compile(r"`{3,}.*?`{3,}\n", re.DOTALL)
    assert ESCAPED in TEXT
    assert SPECIAL not in code.sub("", TEXT)


def test_verdicts_come_with_word_sentence_and_interval_and_checks_with_their_state():
    assert r"- **g1** — **better**: Ends 2.0 % lower" in TEXT
    assert r"(-0.0312 \[-0.0371, -0.0253\] nats/byte)" in TEXT
    assert "*Rule.* Differences to the control" in TEXT
    assert "- ✗ **violated**: **Equal parameters**" in TEXT
    assert "- ✓ holds: **Same data order**" in TEXT
    assert "> **Caution.** Only one size was run." in TEXT


def test_what_is_drawn_is_also_told():
    panels = list(every_panel(comparison_page()))
    assert all(panel.alternative in TEXT for panel in panels if panel.kind in ("lines", "maps", "intervals"))
    assert all(panel.title in TEXT for panel in panels if hasattr(panel, "title"))


def test_a_snippet_is_fenced_by_more_backticks_than_it_holds():
    text = markdown_page(page_of(Snippet(title="code", text="```\ninside\n````")))
    assert "`````text\n```\ninside\n````\n`````" in text


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a_b _c_ *d*", r"a_b \_c\_ \*d\*"),
        ("1. first", r"1\. first"),
        ("# no heading", r"\# no heading"),
        ("- no list", r"\- no list"),
        ("-0.5 is less", "-0.5 is less"),
        ("&lt; stays", r"\&lt; stays"),
        ("two\nlines", "two lines"),
        ("`code_*` and $x$", r"`code_*` and \$x\$"),
    ],
)
def test_markdown_reads_nothing_in_plain_text(text, written):
    assert f"\n\n{written}\n" in markdown_page(page_of(Prose(paragraphs=(text,))))


def test_empty_cells_stay_empty():
    table = Table(title="t", columns=(Column(title="a"), Column(title="b", digits=1)), rows=(("x", None), ("", 1.0)))
    assert tables(markdown_page(page_of(table)))[0][2:] == ["| x |  |", "|  | 1.0 |"]


def test_a_page_of_nothing_is_a_title():
    assert markdown_page(Page(title="t", summary="", sections=(), data={})) == "# t\n"
    empty = page_of(Verdicts(items=(), rule=""), Checks(items=()), Prose(paragraphs=()), footer="f")
    assert markdown_page(empty) == "# t\n\n## s\n\n---\n\nf\n"


def test_nothing_steers_the_terminal_that_shows_it():
    hostile = "a\x1b[31m\x07\x9b\u202e\udcff"
    panels = (Prose(paragraphs=(hostile, f"`{hostile}`")), Snippet(title=hostile, text=f"one\n\ttwo {hostile}"))
    page = Page(title=hostile, summary=hostile, sections=(Section(title=hostile, panels=panels),), data={})
    text = markdown_page(page)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]", text)
    assert r"`a\u001b[31m\u0007\u009b\u202e\udcff`" in text
    assert "one\n\ttwo a" in text
