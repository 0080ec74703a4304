import os
import re
import sys

import pytest
import typer
from typer.testing import CliRunner

from tidegate.cli import app
from tidegate.cli.errors import errors_in_one_line

HOSTILE = os.fsdecode(b"a\x1b[31m\x07\x9b\xff") + "\x9b2J\u202e"
STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]")


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def ended_with(problem):
    """The exit code and the error stream of a verb that raises this."""
    verb = typer.Typer()

    @verb.command()
    def fail():
        with errors_in_one_line():
            raise problem

    done = CliRunner().invoke(verb, [])
    return done.exit_code, done.stderr


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (ValueError("--seeds is\nwrong."), "--seeds is wrong."),
        (FileNotFoundError(2, "No such file", "a.txt"), "a.txt: No such file"),
        (OSError("the disk is full"), "the disk is full"),
        (ModuleNotFoundError("No module named 'ray'", name="ray"), "pip install 'tidegate[cluster]'"),
        (ModuleNotFoundError("No module named 'jinja2'", name="jinja2"), "pip install 'tidegate[lab]'"),
        (ImportError("cannot import name 'x'"), "cannot import name 'x'"),
        (MemoryError("Unable to allocate 8 EiB"), "not enough memory. Unable to allocate 8 EiB"),
    ],
)
def test_an_error_that_a_user_can_fix_is_one_line_and_the_exit_code_2(problem, words):
    code, stderr = ended_with(problem)
    assert code == 2
    assert re.fullmatch(r"error: [^\n]+\n", stderr)
    assert words in stderr


def test_an_interrupt_is_no_error():
    assert ended_with(KeyboardInterrupt()) == (130, "Interrupted. Rerun the command to start again.\n")


@pytest.mark.parametrize("problem", [RuntimeError, TypeError, KeyError, AssertionError, BrokenPipeError])
def test_a_bug_keeps_its_traceback_and_a_closed_pipe_is_not_reported(problem):
    with pytest.raises(problem), errors_in_one_line():
        raise problem("bug")


def test_a_message_without_end_loses_its_middle():
    _, stderr = ended_with(ValueError(f"start {'x' * 10**6} end"))
    assert stderr.startswith("error: start x")
    assert stderr.endswith("x end\n")
    assert len(stderr) < 5000


@pytest.mark.parametrize(
    "arguments",
    [["--\x1bweather"], ["\x1bverb"], ["compare", "--seeds", "\x1b"], ["observe"], ["study", "--\x1bweather"]],
)
def test_a_bad_call_is_one_line_that_names_the_help(arguments):
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert re.fullmatch(r"error: [^\n]+\. See \w+( \w+)? --help\.\n", done.stderr)
    assert not STEERING.search(done.stderr)


def test_without_a_verb_the_help_is_shown():
    assert "observe" in invoke().output


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "--data", f"{HOSTILE}.txt"],
        ["compare", "--variants", f"none,{HOSTILE}"],
        ["report", HOSTILE],
        ["study", HOSTILE],
        ["study", "depth", "--from", HOSTILE],
        ["observe", HOSTILE],
        ["generate", HOSTILE, "--prompt", "text"],
    ],
)
def test_names_steer_no_terminal(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert re.fullmatch(r"error: [^\n]+\n", done.stderr)
    assert not STEERING.search(done.stderr)


def test_a_prompt_that_is_not_utf8_is_named(tmp_path):
    done = invoke("generate", tmp_path, "--prompt", os.fsdecode(b"a\xff"))
    assert done.exit_code == 2
    assert done.stderr.startswith("error: --prompt must be valid UTF-8")


def test_names_of_files_below_the_data_steer_no_terminal(tmp_path):
    (tmp_path / f"{HOSTILE}.jsonl").write_text("no JSON")
    done = invoke("compare", "--data", tmp_path, "--out", tmp_path.with_name("out"))
    assert done.exit_code == 2
    assert r"a\u001b[31m\u0007\udc9b\udcff\u009b2J\u202e.jsonl:1 is not JSON" in done.stderr


RUNS = {
    "os:system": "without required arguments",
    "builtins:breakpoint": "without required arguments",
    "nosuch:x": "No module named 'nosuch'. Use a module in the working directory",
    "os:nosuch": "has no attribute 'nosuch'",
    "os:": "module:function",
    "..os:path": "module:function",
    "os:sep": "without required arguments",
    "os:getcwd": "returns a list",
}


@pytest.mark.parametrize(("name", "words"), RUNS.items(), ids=RUNS)
def test_runs_that_are_none_are_one_line(name, words, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    done = invoke("compare", "--runs", name, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert re.fullmatch(r"error: --runs [^\n]+\n", done.stderr)
    assert words in done.stderr


@pytest.mark.parametrize("option", ["--tokens", "--seeds"])
def test_numbers_beyond_every_machine_are_refused(option, tmp_path):
    done = invoke("compare", option, "9" * 400, "--task", "recall", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {option} must be ")


def test_a_record_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "depth.json")
    done = invoke("study", "depth", "--from", tmp_path / "depth.json", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: --from must be")
    assert "named pipe" in done.stderr
