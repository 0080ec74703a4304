"""Rewrite LaTeX in the subset that the translator to MathML supports."""

import re

FUNCTIONS = "log|ln|exp|tanh|max|min"
SPELLINGS = {
    r"\\dots\b": r"\\ldots",
    r"\\(big|Big)(?=[(\[])": r"\\\1l",
    r"\\(big|Big)(?=[)\]])": r"\\\1r",
    # TeX takes one digit as an argument, the translator takes all adjacent digits.
    r"(\\[td]?frac)\s*(\d)": r"\1{\2}",
    r"(\\[td]?frac\{[^{}]*\})\s*(\d)": r"\1{\2}",
    # TeX sets an index next to a letter with an accent, the translator below it.
    r"\\(bar|hat|tilde|dot|ddot)\s+([A-Za-z])(?=[_^])": r"{\\\1 \2{}}",
    # TeX adds space around a function's name, the translator does not.
    rf"\\({FUNCTIONS})\s+(?=[\w\\])": r"\\\1\\, ",
    rf"(?<=[\w)}}])\s+\\({FUNCTIONS})\b": r"\\, \\\1",
}


def spell_out(formula: str) -> str:
    """Replace commands that the translator does not support or interprets differently from TeX."""
    for pattern, known in SPELLINGS.items():
        formula = re.sub(pattern, known, formula)
    return formula
