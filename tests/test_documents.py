import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import documents
import pytest
from documents import DocumentError, broken_links

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md"))]
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
IN_MINIATURE = {
    "retrofit_llama.py": ("--steps", "3", "--tuning-steps", "2"),
    "train_jax.py": ("--steps", "3"),
    "train_torch.py": ("--steps", "3"),
}
"""Options that shorten a long example."""


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def as_a_user(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a new interpreter, without a display, and with warnings as errors."""
    environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONWARNINGS": "error"}
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True
    )


def run_as_a_user(*command: object, cwd: Path) -> None:
    done = as_a_user(*command, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr


def assert_ran(source: Path, done: subprocess.CompletedProcess[str]) -> None:
    """Check that a document or an example, one of several in an interpreter, ran to its end."""
    assert any(
        re.fullmatch(rf"{re.escape(str(source))}: (\d+ blocks )?ran", line) for line in done.stdout.splitlines()
    ), f"{source} did not run to its end:\n{done.stdout}{done.stderr}"


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    """Run the documents and the examples in one interpreter, because imports are slow."""
    documents_but_readme = [document for document in DOCUMENTS if document.name != "README.md"]
    examples = [shlex.join((str(example), *IN_MINIATURE.get(example.name, ()))) for example in EXAMPLES]
    return as_a_user(documents.__file__, *documents_but_readme, *examples, cwd=tmp_path_factory.mktemp("documents"))


@pytest.mark.parametrize("document", [document for document in DOCUMENTS if document.name != "README.md"], ids=relative)
def test_every_python_block_of_a_document_runs(document, interpreter):
    assert_ran(document, interpreter)


@pytest.mark.parametrize("example", EXAMPLES, ids=relative)
def test_an_example_runs(example, interpreter):
    assert_ran(example, interpreter)


def test_the_readme_runs_in_an_interpreter_of_its_own(tmp_path):
    run_as_a_user(documents.__file__, ROOT / "README.md", cwd=tmp_path)


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_every_link_to_a_file_leads_to_one(document):
    assert broken_links(document) == []


@pytest.mark.full
@pytest.mark.parametrize("example", EXAMPLES, ids=relative)
def test_an_example_runs_in_an_interpreter_of_its_own(example, tmp_path):
    run_as_a_user(example, *IN_MINIATURE.get(example.name, ()), cwd=tmp_path)


@pytest.mark.parametrize("example", EXAMPLES, ids=relative)
def test_an_example_is_under_sixty_lines(example):
    assert len(example.read_text(encoding="utf-8").splitlines()) < 60


@pytest.fixture
def written(tmp_path):
    def write(*lines: str) -> Path:
        document = tmp_path / "page.md"
        document.write_text("\n".join(lines), encoding="utf-8")
        return document

    return write


@pytest.mark.parametrize("fence", ["```python", "```python no-run", "```py", "```{python}", '```python title="x"'])
def test_no_mark_on_a_fence_skips_a_failing_block(written, fence):
    document = written("# Page", "```python", "a = 0", "```", "", fence, "b = 1", "b / a", "```")
    with pytest.raises(DocumentError, match=r"page\.md:8: ZeroDivisionError"):
        documents.run(document)


def test_a_failing_block_in_a_comment_is_found(written):
    document = written("# Page", "<!-- It checks the table above.", "```python", "assert 1 == 2", "```", "-->")
    with pytest.raises(DocumentError, match=r"page\.md:4: AssertionError"):
        documents.run(document)


def test_of_documents_in_one_interpreter_the_failing_one_is_named(tmp_path):
    good, bad, last = (tmp_path / name for name in ("good.md", "bad.md", "last.md"))
    good.write_text("```python\na = 1\nopen('here', 'x').close()\n```\n", encoding="utf-8")
    bad.write_text("# Page\n```python\nprint(a)\n```\n", encoding="utf-8")
    last.write_text(good.read_text(encoding="utf-8"), encoding="utf-8")
    done = as_a_user(documents.__file__, good, bad, last, cwd=tmp_path)
    assert done.returncode == 1
    assert_ran(good, done)
    assert_ran(last, done)
    with pytest.raises(AssertionError, match=r"bad\.md did not run to its end:[\s\S]*bad\.md:3: NameError"):
        assert_ran(bad, done)


def test_of_examples_in_one_interpreter_the_failing_ones_are_named(tmp_path):
    sources = {
        "good": "import sys, helper; assert helper.here and sys.argv[1:] == ['--steps', '3']; sys.exit(0)",
        "broken": "import helper; print(helper.gone)",
        "refusing": "import sys; sys.exit('no such gate')",
        "last": "import sys; assert __name__ == '__main__' and len(sys.argv) == 1",
    }
    files = {name: tmp_path / f"{name}.py" for name in sources}
    (tmp_path / "helper.py").write_text("here = True", encoding="utf-8")
    for name, source in sources.items():
        files[name].write_text(source, encoding="utf-8")
    (tmp_path / "elsewhere").mkdir()
    commands = [f"{files['good']} --steps 3", *(files[name] for name in ("broken", "refusing", "last"))]
    done = as_a_user(documents.__file__, *commands, cwd=tmp_path / "elsewhere")
    assert done.returncode == 1
    assert_ran(files["good"], done)
    assert_ran(files["last"], done)
    for name, complaint in {"broken": "AttributeError", "refusing": "exited with 'no such gate'"}.items():
        with pytest.raises(AssertionError, match=rf"{name}\.py did not run to its end:[\s\S]*{name}\.py: {complaint}"):
            assert_ran(files[name], done)


def test_broken_links_are_named_and_others_pass(written):
    document = written(
        "[itself](page.md#top) [above](#top) [site](https://example.org) [mail](mailto:a@b.org) `[code](none.md)`",
        "[gone](gone.md#part) and ![picture](<missing.png>)",
        "```text",
        "[in code](none.md)",
        "```",
        "[reference]: lost.md",
        '<a href="away.html">',
        "[absolute](/tmp)",
    )
    expected = ["2: gone.md#part", "2: missing.png", "6: lost.md", "7: away.html", "8: /tmp"]
    assert broken_links(document) == [f"{document}:{end}" for end in expected]
