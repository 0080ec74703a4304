import pytest

from tidegate.lab.tasks.documents import Document
from tidegate.lab.tasks.streams import hold_out, num_held_out


def documents(*sizes):
    return [Document(str(number), f"{number} ".encode().ljust(size, b".")) for number, size in enumerate(sizes)]


def size_of(side):
    return sum(len(document.content) for document in side)


@pytest.mark.parametrize(
    ("total", "at_least", "expected"), [(1000, 10, 50), (1000, 80, 80), (100, 80, 50), (1, 5, 0), (0, 5, 0)]
)
def test_a_share_is_held_out_or_a_window_but_never_more_than_half(total, at_least, expected):
    assert num_held_out(total, share=0.05, at_least=at_least) == expected


@pytest.mark.parametrize("sizes", [(100,) * 50, (5, 10, 20, 40, 80, 160) * 20, (3000, *(10,) * 100)])
def test_whole_documents_make_up_the_share(sizes):
    split = hold_out(documents(*sizes), share=0.05, at_least=50)
    assert 0.5 * 0.05 <= size_of(split.held_out) / sum(sizes) <= 2 * 0.05
    assert sorted([*split.training, *split.held_out]) == sorted(documents(*sizes))
    assert split.rule == f"{len(split.held_out)} of {len(sizes)} documents, chosen by a hash"


def test_both_sides_keep_the_order_of_the_documents():
    split = hold_out(documents(*(100,) * 50), share=0.2, at_least=50)
    for side in (split.training, split.held_out):
        numbers = [int(document.name) for document in side]
        assert numbers == sorted(numbers)


def test_copies_of_a_document_are_on_the_same_side():
    copies = [Document(str(number), b"%d" % (number % 20) * 50) for number in range(100)]
    split = hold_out(copies, share=0.1, at_least=1)
    contents = [{document.content for document in side} for side in split[:2]]
    assert contents[1]
    assert contents[0].isdisjoint(contents[1])


def test_order_and_names_do_not_decide_what_is_held_out():
    renamed = [Document(f"copy of {name}", content) for name, content in reversed(documents(*(50,) * 50))]
    sides = [
        {document.content for document in hold_out(of, share=0.1, at_least=1).held_out}
        for of in (documents(*(50,) * 50), renamed)
    ]
    assert sides[0] == sides[1]


def test_a_few_large_documents_each_give_their_end():
    whole = documents(1000, 1000, 2000)
    split = hold_out(whole, share=0.05, at_least=10)
    assert [len(document.content) for document in split.held_out] == [50, 50, 100]
    assert [bytes(a.content) + bytes(b.content) for a, b in zip(*split[:2], strict=True)] == [
        each.content for each in whole
    ]
    assert split.rule == "the last 5 % of each of the 3 documents"


def test_a_window_is_held_out_though_the_share_is_less():
    assert size_of(hold_out(documents(1000), share=0.01, at_least=129).held_out) == 129
    assert size_of(hold_out(documents(*(100,) * 10), share=0.01, at_least=129).held_out) == 200


@pytest.mark.parametrize("text", ["é" * 500, "日本" * 333, "🌊" * 250, "a" + "🌊" * 250, "plain" * 99])
@pytest.mark.parametrize("share", [0.05, 0.07, 0.11, 0.5])
def test_a_character_is_never_cut_in_two(text, share):
    split = hold_out([Document("one", text.encode())], share=share, at_least=1)
    assert "".join(bytes(side[0].content).decode() for side in split[:2]) == text


def test_bytes_that_are_no_text_are_cut_all_the_same():
    split = hold_out([Document("one", b"\x80" * 1000)], share=0.05, at_least=1)
    assert [size_of(side) for side in split[:2]] == [950, 50]
