"""The site's search leads a reader's words to the page that answers them."""

from pathlib import Path

import pytest
import search_words

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", search_words.WORDS)
def test_a_pages_words_stand_below_its_title_and_nothing_else_changes(page):
    text = (ROOT / f"{page}.md").read_text(encoding="utf-8")
    source = [text]
    search_words.add_words(None, page, source)
    title, entries, rest = source[0].split("\n", 1)[0], source[0].split("\n")[2], source[0].split("```\n", 1)[1]
    assert title.startswith("# ")
    assert entries.startswith("```{index} ! ")
    assert f"{title}\n{rest}" == text


def test_a_page_without_words_is_left_alone():
    source = ["# Page\n"]
    search_words.add_words(None, "docs/page", source)
    assert source == ["# Page\n"]


def test_a_query_leads_to_one_page():
    words = [word for page in search_words.WORDS.values() for word in page]
    assert len(words) == len(set(words))
