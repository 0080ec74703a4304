import textwrap

import pytest
from docstrings import to_inline, to_rst


def link(code: str) -> str | None:
    return {"softmax": "tidegate.softmax"}.get(code)


def translated(docstring: str) -> str:
    return "\n".join(to_rst(textwrap.dedent(docstring), link)).strip()


@pytest.mark.parametrize(
    ("markdown", "rst"),
    [
        ("plain words", "plain words"),
        ("of `xp`, not", r"of \ ``xp``\ , not"),
        ("see `softmax`", r"see \ :py:obj:`softmax <tidegate.softmax>`\ "),
        (r"the $x_j$s", r"the \ :math:`x_j`\ s"),
        ("|judge| and dL_d*", r"\|judge\| and dL\_d\*"),
        ("(..., query, key), real", "``(..., query, key)``\\ , real"),
        ("() with heads (H,)", "``()`` with heads (H,)"),
        ("(see below) it is", "(see below) it is"),
    ],
)
def test_code_formulas_and_shapes_are_marked_and_the_rest_is_escaped(markdown, rst):
    assert to_inline(markdown, link) == rst


def test_lines_of_arguments_become_fields():
    assert (
        translated("""
        Add two numbers.

        u, v    : (..., d), which
                  broadcast
        returns : (...)
    """)
        == textwrap.dedent("""
        Add two numbers.

        :param u: ``(..., d)``\\ , which broadcast
        :param v: ``(..., d)``\\ , which broadcast

        :returns: ``(...)``
    """).strip()
    )


def test_arguments_of_one_line_and_parts_of_a_result_are_told_apart():
    assert translated("Q : (a, b);  K : (c, b)") == ":param Q: ``(a, b)``\n:param K: ``(c, b)``"
    assert translated("returns : a dict\n    yes : (...) bool\n    no  : (...)") == (
        ":returns: a dict\n\n   - ``yes``: ``(...)`` bool\n\n   - ``no``: ``(...)``"
    )


def test_sections_become_fields():
    assert (
        translated("""
        Return a sum.

        Args:
            u, v: (..., d), which
                broadcast
            tol: see `softmax` first

        Returns:
            A dict
            of two:
                yes: (...) bool
                no: (...)

        Raises:
            ValueError: if they
                do not fit
    """)
        == textwrap.dedent("""
        Return a sum.

        :param u: ``(..., d)``\\ , which broadcast
        :param v: ``(..., d)``\\ , which broadcast
        :param tol: see \\ :py:obj:`softmax <tidegate.softmax>`\\  first

        :returns: A dict of two:

           - ``yes``: ``(...)`` bool

           - ``no``: ``(...)``

        :raises ValueError: if they do not fit
    """).strip()
    )


def test_code_that_is_set_in_and_displayed_formulas_are_blocks():
    assert translated("Text:\n\n    a  b\n\n$$x = 1$$") == "Text:\n\n::\n\n    a  b\n\n.. math::\n\n   x = 1"


def test_no_docstring_is_no_text():
    assert translated("") == ""
