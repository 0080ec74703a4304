import json
import re
from dataclasses import asdict, replace

import pytest
from lab_lines import diverged, lines_of, page_of, recall_lines, with_seeds
from lab_runs import tampered

from tidegate.lab.compare.observed_verdicts import judge_observed
from tidegate.lab.compare.page import cost_table, main_table
from tidegate.lab.compare.summary import summarise
from tidegate.lab.tasks.image import image_task
from tidegate.lab.training.records import Costs, Record
from tidegate.report import html_page, markdown_page

SECTIONS = [
    "Verdicts",
    "All numbers",
    "Training",
    "Fairness checks",
    "What the gates do",
    "Curvature of the layers",
    "Free directions of the heads",
    "Beyond the training length",
    "Limitations",
    "Reproduce",
]
COSTS = ["speed", "step time", "step time, IQR", "peak memory", "decode", "cache"]


@pytest.fixture(scope="module")
def digits():
    return lines_of(image_task(), "none,g1", batch_size=16)


@pytest.fixture(scope="module")
def recall():
    return recall_lines()


def titles(page):
    return [section.title for section in page.sections]


def section_of(page, title):
    return next(section for section in page.sections if section.title == title)


def cells(summary):
    """Both tables of numbers as a dictionary of dictionaries: variant, then title of the column."""
    found = {variant.name: {} for variant in summary.variants}
    for table in (main_table(summary), cost_table(summary)):
        names = [column.title for column in table.columns]
        for row in table.rows:
            found[row[0]] |= dict(zip(names, row, strict=True))
    return found


class TestPage:
    def test_is_written_in_html_and_markdown_with_its_numbers(self, compared):
        page, summary = page_of(compared), summarise(compared)
        for text in (html_page(page), markdown_page(page)):
            for variant in summary.variants:
                assert f"{variant.result.mean:.4f}" in text
        assert all(f"## {title}" in markdown_page(page) for title in SECTIONS)

    def test_holds_the_results_of_the_summary_and_the_verdicts_on_what_was_observed(self, compared):
        summary = summarise(compared)
        assert page_of(compared).data == summary.to_dict() | {"observed": asdict(judge_observed(summary))}

    def test_gives_one_sentence_and_one_interval_a_variant(self, compared):
        verdicts, *_, intervals = section_of(page_of(compared), "Verdicts").panels
        results = summarise(compared).comparison.variants
        assert [item.sentence for item in verdicts.items] == [result.sentence for result in results]
        assert [item.label for item in intervals.items] == ["g1", "bma-query"]
        assert [(item.value, item.low, item.high) for item in intervals.items] == [
            (result.difference, result.low, result.high) for result in results[1:]
        ]

    def test_says_how_to_get_it_again(self, compared):
        panels = section_of(page_of(compared), "Reproduce").panels
        snippets = {panel.title: panel.text for panel in panels if panel.kind == "snippet"}
        assert snippets["Command"] == "tidegate compare"
        assert json.loads(snippets["Data"]) == compared[0].task.to_dict()

    def test_lists_all_that_differs_and_nothing_else(self, compared):
        panels = section_of(page_of(compared), "Reproduce").panels
        table = next(panel for panel in panels if panel.kind == "table")
        assert {row[:2] for row in table.rows} == {("g1", "model.gate"), ("bma-query", "model.gate")}

    def test_without_observations_and_lengths_leaves_their_sections_out(self, compared):
        bare = [
            replace(line, observations=(), loss_by_position=()) if isinstance(line, Record) else line
            for line in compared
        ]
        left_out = {"What the gates do", "Beyond the training length"}
        assert titles(page_of(bare)) == [title for title in SECTIONS if title not in left_out]


class TestMainTable:
    def test_agrees_with_the_summary(self, compared):
        summary = summarise(compared)
        rows = cells(summary)
        assert list(rows) == ["none", "g1", "bma-query"]
        for variant in summary.variants:
            row, result = rows[variant.name], variant.result
            assert row["verdict"] == result.verdict
            assert row["starts at"] == {"none": 1.0, "g1": 0.5, "bma-query": 0.5}[variant.name]
            assert row["parameters"] == variant.num_parameters
            assert row["over baseline"] == 100 * (variant.num_parameters / summary.control.num_parameters - 1)
            assert row["training FLOPs"] == variant.records[0].flops / 1e12
            assert (row["held-out loss"], row["± sd"]) == (result.mean, result.sd)
            assert (row["bits per byte"], row["± sd, bits"]) == variant.metric("bits_per_byte")
            assert (row["difference"], row["from"], row["to"]) == (result.difference, result.low, result.high)
            assert row["adjusted p"] == result.p_value
            assert row["diverged"] == 0

    def test_shows_costs_in_the_units_of_its_columns(self, compared):
        def dear(line):
            item = replace(
                line.items[0],
                tokens_per_second=1234.6,
                time_ratio=1.25,
                peak_bytes=3 * 2**19,
                decode_milliseconds=0.5,
                cache_bytes_per_token=512,
            )
            return replace(line, items=(item, *line.items[1:]))

        lines = [dear(line) if isinstance(line, Costs) else line for line in compared]
        row = cells(summarise(lines))["none"]
        assert [row[title] for title in COSTS] == [1235, 1.25, "1.000 to 1.000", 1.5, 0.5, 512]

    def test_without_costs_has_empty_cells(self, compared):
        rows = cells(summarise([line for line in compared if not isinstance(line, Costs)]))
        assert {row[title] for row in rows.values() for title in COSTS} == {None}


class TestDivergedVariant:
    @pytest.fixture
    def lines(self, compared):
        return tampered(compared, "g1", diverged)

    def test_is_not_flattered_by_the_mean_of_the_runs_that_are_left(self, lines):
        summary = summarise(lines)
        row = cells(summary)["g1"]
        assert (row["verdict"], row["diverged"]) == ("diverged", 1)
        assert summary.variants[1].result.mean is not None
        empty = ("held-out loss", "± sd", "bits per byte", "difference", "from", "to", "adjusted p")
        assert [row[title] for title in empty] == [None] * len(empty)

    def test_in_every_run_has_no_mean(self, compared):
        lines = compared
        for block in range(3):
            lines = tampered(lines, "g1", diverged, block=block)
        row = cells(summarise(lines))["g1"]
        assert (row["held-out loss"], row["bits per byte"], row["diverged"]) == (None, None, 3)
        assert titles(page_of(lines)) == SECTIONS

    def test_as_the_control_leaves_nothing_to_judge(self, compared):
        lines = tampered(compared, "none", diverged)
        page = page_of(lines)
        verdicts, *others = page.sections[0].panels
        assert "Here there is no verdict" in verdicts.rule
        assert not any(panel.kind == "intervals" for panel in others)
        # The size of the training is that of the finished runs.
        basis = re.search(r"Based on 3 seeds .* tokens, with", page.summary)[0]
        assert basis in page_of(compared).summary


class TestOneSeed:
    def test_has_no_spread_rather_than_none_at_all(self, compared):
        rows = cells(summarise(with_seeds(compared, 1)))
        for row in rows.values():
            assert row["held-out loss"] is not None
            assert row["bits per byte"] is not None
            assert row["± sd"] is None
            assert row["± sd, bits"] is None

    def test_gives_no_verdict_and_a_whole_page(self, compared):
        page = page_of(with_seeds(compared, 1))
        assert titles(page) == SECTIONS
        assert page.summary.startswith("No verdict: a verdict needs at least 3 seeds, got 1. Based on 1 seed of models")
        assert {item.verdict for item in page.sections[0].panels[0].items} == {"control", "undecided"}
        assert "needs at least 3 seeds" in html_page(page)


class TestImages:
    def test_are_judged_by_accuracy_and_have_no_length(self, digits):
        page = page_of(digits)
        assert titles(page) == [title for title in SECTIONS if title != "Beyond the training length"]
        (why,) = section_of(page, "Curvature of the layers").panels
        assert why.paragraphs == ("Not measured for none, g1: curvature is measured on language models alone.",)
        summary = summarise(digits)
        for name, row in cells(summary).items():
            variant = next(variant for variant in summary.variants if variant.name == name)
            assert (row["accuracy"], row["± sd, accuracy"]) == variant.metric("accuracy")
            assert 0 <= row["accuracy"] <= 1


class TestRecall:
    def test_has_every_section_and_speaks_of_pairs_beyond_the_training_length(self, recall):
        page = page_of(recall)
        assert titles(page) == SECTIONS
        section = section_of(page, "Beyond the training length")
        assert "four times as many pairs and queries" in section.lead
        assert "Associative recall" in html_page(page)
        assert {"accuracy", "± sd, accuracy"} <= set(cells(summarise(recall))["none"])
