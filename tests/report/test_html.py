import base64
import dataclasses
import gzip
import json
import re
from html.parser import HTMLParser

import pytest
from pages import comparison_page, every_panel, require_policy
from plotly.offline import get_plotlyjs

from tidegate.report import html as html_module
from tidegate.report import html_page, write_page
from tidegate.report.page import Checks, Intervals, Lines, Maps, Page, Prose, Section, Table, Verdicts, Views

PAGE = comparison_page()
HTML = html_page(PAGE)
LIMIT = 6_000_000
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Document(HTMLParser):
    """Elements with their attributes and text, and whether tags close in order."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.open = []
        self.unbalanced = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        element = {"tag": tag, "text": "", **dict(attributes)}
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag):
        if self.open and self.open[-1]["tag"] == tag:
            self.open.pop()
        else:
            self.unbalanced.append(tag)

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag, **attributes):
        return [e for e in self.elements if e["tag"] == tag and all(e.get(k) == v for k, v in attributes.items())]


@pytest.fixture(scope="module")
def document():
    return Document(HTML.replace(get_plotlyjs(), ""))


def page_of(*sections, data=None):
    return Page(title="t", summary="", sections=sections, data=data or {})


def test_the_whole_page_is_one_small_file_with_plotly_once():
    assert len(HTML.encode()) < LIMIT
    assert HTML.count(get_plotlyjs()) == 1
    assert html_page(comparison_page()) == HTML


def test_tags_close_in_order_and_names_are_used_once(document):
    assert document.unbalanced == []
    assert document.open == []
    names = [element["id"] for element in document.elements if "id" in element]
    assert len(names) == len(set(names))
    referring = ("aria-labelledby", "aria-describedby", "aria-controls")
    assert {element[key] for element in document.elements for key in referring if key in element} <= set(names)


def test_nothing_is_fetched_and_only_named_scripts_run(document):
    require_policy(HTML)
    links = [element[key] for element in document.elements for key in ("src", "href") if key in element]
    assert all(link.startswith(("#", "data:")) for link in links)


def test_text_is_never_markup_and_json_cannot_end_its_script():
    assert "<b>bold" not in HTML.replace(get_plotlyjs(), "")
    hostile = page_of(data={"x": "</script><script>alert(1)</script><!--"})
    text = html_page(hostile)
    assert "alert(1)</script>" not in text
    assert text.count("<script") == HTML.replace('<script type="application/json">', "").count("<script")


def test_every_figure_is_json_without_nan(document):
    figures = [script["text"] for script in document.all("script", type="application/json") if "id" not in script]
    assert len(figures) == len(document.all("div", role="img")) > 5

    def refuse(name):
        raise AssertionError(name)

    assert all(json.loads(text, parse_constant=refuse)["data"] for text in figures)


def test_long_data_are_packed_so_that_the_page_stays_small():
    data = {"numbers": [k / 7 for k in range(150_000)]}
    text = html_page(page_of(data=data))
    assert len(json.dumps(data)) > 2_000_000
    assert len(text.encode()) < LIMIT
    (results,) = Document(text.replace(get_plotlyjs(), "")).all("script", id="page_data")
    assert results["data-encoding"] == "gzip"
    assert json.loads(gzip.decompress(base64.b64decode(results["text"]))) == data


def test_every_chart_has_a_name_and_a_description_in_words(document):
    described = {element["id"]: element["text"] for element in document.elements if "id" in element}
    charts = document.all("div", role="img")
    drawn = [panel for panel in every_panel(PAGE) if isinstance(panel, Lines | Maps) or panel.kind == "intervals"]
    assert {described[chart["aria-describedby"]] for chart in charts} == {panel.alternative for panel in drawn}
    assert all(chart["aria-label"] for chart in charts)


def test_a_violated_check_says_so_and_is_marked(document):
    violated = document.all("li", **{"class": "violated"})
    assert ["violated" in item["text"] for item in violated] == [True]
    (panel,) = [panel for panel in every_panel(PAGE) if isinstance(panel, Checks)]
    assert all(any(check.name in item["text"] for item in document.all("li")) for check in panel.items)


def test_code_between_backticks_is_set_as_code(document):
    assert "tidegate compare" in [code["text"] for code in document.all("code")]
    plain = html_page(page_of(Section(title="s", panels=(Prose(paragraphs=("a ` b", "`<i>`")),))))
    assert "<p>a ` b</p>" in plain
    assert "<code>&lt;i&gt;</code>" in plain


def test_a_page_of_empty_panels_is_a_page():
    panels = (
        Verdicts(items=(), rule=""),
        Table(title="t", columns=(), rows=()),
        Intervals(title="t", alternative="a", x_label="x", items=()),
        Lines(title="t", alternative="a", x_label="x", y_label="y", series=()),
        Maps(title="t", alternative="a", row_label="r", column_label="c", value_label="v", maps=()),
        Checks(items=()),
        Views(title="t", views=()),
    )
    found = Document(html_page(page_of(Section(title="s", panels=panels))).replace(get_plotlyjs(), ""))
    assert found.unbalanced == []


def test_three_files_are_written_and_hold_the_same_data(tmp_path):
    folder = tmp_path / "new" / "folder"
    path = write_page(PAGE, folder)
    assert path == folder / "report.html"
    assert sorted(file.name for file in folder.iterdir()) == ["report.html", "report.md", "results.json"]
    assert path.read_text(encoding="utf-8") == HTML
    assert json.loads((folder / "results.json").read_text()) == PAGE.data | {"diverged": None}


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    write_page(PAGE, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def fail(page):
        raise RuntimeError("no page")

    monkeypatch.setattr(html_module, "html_page", fail)
    with pytest.raises(RuntimeError, match="no page"):
        write_page(dataclasses.replace(PAGE, title="new"), tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_nothing_steers_a_terminal_or_turns_text_around(tmp_path):
    hostile = "a\x1b[31m\x9b\u202e\udcff"
    page = dataclasses.replace(
        page_of(Section(title="s", panels=(Prose(paragraphs=(hostile,)),))), title=hostile, data={hostile: hostile}
    )
    write_page(page, tmp_path)
    steering = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]")
    text = (tmp_path / "report.html").read_bytes().decode()
    assert not steering.search(text.replace(get_plotlyjs(), ""))
    assert r"<title>a\u001b[31m\u009b\u202e\udcff</title>" in text
    results = (tmp_path / "results.json").read_bytes().decode()
    assert not steering.search(results)
    assert json.loads(results) == {hostile: hostile}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("default-src 'none'", "default-src *"),
        ("<script>", "<script>alert(1);"),
        ("; base-uri 'none'", ""),
        ("<meta charset", "<script src=x></script><meta charset"),
    ],
)
def test_a_page_with_a_weaker_policy_is_seen(before, after):
    assert before in HTML
    with pytest.raises(AssertionError):
        require_policy(HTML.replace(before, after))
