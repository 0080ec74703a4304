import json
from dataclasses import asdict, replace

import pytest
from lab_lines import diverged, lines_of, page_of, recall_lines, replanned, with_seeds
from lab_runs import tampered, with_run

from tidegate.lab.compare.answer import answer
from tidegate.lab.compare.observed_verdicts import judge_observed, observed_panel
from tidegate.lab.compare.page import cost_table, main_table
from tidegate.lab.compare.summary import summarise
from tidegate.lab.tasks.image import image_task
from tidegate.lab.training.records import Costs, Grid, LayerMeasurements, Record
from tidegate.report import html_page, markdown_page

SECTIONS = [
    "Verdicts",
    "All numbers",
    "Training",
    "Was it fair?",
    "What the gates do",
    "How the layers bend",
    "How free the heads are",
    "Beyond the training length",
    "Caution",
    "How to get this again",
]
VERDICT_COLUMNS = [
    "variant",
    "verdict",
    "its gate",
    "starts at",
    "held-out loss",
    "± sd",
    "difference",
    "from",
    "to",
    "adjusted p",
]
BEFORE_THE_METRIC = ["variant", "parameters", "over control", "training FLOPs"]
AFTER_THE_METRIC = ["diverged", "speed", "step time", "its middle half", "peak memory", "decode", "cache"]


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


def column_titles(lines):
    assert [column.title for column in main_table(summarise(lines)).columns] == VERDICT_COLUMNS
    return [column.title for column in cost_table(summarise(lines)).columns]


class TestPage:
    def test_has_every_section_in_its_order(self, compared):
        assert titles(page_of(compared)) == SECTIONS

    def test_is_written_in_html_and_markdown_with_its_numbers(self, compared):
        page, summary = page_of(compared), summarise(compared)
        for text in (html_page(page), markdown_page(page)):
            for variant in summary.variants:
                assert f"{variant.result.mean:.4f}" in text
        assert all(f"## {title}" in markdown_page(page) for title in SECTIONS)

    def test_holds_the_results_of_the_summary_and_the_verdicts_on_what_was_observed(self, compared):
        summary = summarise(compared)
        assert page_of(compared).data == summary.to_dict() | {"observed": asdict(judge_observed(summary))}

    def test_begins_what_the_gates_do_with_verdicts(self, compared):
        page, summary = page_of(compared), summarise(compared)
        first = section_of(page, "What the gates do").panels[0]
        assert first == observed_panel(judge_observed(summary), "none")
        for text in (html_page(page), markdown_page(page)):
            assert first.title in text

    def test_opens_with_the_answer_and_what_was_done(self, compared):
        summary = summarise(compared)
        words = page_of(compared).summary
        control = summary.control.records[0]
        assert words.startswith(answer(summary))
        done = words.removeprefix(answer(summary)).strip()
        assert done.startswith("3 variants, 3 seeds each, equal in the examples that they see. The control, none, has")
        assert f"{control.num_parameters:,} parameters and saw {control.tokens:,} tokens. " in words
        assert words.endswith(summary.plan.description)

    def test_gives_one_sentence_and_one_interval_a_variant(self, compared):
        verdicts, *_, intervals = section_of(page_of(compared), "Verdicts").panels
        results = summarise(compared).comparison.variants
        assert [item.sentence for item in verdicts.items] == [result.sentence for result in results]
        assert [item.label for item in intervals.items] == ["g1", "bma-query"]
        assert [(item.value, item.low, item.high) for item in intervals.items] == [
            (result.difference, result.low, result.high) for result in results[1:]
        ]

    def test_says_how_to_get_it_again(self, compared):
        panels = section_of(page_of(compared), "How to get this again").panels
        snippets = {panel.title: panel.text for panel in panels if panel.kind == "snippet"}
        assert snippets["Command"] == "tidegate compare"
        assert json.loads(snippets["Data"]) == compared[0].task.to_dict()
        hashes = json.loads(snippets["Runs, by the hash of their content"])
        assert set(hashes.values()) == {line.id for line in compared if isinstance(line, Record)}

    def test_lists_all_that_differs_and_nothing_else(self, compared):
        panels = section_of(page_of(compared), "How to get this again").panels
        table = next(panel for panel in panels if panel.kind == "table")
        assert {row[:2] for row in table.rows} == {("g1", "model.gate"), ("bma-query", "model.gate")}

    def test_of_records_that_are_not_all_is_refused(self, compared):
        last = [line for line in compared if isinstance(line, Record)][-1]
        with pytest.raises(ValueError, match="not complete"):
            page_of([line for line in compared if line is not last])

    def test_shows_of_each_variant_how_its_first_model_bends_and_how_free_its_heads_are(self, compared):
        page = page_of(compared)
        bent = section_of(page, "How the layers bend").panels[-1]
        free = section_of(page, "How free the heads are").panels[0]
        layers = [(name, layer) for name in ("none", "g1", "bma-query") for layer in (0, 1)]
        assert [row[:2] for row in bent.rows] == [row[:2] for row in free.rows] == layers
        assert [row[3:6] for row in free.rows] == [(64, 64, 64)] * 2 + [(8, 8, 8)] * 4

    def test_says_why_layers_were_not_measured(self, compared):
        gone = {"curvature": None, "curvature_reason": "a plane is degenerate"}
        first = next(line for line in compared if isinstance(line, LayerMeasurements))
        page = page_of([replace(line, **gone) if line is first else line for line in compared])
        *_, bent, why = section_of(page, "How the layers bend").panels
        assert {row[0] for row in bent.rows} == {"g1", "bma-query"}
        assert why.paragraphs == ("Not measured for none: a plane is degenerate.",)

    def test_says_that_no_measurement_is_on_record_and_that_a_run_diverged(self, compared):
        lines = tampered([line for line in compared if not isinstance(line, LayerMeasurements)], "g1", diverged)
        page = page_of(lines)
        for title in ("How the layers bend", "How free the heads are"):
            (why,) = section_of(page, title).panels
            assert why.paragraphs == (
                "Not measured for none, bma-query: no measurement is on record.",
                "Not measured for g1: its first run diverged.",
            )

    def test_without_observations_and_lengths_leaves_their_sections_out(self, compared):
        bare = [
            replace(line, observations=(), loss_by_position=()) if isinstance(line, Record) else line
            for line in compared
        ]
        left_out = {"What the gates do", "Beyond the training length"}
        assert titles(page_of(bare)) == [title for title in SECTIONS if title not in left_out]


class TestMainTable:
    def test_has_the_columns_of_text(self, compared):
        metric = ["bits per byte", "± sd, bits"]
        assert column_titles(compared) == [*BEFORE_THE_METRIC, *metric, *AFTER_THE_METRIC]

    def test_agrees_with_the_summary(self, compared):
        summary = summarise(compared)
        rows = cells(summary)
        assert list(rows) == ["none", "g1", "bma-query"]
        for variant in summary.variants:
            row, result = rows[variant.name], variant.result
            assert row["verdict"] == result.verdict
            assert row["starts at"] == {"none": 1.0, "g1": 0.5, "bma-query": 0.5}[variant.name]
            assert row["parameters"] == variant.num_parameters
            assert row["over control"] == 100 * (variant.num_parameters / summary.control.num_parameters - 1)
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
        assert [row[title] for title in AFTER_THE_METRIC[1:]] == [1235, 1.25, "1.000 to 1.000", 1.5, 0.5, 512]
        units = {column.title: column.unit for column in cost_table(summarise(lines)).columns}
        assert [units[title] for title in AFTER_THE_METRIC[1:]] == [
            "tokens/s",
            "× control",
            "",
            "MiB",
            "ms/token",
            "bytes/token",
        ]

    def test_without_costs_has_empty_cells(self, compared):
        rows = cells(summarise([line for line in compared if not isinstance(line, Costs)]))
        assert {row[title] for row in rows.values() for title in AFTER_THE_METRIC[1:]} == {None}


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

    def test_is_charged_with_a_whole_training(self, lines, compared):
        assert cells(summarise(lines))["g1"]["training FLOPs"] == cells(summarise(compared))["g1"]["training FLOPs"]

    def test_leaves_the_page_whole(self, lines):
        page = page_of(lines)
        assert titles(page) == SECTIONS
        verdicts = page.sections[0].panels[0]
        assert "g1: diverged in 1 of 3 seeds, and not judged" in [item.sentence for item in verdicts.items]
        assert "diverged in 1 of 3 seeds" in html_page(page)

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
        assert "Here no verdict is given" in verdicts.rule
        assert not any(panel.kind == "intervals" for panel in others)
        # What it saw is told of the runs that ended, not of the one that stopped halfway.
        done = "3 variants, 3 seeds each,"
        assert page.summary.partition(done)[1:] == page_of(compared).summary.partition(done)[1:]


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
        assert page.summary.startswith("No verdict: a verdict needs at least 3 seeds, and there are 1. 3 variants, one")
        assert {item.verdict for item in page.sections[0].panels[0].items} == {"control", "undecided"}
        assert "needs at least 3 seeds" in html_page(page)


class TestImages:
    def test_are_judged_by_accuracy_and_have_no_length(self, digits):
        page = page_of(digits)
        assert titles(page) == [title for title in SECTIONS if title != "Beyond the training length"]
        (why,) = section_of(page, "How the layers bend").panels
        assert why.paragraphs == ("Not measured for none, g1: curvature is measured on language models alone.",)
        metric = ["accuracy", "± sd, accuracy"]
        assert column_titles(digits) == [*BEFORE_THE_METRIC, *metric, *AFTER_THE_METRIC]
        summary = summarise(digits)
        for name, row in cells(summary).items():
            variant = next(variant for variant in summary.variants if variant.name == name)
            assert (row["accuracy"], row["± sd, accuracy"]) == variant.metric("accuracy")
            assert 0 <= row["accuracy"] <= 1

    def test_are_counted_as_images(self, digits):
        page, table = page_of(digits), cost_table(summarise(digits))
        assert "saw 128 images." in page.summary
        assert next(column.unit for column in table.columns if column.title == "speed") == "images/s"
        assert next(row for row in table.rows)[-6] == 1000
        assert section_of(page, "Training").panels[0].views[0].panel.x_label == "images seen (millions)"
        assert "128 images." in section_of(page, "Caution").panels[0].paragraphs[0]

    def test_reach_html_and_markdown(self, digits):
        page = page_of(digits)
        accuracy = f"{cells(summarise(digits))['g1']['accuracy']:.4f}"
        assert accuracy in html_page(page)
        assert accuracy in markdown_page(page)


class TestRecall:
    def test_has_every_section_and_accuracy(self, recall):
        assert titles(page_of(recall)) == SECTIONS
        assert column_titles(recall) == [*BEFORE_THE_METRIC, "accuracy", "± sd, accuracy", *AFTER_THE_METRIC]

    def test_speaks_of_pairs_beyond_the_training_length_and_not_of_text(self, recall):
        section = section_of(page_of(recall), "Beyond the training length")
        assert "four times as many pairs and queries" in section.lead
        assert "text" not in section.lead
        assert section.panels[0].title.startswith(
            "Beyond the training length of 6 tokens the loss is on average (nats)"
        )

    def test_reaches_html_and_markdown(self, recall):
        page = page_of(recall)
        assert "Associative recall" in html_page(page)
        assert "four times as many pairs" in markdown_page(page)


class TestTuning:
    @pytest.fixture
    def lines(self, compared):
        """Two rates for every variant on two seeds; g1 diverged once at the larger, and bma-query tried one alone."""
        trials = [
            replace(
                with_run(record, role="tuning", training={"lr": rate}),
                id=f"{record.id}-{rate}",
                loss=record.run.block + rate,
            )
            for record in compared
            if isinstance(record, Record) and record.run.block < 2
            for rate in (0.25, 0.5)
            if (record.run.variant, rate) != ("bma-query", 0.5)
        ]
        last = max(place for place, trial in enumerate(trials) if trial.run.variant == "g1")
        trials[last] = replace(trials[last], status="diverged", loss=None)
        return [*replanned(compared, grid=Grid(rates=(1.0, 2.0), starts=(0.02,))), *trials]

    def test_is_drawn_as_mean_loss_against_rate_for_each_start(self, lines):
        _, views = section_of(page_of(lines), "Was it fair?").panels
        (view,) = views.views
        assert view.label == "init 0.02"
        drawn = {series.label: (series.x, series.y) for series in view.panel.series}
        assert drawn == {
            "none": ((0.25, 0.5), (0.75, 1.0)),
            "g1": ((0.25, 0.5), (0.75, None)),
            "bma-query": ((0.25,), (0.75,)),
        }
        assert (
            view.panel.title
            == "Starting from 0.02, lowest loss: none 0.7500 at 0.25, g1 0.7500 at 0.25, bma-query "
            + ("0.7500 at 0.25")
        )

    def test_is_not_drawn_where_nothing_was_tried(self, compared):
        assert len(section_of(page_of(compared), "Was it fair?").panels) == 1


class TestCaution:
    def test_of_one_size_asks_for_another(self, compared):
        size, scope = section_of(page_of(compared), "Caution").panels[0].paragraphs
        record = summarise(compared).control.records[0]
        assert size.startswith(f"One size was run: {record.num_parameters:,} parameters, {record.tokens:,} tokens.")
        assert "this size" in scope

    @pytest.mark.parametrize(("field", "value"), [("d_model", 32), ("num_layers", 3)])
    def test_of_several_sizes_says_which(self, compared, field, value):
        def grown(record):
            return with_run(record, model={field: value})

        lines = compared
        for block in range(3):
            lines = tampered(lines, "g1", grown, block=block)
        size, scope = section_of(page_of(lines), "Caution").panels[0].paragraphs
        other = {"d_model": "2 layers of width 32", "num_layers": "3 layers of width 16"}[field]
        assert size.startswith(f"2 sizes were run: 2 layers of width 16; {other}.")
        assert "these sizes" in scope

    def test_does_not_take_matched_parameters_for_another_size(self, compared):
        def narrowed(record):
            return replace(with_run(record, model={"d_ff": 1}), num_parameters=record.num_parameters - 1)

        lines = tampered(compared, "g1", narrowed)
        assert section_of(page_of(lines), "Caution").panels[0].paragraphs[0].startswith("One size was run")
