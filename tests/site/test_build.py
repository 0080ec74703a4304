"""What fails `make docs`: Sphinx runs on small pages with the site's settings and the options of the Makefile."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPTIONS = re.search(r"-m sphinx (.*) -c docs ", (ROOT / "Makefile").read_text(encoding="utf-8"))[1]

pytestmark = pytest.mark.full


def build(page: str, folder: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("sphinx", reason="the extra `docs` is not installed")
    (folder / "README.md").write_text(f"# Page\n\n{page}\n", encoding="utf-8")
    small = ("-D", "extensions=myst_parser,mathml", "-D", "include_patterns=README.md")
    command = ["-m", "sphinx", *shlex.split(OPTIONS), "-c", ROOT / "docs", *small, folder, folder / "site"]
    return subprocess.run([sys.executable, *command], capture_output=True, text=True)


def test_a_sound_page_is_built_with_its_formula_as_mathml(tmp_path):
    done = build(r"[above](#page) and $\tfrac12 \sum_j A^{ij}$", tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "README.html").read_text(encoding="utf-8")
    assert re.search(r"<mfrac[^>]*>\s*<mn>1</mn>\s*<mn>2</mn>", page)


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        ("[gone](gone.md)", "gone.md"),
        ("[gone](#gone)", "gone"),
        ("![gone](gone.png)", "gone.png"),
        (r"$\unheard{x}$", "unheard"),
    ],
)
def test_what_is_broken_fails_the_build_and_is_named(page, complaint, tmp_path):
    done = build(page, tmp_path)
    assert done.returncode != 0
    assert complaint in done.stderr
