import json
import re
from dataclasses import replace

import pytest
from pages import require_policy
from typer.testing import CliRunner

from tidegate.cli import app
from tidegate.lab.studies import rates as study

runner = CliRunner()


def invoke(*arguments):
    return runner.invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def miniature(monkeypatch):
    """`--quick` in a second or two."""
    small = replace(
        study.QUICK, ns=(1_000, 10_000, 100_000), replicates=8, starts=2, layouts=(), gate_distances=(), num_truths=0
    )
    monkeypatch.setattr(study, "STUDY", replace(study.STUDY, quick=small))


def test_the_terminal_the_page_and_the_json_agree(miniature, tmp_path):
    done = invoke("rates", "--quick", "--placements", "none, g1", "--seed", 3, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    results = json.loads((tmp_path / "out" / "results.json").read_text())["result"]
    table = (tmp_path / "out" / "report.md").read_text()
    assert results["options"]["placements"] == ["none", "g1"]
    assert results["options"]["seed"] == 3
    for found in results["rates"]:
        for metric in ("expert", "regression"):
            assert f"{found['slopes'][metric]['slope']:+.3f}" in done.output
        assert f"{found['slopes']['expert']['slope']:+.3f}" in table
        assert found["slopes"]["expert"]["verdict"] in done.output
    assert "rates: 6 of 6 parts" in done.stderr
    require_policy((tmp_path / "out" / "report.html").read_text())
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"rates.json", "report.html", "report.md", "results.json"}


def test_quiet_shows_the_result_alone(miniature, tmp_path):
    done = invoke("rates", "--quick", "--quiet", "--placements", "g1", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    assert "The page:" in done.output


BAD = {
    "unknown placement": (["--placements", "none,sideways"], "--placements must be among"),
    "a placement twice": (["--placements", "g1,g1"], "--placements must have at least one value and no duplicates"),
    "no placement": (["--placements", ","], "at least one"),
    "a negative seed": (["--seed", "-1"], "--seed must be at least 0"),
    "a folder that is a file": (["--out", "{file}"], "is a file"),
    "a folder with a comparison": (["--out", "{comparison}"], "holds a comparison"),
}


@pytest.mark.parametrize(("arguments", "words"), BAD.values(), ids=BAD)
def test_bad_input_gives_one_line_exit_code_2_and_leaves_nothing_behind(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = {"file": tmp_path / "file", "comparison": tmp_path / "comparison"}
    places["file"].write_text("x")
    places["comparison"].mkdir()
    (places["comparison"] / "records.jsonl").write_text("")
    before = sorted(tmp_path.rglob("*"))
    done = invoke("rates", *(argument.format(**places) for argument in arguments))
    assert done.exit_code == 2
    assert re.fullmatch(r"error: [^\n]+\n", done.stderr), done.stderr
    assert words in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_ctrl_c_ends_cleanly(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "STUDY", replace(study.STUDY, run=interrupted))
    done = invoke("rates", "--quick", "--out", tmp_path / "out")
    assert done.exit_code == 130
    assert done.stderr == "stopped: before its end. Run the command again.\n"
    assert not (tmp_path / "out").exists()


def test_help_teaches_every_option():
    text = invoke("rates", "--help").output
    for option in ("placements", "quick", "seed", "out", "quiet"):
        assert f"--{option}" in text
