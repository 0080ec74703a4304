"""A corpus that is larger than the memory that a process may have: made into shards, and trained on."""

import subprocess
import sys
from pathlib import Path

import pytest

CORPUS_BYTES = 640 << 20
ALLOWED_BYTES = 320 << 20
"""That a process may take beyond what its imports hold: half of the corpus."""

LIMITED = f"""
import resource, sys
from dataclasses import replace
from pathlib import Path
from lab_runs import run_of
from tidegate.lab.compare.cost import _status_bytes
from tidegate.lab.tasks.text import text_task
from tidegate.lab.tasks.tokenizing import tokenize
from tidegate.lab.training.train import RunContext, execute_run

text, shards = Path(sys.argv[1]), Path(sys.argv[2])
limit = _status_bytes("VmData") + {ALLOWED_BYTES}
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
"""

TOKENIZE = "print(len(tokenize(str(text), shards).shards))"
TRAIN = """
task = replace(text_task(str(shards), length=64), num_validation_tokens=4096, num_final_tokens=4096)
record = execute_run(run_of(task, steps=50, batch_size=16), RunContext(folder=shards.parent / "checkpoints"))
assert record.status == "finished", record.error
print(record.tokens)
"""
READ_WHOLE = "text.read_bytes()"


def limited(work, *arguments):
    """Run some lines in a process that may not take more memory than that."""
    support = Path(__file__).parents[2] / "support"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(support)!r})\n{LIMITED}\n{work}"]
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, check=False)


# It writes and reads gigabytes.
@pytest.mark.full
@pytest.mark.timeout(900)
def test_tokenizing_and_training_stay_below_a_limit_that_the_corpus_exceeds(tmp_path):
    text, shards = tmp_path / "corpus.txt", tmp_path / "shards"
    line = "the sum of {} and {} is {}.\n"
    block = "".join(line.format(number, number % 7, number + number % 7) for number in range(40_000)).encode()
    with text.open("wb") as file:
        for _ in range(-(-CORPUS_BYTES // len(block))):
            file.write(block)
    size = text.stat().st_size
    assert size > 1.9 * ALLOWED_BYTES
    whole = limited(READ_WHOLE, text, shards)
    assert whole.returncode != 0
    assert "MemoryError" in whole.stderr
    made = limited(TOKENIZE, text, shards)
    assert made.returncode == 0, made.stderr
    assert int(made.stdout) > 10
    assert sum(file.stat().st_size for file in shards.glob("*.bin")) == size
    trained = limited(TRAIN, text, shards)
    assert trained.returncode == 0, trained.stderr
    assert int(trained.stdout) == 50 * 16 * 64
