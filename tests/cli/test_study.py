import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pages import require_policy
from typer.testing import CliRunner

from tidegate.cli.app import app
from tidegate.lab.studies import depth

FEW = ["--set", "gates=none,g1", "--set", "depths=1,2", "--set", "num_seeds=2", "--set", "num_planes=2"]


def invoke(*arguments):
    return CliRunner().invoke(app, ["study", *map(str, arguments)])


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """The result of the command of a small study, and its folder."""
    folder = tmp_path_factory.mktemp("study") / "out"
    return invoke("depth", *FEW, "--out", folder), folder


def test_a_study_tells_how_far_it_is_and_leaves_record_and_page(answered):
    done, folder = answered
    assert done.exit_code == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line] == ["depth: 4 of 4 parts"]
    written = {file.name for file in folder.iterdir()}
    assert written == {"depth.json", "report.html", "report.md", "results.json"}
    require_policy((folder / "report.html").read_text())
    record = json.loads((folder / "depth.json").read_text())
    assert record["finding"] in " ".join(done.stdout.split("\n"))
    assert record["result"]["options"]["depths"] == [1, 2]
    assert f"tidegate study depth {' '.join(FEW)}" in (folder / "report.md").read_text()


def test_from_a_record_the_work_is_not_done_again_and_quiet_tells_nothing_of_it(answered, tmp_path, monkeypatch):
    _, first = answered

    def work(*_, **__):
        raise AssertionError("the work was done")

    monkeypatch.setattr(depth, "STUDY", replace(depth.STUDY, run=work))
    done = invoke("depth", "--quiet", "--from", first / "depth.json", "--out", tmp_path / "second")
    assert done.exit_code == 0, done.stderr
    assert done.stderr == ""
    records = [json.loads((folder / "depth.json").read_text())["result"] for folder in (first, tmp_path / "second")]
    assert records[0] == records[1]


def test_the_study_rates_prints_its_slopes_below_the_finding(tmp_path):
    record = Path(__file__).parents[2] / "docs" / "records" / "experts" / "rates.json"
    done = invoke("rates", "--from", record, "--out", tmp_path)
    assert done.exit_code == 0, done.stderr
    slope = json.loads(record.read_text())["result"]["rates"][0]["slopes"]["expert"]
    (row,) = [line for line in done.stdout.splitlines() if line.split()[:1] == ["none"]]
    assert f"{slope['slope']:+.3f} ({slope['low']:+.3f} … {slope['high']:+.3f})" in row


def test_ctrl_c_ends_cleanly(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(depth, "STUDY", replace(depth.STUDY, run=interrupted))
    done = invoke("depth", "--out", tmp_path / "out")
    assert done.exit_code == 130
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_options_are_shown_as_they_would_be():
    done = invoke("rates", "--quick", "--set", "seed=3", "--options")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert "seed=3" in lines
    assert "replicates=32" in lines
    assert "layouts=plain" in lines


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["weather"], "flat-or-curved, depth, boundary, trained-layers, sinks, gate-tuning, rates"),
        (["depth", "--set", "weather=3"], "Known: gates, depths,"),
        (["depth", "--set", "num_seeds=1"], "--set: num_seeds must be at least 2"),
        (["depth", "--quick"], "depth has no quick version"),
        (["rates", "--quick", "--from", "somewhere.json"], "without --quick and --set"),
        (["depth", "--from", "nowhere.json"], "nowhere.json"),
        (["depth", "--from", "{file}"], "--from must be an intact record of the study depth"),
        (["depth", "--out", "{file}"], "is a file"),
        (["depth", "--out", "{comparison}"], "without a comparison"),
    ],
)
def test_bad_input_is_one_line_and_the_exit_code_2(arguments, words, tmp_path, monkeypatch):
    places = {"file": tmp_path / "file", "comparison": tmp_path / "comparison"}
    places["file"].write_text("x")
    places["comparison"].mkdir()
    (places["comparison"] / "records.jsonl").write_text("")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = sorted(tmp_path.rglob("*"))
    done = invoke(*(argument.format(**places) for argument in arguments))
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_studies_are_listed_with_their_questions_without_loading_them():
    code = (
        "import sys; from tidegate.cli import app; from typer.testing import CliRunner;"
        "print(CliRunner().invoke(app, ['study', 'list']).stdout);"
        "assert not {'torch', 'jax', 'scipy', 'numpy', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = [line.split(":")[0] for line in done.stdout.splitlines() if line]
    assert names == ["flat-or-curved", "depth", "boundary", "trained-layers", "sinks", "gate-tuning", "rates"]
