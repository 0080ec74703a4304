from pathlib import Path

import check_links
import pytest

GOOD = '<a id="here" href="#here">x</a><a href="sub/b.html#part">b</a><a href="https://a.org">out</a><img src="a.png">'


@pytest.fixture
def site(tmp_path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "a.html").write_text(GOOD, encoding="utf-8")
    (tmp_path / "sub" / "b.html").write_text('<p id="part"></p><a href="../a.html">a</a>', encoding="utf-8")
    return tmp_path


def test_a_site_whose_links_hold_passes(site, capsys):
    assert check_links.main(site) == 0
    assert "2 pages, no broken link" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("sub/b.html#part", "sub/c.html", "a.html: sub/c.html: no such file"),
        ("b.html#part", "b.html#gone", "a.html: sub/b.html#gone: no such anchor"),
        ("#here", "#there", "a.html: #there: no such anchor"),
        ("a.png", "https://example.org/a.png", "a.html: https://example.org/a.png: is fetched from the network"),
        ("a.png", "//example.org/a.png", "a.html: //example.org/a.png: is fetched from the network"),
    ],
)
def test_a_link_that_does_not_hold_is_named(site, capsys, before, after, complaint):
    (site / "a.html").write_text(GOOD.replace(before, after), encoding="utf-8")
    assert check_links.main(site) == 1
    assert capsys.readouterr().out.strip() == complaint


def test_a_site_without_pages_is_refused(tmp_path, capsys):
    assert check_links.main(tmp_path) == 1
    assert "there are no pages" in capsys.readouterr().out
