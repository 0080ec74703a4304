"""The page in a real browser, opened from disk with the network off."""

import json
import re
from pathlib import Path

import pytest
import torch
from browser import Opened, launch_chromium, needs_chromium
from lab_lines import diverged, lines_of, page_of, recall_lines
from lab_runs import tampered, text_of
from pages import SPECIAL, comparison_page

from tidegate.lab.tasks.image import image_task
from tidegate.report import markdown_page, write_page
from tidegate.report.page import Page

pytestmark = needs_chromium

DESKTOP = {"width": 1200, "height": 900}
PHONE = {"width": 390, "height": 844}
ODD = "<b>[/x]"
"""A variant's name that HTML and terminals would misread."""
SHOWN_CHARTS_ARE_DRAWN = """() => [...document.querySelectorAll(".chart")]
    .filter((chart) => chart.offsetParent)
    .map((chart) => chart.querySelector(".main-svg") !== null)"""
CHART_INK = "() => getComputedStyle(document.querySelector('.lines .legendtext')).fill"


@pytest.fixture(scope="module")
def browser():
    with launch_chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_page(comparison_page(), tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def desktop(browser, path):
    opened = Opened(browser, path, viewport=DESKTOP, color_scheme="light")
    yield opened
    opened.context.close()


@pytest.fixture
def page(desktop):
    return desktop.page


@pytest.fixture(scope="module")
def handheld(browser, path):
    opened = Opened(browser, path, viewport=PHONE, color_scheme="dark", is_mobile=True, has_touch=True)
    yield opened
    opened.context.close()


@pytest.fixture
def phone(handheld):
    return handheld.page


def first_cells(page):
    return page.locator("figure.table tbody tr th").all_inner_texts()


def shown_figures(page):
    """Titles of the charts that can be seen and hold a drawing."""
    return page.evaluate(
        """() => [...document.querySelectorAll("figure.plot")]
            .filter((figure) => figure.offsetParent && figure.querySelector(".main-svg"))
            .map((figure) => figure.querySelector("h3").textContent)"""
    )


def is_wider_than_its_window(page):
    return page.evaluate("() => document.documentElement.scrollWidth > innerWidth")


def test_the_page_opens_offline_asks_for_nothing_and_complains_of_nothing(desktop, path):
    assert [url for url in desktop.requests if not url.startswith(("data:", "blob:"))] == [path.as_uri()]
    assert desktop.complaints == []
    assert desktop.page.locator(".chart .main-svg").count() > 10


def test_the_policy_lets_nothing_be_fetched_and_no_other_script_run(handheld):
    assert handheld.complaints == []
    ran = handheld.page.evaluate(
        """async () => {
            const script = document.createElement("script");
            script.textContent = "window.foreign = true";
            document.body.append(script);
            const fetched = await fetch("data:,x").then(() => true, () => false);
            return [window.foreign === true, fetched];
        }"""
    )
    assert ran == [False, False]
    assert any("Content Security Policy" in complaint for complaint in handheld.complaints)


def test_names_are_drawn_as_they_are(page):
    assert SPECIAL in page.locator(".lines .legendtext").all_text_contents()


def test_a_click_on_a_header_sorts_and_another_turns_the_order(page):
    header = page.locator("figure.table th", has_text="speed")
    original = first_cells(page)
    header.get_by_role("button").click()
    assert first_cells(page) == ["none", "g1", "bma", SPECIAL]
    assert header.get_attribute("aria-sort") == "descending"
    header.get_by_role("button").press("Enter")
    # The row without a number stays last.
    assert first_cells(page) == ["bma", "g1", "none", SPECIAL]
    assert header.get_attribute("aria-sort") == "ascending"
    page.locator("figure.table th", has_text="parameters").get_by_role("button").click()
    assert header.get_attribute("aria-sort") == "none"
    assert first_cells(page) == ["none", "bma", SPECIAL, "g1"]
    page.locator("figure.table th", has_text="variant").get_by_role("button").click()
    assert first_cells(page) == sorted(original)


def test_a_table_is_copied_as_the_markdown_that_the_twin_has(desktop):
    desktop.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = desktop.page
    # By falling speed the rows are in the order of the twin.
    header = page.locator("figure.table th", has_text="speed")
    while header.get_attribute("aria-sort") != "descending":
        header.get_by_role("button").click()
    page.get_by_role("button", name="Copy Markdown").click()
    page.get_by_role("button", name="Copied").wait_for()
    copied = page.evaluate("() => navigator.clipboard.readText()")
    assert copied.startswith("| variant | parameters | share (%) |")
    assert copied in markdown_page(comparison_page())


def test_a_table_is_copied_as_csv_with_unrounded_numbers(desktop):
    desktop.context.grant_permissions(["clipboard-read", "clipboard-write"])
    desktop.page.get_by_role("button", name="Copy CSV").click()
    lines = desktop.page.evaluate("() => navigator.clipboard.readText()").splitlines()
    assert lines[0].startswith("variant,parameters,share (%)")
    assert any(line.startswith("g1,221696,3.84,6.6,1.5235,0.0117,2.198,-0.0312,") for line in lines)
    assert any(line.startswith('"' + SPECIAL.replace('"', '""') + '",') for line in lines)


def test_copying_works_without_a_clipboard_of_its_own(handheld):
    handheld.context.grant_permissions(["clipboard-read"])
    page = handheld.page
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('refused')); }")
    page.locator("figure.snippet").first.get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    command = next(panel.text for panel in comparison_page().sections[-1].panels if panel.kind == "snippet")
    assert page.evaluate("() => navigator.clipboard.readText()") == command


def test_tabs_show_one_view_at_a_time_by_click_and_by_key(page):
    tabs = page.get_by_role("tab")
    tabs.nth(1).click()
    assert [tab.get_attribute("aria-selected") for tab in tabs.all()] == ["false", "true", "false"]
    assert sum("All curves" in title for title in shown_figures(page)) == 1
    assert any("over FLOPs" in title for title in shown_figures(page))
    tabs.nth(1).press("ArrowRight")
    assert any("over time" in title for title in shown_figures(page))
    tabs.nth(2).press("ArrowRight")
    assert any("over tokens" in title for title in shown_figures(page))


def test_the_theme_turns_charts_and_page_and_is_remembered(page):
    light = page.evaluate(CHART_INK)
    page.get_by_role("button", name="Switch between light and dark").click()
    dark = page.evaluate(CHART_INK)
    assert brightness(dark) > 180 > 80 > brightness(light)
    assert brightness(page.evaluate("() => getComputedStyle(document.body).backgroundColor")) < 60
    page.reload()
    page.wait_for_selector("html[data-charts=drawn]")
    assert page.evaluate(CHART_INK) == dark
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate(CHART_INK) == light


def brightness(color):
    """The mean of red, green and blue of `rgb(...)`."""
    return sum(map(int, re.findall(r"\d+", color)[:3])) / 3


def test_the_points_of_a_chart_are_shown_as_a_table_on_request(page):
    details = page.locator("details.points").last
    details.locator("summary").click()
    rows = details.locator("tbody tr")
    rows.first.wait_for()
    assert rows.count() == 24
    assert rows.nth(5).locator("td").all_inner_texts()[:2] == ["none", "1,024"]


def test_the_data_are_saved_from_the_page(page, path):
    with page.expect_download() as download:
        page.get_by_role("button", name="Save results.json").click()
    assert download.value.suggested_filename == "results.json"
    saved = json.loads(Path(download.value.path()).read_text(encoding="utf-8"))
    assert saved == json.loads((path.parent / "results.json").read_text(encoding="utf-8"))


def test_on_a_phone_only_tables_scroll_sideways(phone):
    assert not is_wider_than_its_window(phone)
    assert phone.evaluate("() => document.querySelector('figure.table .scroll').scrollWidth > innerWidth")
    widths = phone.evaluate("() => [...document.querySelectorAll('.main-svg')].map((svg) => svg.clientWidth)")
    assert 0 < max(widths) <= PHONE["width"]


def test_the_reader_s_own_preference_for_dark_is_followed(phone):
    assert brightness(phone.evaluate(CHART_INK)) > 180


def test_paper_is_white_and_shows_all_views_within_its_width(phone):
    before = len(shown_figures(phone))
    phone.emulate_media(media="print")
    phone.set_viewport_size({"width": 700, "height": 1000})
    phone.wait_for_function("() => 'printing' in document.documentElement.dataset")
    titles = shown_figures(phone)
    assert sum("All curves" in title for title in titles) == 3
    assert len(titles) == before + 2
    assert brightness(phone.evaluate("() => getComputedStyle(document.body).backgroundColor")) == 255
    assert brightness(phone.evaluate(CHART_INK)) < 80
    assert not is_wider_than_its_window(phone)
    assert phone.locator("button:visible").count() == phone.locator("thead button:visible").count()
    phone.emulate_media(media="screen")
    phone.wait_for_function("() => !('printing' in document.documentElement.dataset)")
    assert len(shown_figures(phone)) == before


def test_packed_data_are_unpacked_when_they_are_saved(browser, tmp_path):
    data = {"numbers": [k / 7 for k in range(60_000)]}
    opened = Opened(browser, write_page(Page(title="long", summary="", sections=(), data=data), tmp_path))
    with opened.page.expect_download() as download:
        opened.page.get_by_role("button", name="Save results.json").click()
    saved = json.loads(Path(download.value.path()).read_text(encoding="utf-8"))
    opened.context.close()
    assert saved == data
    assert opened.complaints == []


@pytest.fixture(
    scope="module", params=["text", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("recall", "images"))]
)
def lines(request, tmp_path_factory):
    threads = torch.get_num_threads()
    match request.param:
        case "text":
            lines = lines_of(text_of(tmp_path_factory.mktemp("text")), f"none,{ODD}=g1,bma-query")
            lines = tampered(lines, "bma-query", diverged)
        case "images":
            lines = lines_of(image_task(), "none,g1", batch_size=16)
        case _:
            lines = recall_lines()
    torch.set_num_threads(threads)
    return lines


@pytest.fixture(scope="module")
def opened(browser, lines, tmp_path_factory):
    path = write_page(page_of(lines), tmp_path_factory.mktemp("records"))
    opened = Opened(browser, path, viewport=DESKTOP, color_scheme="light")
    yield opened
    opened.context.close()


def test_a_page_of_records_asks_for_nothing_and_has_every_chart_drawn_once_its_view_is_chosen(opened):
    page = opened.page
    assert opened.complaints == []
    assert opened.foreign_requests() == []
    for tab in page.get_by_role("tab").all():
        tab.click()
        assert all(page.evaluate(SHOWN_CHARTS_ARE_DRAWN))
    drawn = page.evaluate("() => [...document.querySelectorAll('.chart')].map((e) => !!e.querySelector('.main-svg'))")
    assert len(drawn) > 10
    assert all(drawn)
    assert opened.complaints == []
