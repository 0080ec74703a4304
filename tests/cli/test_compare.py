import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pages import require_policy
from typer.testing import CliRunner

from tidegate._json import add_checksum, parse_json, verify_checksum
from tidegate.cli import app

runner = CliRunner()
RECORDS = Path(__file__).parents[2] / "docs" / "records" / "compare" / "records.jsonl"

QUICK = ["--seeds", "3", "--tokens", "4096", "--length", "32", "--executor", "serial"]


def invoke(*arguments):
    return runner.invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(8):
        (folder / f"{number}.txt").write_text(f"the sea rises and the gate of number {number} falls. " * 60)
    return folder


@pytest.fixture(scope="module")
def compared(corpus, tmp_path_factory):
    """The terminal output and the folder of one small comparison."""
    folder = tmp_path_factory.mktemp("out") / "comparison"
    variants = "none,bma,again=none,slow=none@lr=1e-6"
    done = invoke("compare", "--data", corpus, "--variants", variants, "--out", folder, *QUICK)
    assert done.exit_code == 0, done.output
    return done.output, folder


def test_terminal_table_and_json_agree(compared):
    output, folder = compared
    results = json.loads((folder / "results.json").read_text())
    table = (folder / "report.md").read_text()
    for variant in results["comparison"]["variants"]:
        mean = f"{variant['mean']:.4f}"
        assert mean in output
        assert mean in table
        assert variant["sentence"] in output
        if variant["low"] is not None:
            assert f"{variant['low']:+.4f}" in output
            assert f"{variant['low']:+.4f}" in table


def test_the_page_can_be_made_again_from_records_alone(compared, tmp_path):
    _, folder = compared
    require_policy((folder / "report.html").read_text())
    records = (folder / "records.jsonl").read_bytes()
    (tmp_path / "records.jsonl").write_bytes(records)
    done = invoke("report", tmp_path)
    assert done.exit_code == 0
    for name in ("report.html", "report.md", "results.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_the_same_command_again_changes_no_record_and_quiet_shows_no_progress(compared, corpus):
    _, folder = compared
    before = (folder / "records.jsonl").read_bytes()
    variants = "none,bma,again=none,slow=none@lr=1e-6"
    command = ["compare", "--data", corpus, "--variants", variants, "--out", folder, *QUICK]
    shown, quiet = invoke(*command), invoke(*command, "--quiet")
    assert (shown.exit_code, quiet.exit_code) == (0, 0)
    assert ("already done" in shown.output, "already done" in quiet.output) == (True, False)
    assert "Page:" in quiet.output
    assert (folder / "records.jsonl").read_bytes() == before


def test_another_comparison_in_the_same_folder_is_refused(compared, corpus):
    _, folder = compared
    done = invoke("compare", "--data", corpus, "--variants", "none,g1", "--out", folder, *QUICK)
    assert done.exit_code == 2
    assert "--out must be a folder without another comparison" in done.stderr


@pytest.mark.parametrize(
    ("moment", "words", "begun"),
    [
        (
            "tidegate.lab.training.executors.executor.SerialExecutor.require",
            "Nothing was saved yet; start again",
            False,
        ),
        ("tidegate.lab.training.executors.executor.SerialExecutor.execute", "All progress is saved; resume with", True),
    ],
)
def test_an_interrupt_says_whether_there_is_anything_to_go_on_from(corpus, tmp_path, monkeypatch, moment, words, begun):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(moment, interrupt)
    done = invoke("compare", "--data", corpus, "--variants", "none,bma", "--out", tmp_path / "out", *QUICK)
    assert (done.exit_code, words in done.stderr) == (130, True), done.output
    assert (tmp_path / "out").exists() == begun


BAD = {
    "missing file": (["--data", "nowhere.txt"], "nowhere.txt"),
    "empty corpus": (["--data", "{empty}"], "empty"),
    "corpus shorter than a window": (["--data", "{short}"], "--data must be at least 129 training tokens"),
    "unknown gate": (["--variants", "none,gibberish"], "gibberish"),
    "one variant": (["--variants", "none"], "at least two"),
    "seeds 0": (["--seeds", "0"], "--seeds must be between 1 and"),
    "fewer than no retries": (["--retries", "-1"], "--retries must be an integer of at least 0, got -1"),
    "a folder that is a file": (["--out", "{file}"], "is a file"),
    "a folder below a file": (["--out", "{file}/below"], "is a file"),
    "a folder among the data": (["--data", "{texts}", "--out", "{texts}/out"], "--out must be outside the data folder"),
    "a length of one": (["--length", "1"], "for '--length'"),
    "a device that is not here": (["--device", "cuda:7"], "--device must be one that can be used here, got 'cuda:7'"),
    "a field of the embedded text": (["--field", "body"], "--field must be left out"),
    "token numbers beyond every vocabulary": (["--data", "{numbers}"], "It has 1,099,511,627,776"),
    "rates that nothing tries": (["--rates", "1,2"], "--rates must be left out without --tune"),
    "starts that are none": (["--map", "--starts", "0.02,warm"], "--starts must be different ones"),
    "a search for nothing": (["--search", "stepwise"], "--search must be left out without --tune"),
    "a start of its own on a map": (["--map", "--variants", "none,g1@init=torch"], "Leave lr and init out there"),
    "parameters matched twice": (
        ["--match", "params", "--variants", "none,none@params=g1,g1"],
        "without params if match is",
    ),
    "parameters of a widened one": (
        ["--variants", "none,wide=none@params=mid,mid=g1@params=none"],
        "a variant without params as params of wide",
    ),
    "one sequence to shuffle": (["--data", "{one-sequence}"], "Use more data"),
    "a map of some points": (["--map", "--search", "stepwise"], "--search must be grid with --map"),
    "settings of no folder": (["--settings", "nowhere"], "--settings must be a folder with the records"),
    "no final tokens": (["--final-tokens", "0"], "--final-tokens must be"),
    "no cores": (["--executor", "ray", "--cpus-per-run", "0"], "--cpus-per-run must be a positive integer"),
    "rows that processes cannot share": (
        ["--executor", "ray", "--procs-per-run", "3"],
        "--procs-per-run must be a divisor of the rows",
    ),
    "a GPU for runs without": (
        ["--executor", "ray", "--gpus-per-run", "1", "--device", "cpu"],
        "--gpus-per-run must be 0 for runs on cpu, got 1",
    ),
}


@pytest.mark.parametrize(("arguments", "words"), BAD.values(), ids=BAD)
def test_bad_input_gives_one_line_exit_code_2_and_leaves_nothing_behind(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = {name: tmp_path / name for name in ("empty", "short", "one-sequence", "file", "texts")}
    places["empty"].write_text("")
    places["short"].write_text("brief")
    places["one-sequence"].write_text("a text " * 515)
    places["file"].write_text("x")
    places["numbers"] = tmp_path / "numbers.npy"
    np.save(places["numbers"], np.arange(4000) % 7 << 40 >> (np.arange(4000) > 1) * 40)
    places["texts"].mkdir()
    (places["texts"] / "long.txt").write_text("all work and no play " * 1000)
    before = sorted(tmp_path.rglob("*"))
    done = invoke("compare", *(argument.format(**places) for argument in arguments))
    assert done.exit_code == 2
    assert re.fullmatch(r"error: [^\n]+\n", done.stderr), done.stderr
    assert words in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_report_of_a_line_without_a_field_names_the_line_and_the_field(tmp_path):
    lines = [verify_checksum(parse_json(line)) for line in RECORDS.read_bytes().splitlines()]
    next(line for line in lines if line["kind"] == "plan").update(task={})
    (tmp_path / "records.jsonl").write_text("".join(f"{json.dumps(add_checksum(line))}\n" for line in lines))
    done = invoke("report", tmp_path)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {tmp_path / 'records.jsonl'}, line 1: task.kind must be given.")
    assert not (tmp_path / "report.html").exists()


def test_a_report_of_a_folder_without_records_says_so(tmp_path):
    done = invoke("report", tmp_path)
    assert done.exit_code == 2
    assert "FOLDER must be" in done.stderr


def test_help_needs_neither_torch_nor_plotly():
    code = (
        "import sys; from tidegate.cli import app; from typer.testing import CliRunner;"
        "assert CliRunner().invoke(app, ['compare', '--help']).exit_code == 0;"
        "print(sorted({'torch', 'jax', 'plotly', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


RUNS = '''
from dataclasses import replace
from tidegate.config import TransformerConfig
from tidegate.lab.training.run import Run, Training
from tidegate.lab.tasks.catalogue import make_task

def gates():
    """Is a gate better than none?"""
    base = Run(
        variant="none", block=0, seed=0, task=make_task("lm", "corpus.txt", length=16),
        model=TransformerConfig(gate="none", d_model=16, num_layers=1, num_heads=2, max_length=16),
        training=Training(steps=4, batch_size=2, num_evaluations=2, num_observations=1),
    )
    return [
        replace(base, variant=gate, block=seed, seed=seed, model=replace(base.model, gate=gate))
        for seed in range(3) for gate in ("none", "bma")
    ]
'''


def test_given_runs_are_compared_like_any_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("water goes where it may. " * 100)
    (tmp_path / "my_runs.py").write_text(RUNS)
    done = invoke("compare", "--runs", "my_runs:gates", "--out", "out", "--executor", "serial")
    assert done.exit_code == 0, done.output
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [variant["name"] for variant in results["variants"]] == ["none", "bma"]
    assert len(results["records"]) == 6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("block=seed", "--runs must be one of each variant in each block"),
        ("seed=seed", "--seeds must be left out with --runs"),
    ],
)
def test_given_runs_that_are_no_design_or_options_that_are_not_read_are_refused(change, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("water goes where it may. " * 100)
    name = f"runs_{change.split('=')[0]}"
    (tmp_path / f"{name}.py").write_text(RUNS.replace("block=seed", "block=0") if change == "block=seed" else RUNS)
    options = ["--seeds", "3"] if change == "seed=seed" else []
    done = invoke("compare", "--runs", f"{name}:gates", "--out", "out", "--executor", "serial", *options)
    assert done.exit_code == 2
    assert words in done.stderr
    assert not (tmp_path / "out").exists()
