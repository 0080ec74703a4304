"""The site has the page of `tidegate explore`: the same file, linked and framed by its document, whose links hold."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import check_links
import explore_page
import pytest
from typer.testing import CliRunner

from tidegate.cli import app as command

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "explore.md"


def written_by_the_command(folder: Path) -> bytes:
    place = folder / "by-the-command.html"
    done = CliRunner().invoke(command, ["explore", "--no-open", "--out", str(place)])
    assert done.exit_code == 0, done.output
    return place.read_bytes()


def site_of(folder: Path, format_: str = "html") -> SimpleNamespace:
    return SimpleNamespace(outdir=folder, builder=SimpleNamespace(format=format_))


def test_the_site_has_the_file_that_the_command_writes(tmp_path):
    (tmp_path / "site").mkdir()
    explore_page.write_page(site_of(tmp_path / "site"), None)
    assert (tmp_path / "site" / "explore.html").read_bytes() == written_by_the_command(tmp_path)


@pytest.mark.parametrize(("format_", "error"), [("latex", None), ("html", ValueError("broken"))])
def test_a_build_that_failed_or_makes_no_pages_has_none(format_, error, tmp_path):
    explore_page.write_page(site_of(tmp_path, format_), error)
    assert not list(tmp_path.iterdir())


def test_the_document_shows_it_and_others_are_left_alone():
    text = DOCUMENT.read_text(encoding="utf-8")
    ours, other = [text], ["# Page"]
    explore_page.show_page(None, "docs/explore", ours)
    explore_page.show_page(None, "docs/observe", other)
    assert ours == [text.replace(explore_page.MARK, explore_page.FRAME)] != [text]
    assert other == ["# Page"]


def test_a_document_without_the_place_for_it_is_refused():
    with pytest.raises(
        ValueError, match=r"docs/explore\.md must have the line '<!-- The site shows the page here\. -->'"
    ):
        explore_page.show_page(None, "docs/explore", ["# Page"])


def test_its_links_and_those_to_it_hold(tmp_path, capsys):
    explore_page.write_page(site_of(tmp_path), None)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "explore.html").write_text(explore_page.FRAME, encoding="utf-8")
    assert check_links.main(tmp_path) == 0, capsys.readouterr().out
    (tmp_path / "explore.html").unlink()
    assert check_links.main(tmp_path) == 1


@pytest.mark.full
def test_sphinx_builds_a_site_that_has_it(tmp_path):
    pytest.importorskip("sphinx", reason="the extra `docs` is not installed")
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# Page\n\n```{toctree}\ndocs/explore\n```\n", encoding="utf-8")
    (tmp_path / "docs" / "explore.md").write_text(f"# Page\n\n{explore_page.MARK}\n", encoding="utf-8")
    small = ("-D", "extensions=myst_parser,mathml,explore_page", "-D", "include_patterns=README.md,docs/explore.md")
    build = ["-m", "sphinx", "--fail-on-warning", "--quiet", "-c", ROOT / "docs", *small, tmp_path, tmp_path / "site"]
    done = subprocess.run([sys.executable, *build], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "explore.html").read_bytes() == written_by_the_command(tmp_path)
    assert '<iframe class="explore" src="../explore.html"' in (tmp_path / "site" / "docs" / "explore.html").read_text()
    assert check_links.main(tmp_path / "site") == 0
