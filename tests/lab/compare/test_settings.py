"""Settings that an earlier comparison selected: which are taken, for whom, and for what they are rejected."""

from dataclasses import replace
from pathlib import Path

import pytest
from errors import rejects
from lab_lines import replanned, with_trials
from lab_runs import request_of, text_of

from tidegate.cli.compare import DEFAULT_VARIANTS
from tidegate.lab.compare import tuning
from tidegate.lab.compare.design import base_runs
from tidegate.lab.compare.fairness import fairness_checks
from tidegate.lab.compare.presets import PRESETS
from tidegate.lab.compare.summary import summarise
from tidegate.lab.compare.tuning import (
    Setting,
    decisive_facts,
    find_settings,
    settings_of_records,
    standard_settings,
)
from tidegate.lab.compare.variants import parse_variants
from tidegate.lab.tasks.catalogue import make_task
from tidegate.lab.training.records import Grid, RecordFile, Variant, records_path

GRID = Grid(rates=(0.5, 1.0, 2.0), starts=(0.02, "torch"))
BEST = {"none": (1.0, 0.02), "g1": (2.0, "torch")}


def loss(variant, block, rate, start):
    """The lowest where BEST says, in all blocks but the last, which has one of its own."""
    best = (0.5, "torch") if block == 2 else BEST.get(variant, (1.0, 0.02))
    return 2.0 + (rate != best[0]) + (start != best[1])


@pytest.fixture(scope="module")
def lines(compared):
    return replanned(with_trials(compared, GRID, loss), grid=GRID)


@pytest.fixture(scope="module")
def settings(lines):
    return settings_of_records(lines, source="there")


def test_each_variant_gets_what_most_of_its_blocks_chose(settings):
    assert [(own.gate, own.setting) for own in settings.variants] == [
        ("none", Setting(lr=1e-2, init=0.02)),
        ("g1", Setting(lr=2e-2, init="torch")),
        ("bma-query", Setting(lr=1e-2, init=0.02)),
    ]


def test_of_equally_many_blocks_those_with_the_lower_loss_decide(compared):
    def torn(variant, block, rate, start):
        return {0: 5.0, 1: 4.0, 2: 3.0}[block] + (rate != GRID.rates[block]) + (start != "torch")

    found = settings_of_records(replanned(with_trials(compared, GRID, torn), grid=GRID), source="")
    assert {own.setting.lr for own in found.variants} == {2e-2}


def test_a_variant_that_was_not_tuned_gets_the_controls(settings):
    assert settings.setting_of(Variant(name="x", gate="vga")) == Setting(lr=1e-2, init=0.02)
    wide = Variant(name="x", gate="g1", overrides={"d_ff": 7})
    assert settings.setting_of(wide) == Setting(lr=1e-2, init=0.02), "options of its own make it another variant"


class TestTheStandardSettings:
    def test_are_those_of_the_records(self):
        # If they change, write `json.dumps(add_checksum(asdict(expected)), indent=2)` to STANDARD_SETTINGS.
        records = Path(__file__).parents[3] / "docs" / "records" / "compare" / "first-arm"
        expected = settings_of_records(
            RecordFile(records_path(records)).read(), source="the settings that come with Tidegate"
        )
        assert standard_settings() == expected

    def test_fit_the_default_comparison_and_no_other(self, monkeypatch, tmp_path):
        task = make_task("lm", None, length=PRESETS["lm"]["tiny"].length)
        standard = replace(standard_settings(), task=decisive_facts(task.to_dict()))  # whatever Python's sources are
        monkeypatch.setattr(tuning, "standard_settings", lambda: standard)
        asked = parse_variants(DEFAULT_VARIANTS)
        assert find_settings(None, asked, task, "tiny", None) == standard
        assert find_settings("none", asked, task, "tiny", None) is None
        assert find_settings(None, asked, task, "tiny", GRID) is None, "a grid has its own"
        assert find_settings(None, asked, task, "small", None) is None
        assert find_settings(None, asked, text_of(tmp_path), "tiny", None) is None
        assert find_settings(None, [*asked, Variant(name="x", gate="vga")], task, "tiny", None) is None

    def test_leave_the_default_variants_what_the_preset_has(self):
        """So that it makes no difference to them whether the settings fit."""
        preset = PRESETS["lm"]["tiny"]
        asked = parse_variants(DEFAULT_VARIANTS)
        assert {standard_settings().setting_of(plan) for plan in asked} == {Setting(lr=preset.lr, init=0.02)}


@pytest.fixture
def request_for(lines, settings, tmp_path, miniatures):
    """Makes requests on the text that the settings were tuned on."""

    def make(variants="none,g1", **options):
        return request_of(text_of(tmp_path), variants, settings=settings, **options)

    return make


def test_runs_have_them_and_options_of_a_variants_own_win(request_for):
    base = base_runs(request_for("none,g1,slow=g1@lr=1e-3,cold=g1@init=0.01"))
    found = {name: (run.training.lr, run.model.init) for name, run in base.items()}
    assert (found["none"], found["g1"]) == ((1e-2, 0.02), (2e-2, "torch"))
    assert (found["slow"][0], found["cold"][1]) == (1e-3, 0.01)


def test_they_fit_no_other_size_or_data_and_no_grid(request_for, settings, tmp_path, miniatures):
    with rejects("settings", hint="leave settings out"):
        request_for(preset="small")
    with rejects("settings", hint="Leave settings or the grid out"):
        request_for(grid=GRID)
    with rejects("settings", hint="leave settings out"):
        request_of(replace(text_of(tmp_path), fingerprint="other"), settings=settings)


def test_the_page_says_where_they_come_from(compared):
    checks = {check.name: check.detail for check in fairness_checks(summarise(replanned(compared, settings="there")))}
    assert checks["Tuned earlier"] == "there. none, g1, bma-query: lr 0.01, init 0.02"


def test_they_are_read_from_the_folder_of_a_comparison(lines, settings, tmp_path):
    write(lines, tmp_path)
    found = find_settings(str(tmp_path), (), text_of(tmp_path), "tiny", None)
    assert found == replace(settings, source=str(tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [],
        lambda lines: replanned(lines, grid=None),
        lambda lines: [line for line in lines if line.kind != "run" or line.run.block < 2],
    ],
    ids=["nothing", "untuned", "incomplete"],
)
def test_a_folder_without_them_is_an_error(change, lines, tmp_path):
    write(change(lines), tmp_path)
    with rejects("settings"):
        find_settings(str(tmp_path), (), text_of(tmp_path), "tiny", None)


def write(lines, folder):
    file = RecordFile(records_path(folder))
    for line in lines:
        file.append(line)
