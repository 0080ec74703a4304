import webbrowser

import pytest
from typer.testing import CliRunner

from tidegate.cli import app
from tidegate.explore import explore_page


@pytest.fixture
def opened(monkeypatch):
    """The addresses that a browser was asked to open; the browser says whether it could."""
    addresses = []
    monkeypatch.setattr(webbrowser, "open", lambda address: not addresses.append(address))
    return addresses


def invoke(*arguments):
    return CliRunner().invoke(app, ["explore", *map(str, arguments)])


def test_the_page_is_written_and_opened(tmp_path, monkeypatch, opened):
    monkeypatch.chdir(tmp_path)
    done = invoke()
    assert done.exit_code == 0, done.output
    assert done.output == "Page: explore.html\n"
    assert (tmp_path / "explore.html").read_text(encoding="utf-8") == explore_page()
    assert opened == [(tmp_path / "explore.html").as_uri()]


def test_without_a_browser_the_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    done = invoke("--out", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    assert "No browser found" in done.output


def test_a_folder_is_no_file_to_write(tmp_path, opened):
    done = invoke("--out", tmp_path)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: --out must be a file name")
    assert opened == []
