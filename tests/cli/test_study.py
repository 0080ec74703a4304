import json
from dataclasses import replace
from functools import partial

from typer.testing import CliRunner

from tidegate.cli.app import app
from tidegate.lab.studies.catalogue import STUDIES
from tidegate.lab.studies.depth import run as depth

FEW = depth.Options(gates=("none", "g1"), depths=(1, 2), num_seeds=2, num_planes=2)


def test_a_study_tells_how_far_it_is_and_leaves_record_page_and_figures(tmp_path, monkeypatch):
    small = replace(STUDIES["depth"], run=partial(depth.depth_study, FEW))
    monkeypatch.setitem(STUDIES, "depth", small)
    done = CliRunner().invoke(app, ["study", "depth", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line] == ["depth: 4 of 4 parts"]
    written = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"depth.json", "report.html", "report.md", "results.json"} <= written
    finding = json.loads((tmp_path / "out" / "depth.json").read_text())["finding"]
    assert finding in " ".join(done.stdout.split("\n"))


def test_from_a_record_the_work_is_not_done_again(tmp_path, monkeypatch):
    monkeypatch.setitem(STUDIES, "depth", replace(STUDIES["depth"], run=partial(depth.depth_study, FEW)))
    first, second = tmp_path / "first", tmp_path / "second"
    CliRunner().invoke(app, ["study", "depth", "--out", str(first)])

    def work(**_):
        raise AssertionError("the work was done")

    monkeypatch.setitem(STUDIES, "depth", replace(STUDIES["depth"], run=work))
    done = CliRunner().invoke(app, ["study", "depth", "--from", str(first / "depth.json"), "--out", str(second)])
    assert done.exit_code == 0, done.stderr
    records = [json.loads((folder / "depth.json").read_text())["result"] for folder in (first, second)]
    assert records[0] == records[1]


def test_an_unknown_study_is_one_line_that_names_the_known_ones():
    done = CliRunner().invoke(app, ["study", "weather"])
    assert done.exit_code == 2
    assert "Known: flat-or-curved, depth, boundary, trained-layers, gate-tuning." in done.stderr
    assert done.stderr.count("\n") == 1


def test_studies_are_listed_with_their_questions():
    done = CliRunner().invoke(app, ["study", "list"])
    assert done.exit_code == 0
    names = [line.split(":")[0] for line in done.stdout.splitlines()]
    assert names == ["flat-or-curved", "depth", "boundary", "trained-layers", "gate-tuning"]
