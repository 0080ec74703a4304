from functools import partial

import fault_points
from typer.testing import CliRunner

from tidegate.cli import app
from tidegate.lab.tasks import tokenizing

runner = CliRunner()


def test_a_text_becomes_shards_that_train_reads(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} and {number % 7}\n" for number in range(400)))
    done = runner.invoke(app, ["tokenize", str(text), "--out", str(tmp_path / "shards"), "--processes", "1"])
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith("1 shard, ")
    assert done.stdout.startswith("Wrote 1 shard to ")
    assert "vocabulary 256" in done.output
    sizes = ["--d-model", "16", "--num-layers", "1", "--num-heads", "2", "--length", "16", "--batch-size", "4"]
    options = ["--data", str(tmp_path / "shards"), "--out", str(tmp_path / "model"), "--tokens", "128"]
    trained = runner.invoke(app, ["train", *options, *sizes])
    assert trained.exit_code == 0, trained.output
    (tmp_path / "shards" / "00000.bin").write_bytes(b"")
    short = runner.invoke(app, ["train", *options, *sizes])
    assert short.exit_code == 2
    assert "truncated" in short.output


def test_bad_input_is_one_line(tmp_path):
    missing = runner.invoke(app, ["tokenize", str(tmp_path / "none.txt"), "--out", str(tmp_path / "shards")])
    assert missing.exit_code == 2
    assert missing.stderr.startswith("error: DATA must")
    wrong = runner.invoke(app, ["tokenize", "stdlib", "--tokenizer", "words", "--out", str(tmp_path / "shards")])
    assert wrong.exit_code == 2
    assert "--tokenizer must be" in wrong.output


def test_an_encoder_that_is_killed_is_one_line_and_the_same_command_goes_on(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} and {number % 7}\n" for number in range(400)))
    monkeypatch.setattr(tokenizing, "tokenize", partial(tokenizing.tokenize, shard_bytes=512))
    command = ["tokenize", str(text), "--out", str(tmp_path / "shards"), "--processes"]
    with monkeypatch.context() as patch:
        # This process writes the journal alone before one of the encoders comes to its second shard.
        fault_points.ask_for(patch, "file:before-move", 2, "kill")
        lost = runner.invoke(app, [*command, "2", "--quiet"])
    assert lost.exit_code == 1
    assert lost.stderr == (
        "error: An encoding process was killed, possibly for lack of memory. "
        "Rerun the command to resume, or use fewer --processes.\n"
    )
    assert runner.invoke(app, [*command, "1"]).exit_code == 0
    assert b"".join(file.read_bytes() for file in sorted((tmp_path / "shards").glob("*.bin"))) == text.read_bytes()


def test_learning_byte_pairs_is_announced_unless_they_are_there(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} and {number % 7}\n" for number in range(400)))
    pairs = ["--tokenizer", "bpe:300"]
    shards = ["tokenize", str(text), "--out", str(tmp_path / "shards"), "--processes", "1", *pairs]
    sizes = ["--d-model", "16", "--num-layers", "1", "--num-heads", "2", "--length", "16", "--batch-size", "4"]
    train = ["train", "--data", str(text), *pairs, *sizes, "--dry-run"]
    announced = "training a BPE tokenizer of 300 tokens on "
    for command in (shards, train):
        first, again = (runner.invoke(app, command) for _ in range(2))
        assert first.exit_code == 0, first.output
        assert first.stderr.startswith(announced)
        assert announced not in again.output
    (tmp_path / "shards" / "tokenizer.json").unlink()
    assert runner.invoke(app, [*shards, "--quiet"]).stderr == ""
