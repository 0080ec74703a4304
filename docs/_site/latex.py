"""LaTeX as people write it, spelled as the translator to MathML knows it."""

import re

FUNCTIONS = "log|ln|exp|tanh|max|min"
SPELLINGS = {
    r"\\dots\b": r"\\ldots",
    r"\\(big|Big)(?=[(\[])": r"\\\1l",
    r"\\(big|Big)(?=[)\]])": r"\\\1r",
    # TeX takes one digit for an argument, the translator all that stand together.
    r"(\\[td]?frac)\s*(\d)": r"\1{\2}",
    r"(\\[td]?frac\{[^{}]*\})\s*(\d)": r"\1{\2}",
    # TeX sets an index beside a letter with an accent, the translator below it.
    r"\\(bar|hat|tilde|dot|ddot)\s+([A-Za-z])(?=[_^])": r"{\\\1 \2{}}",
    # TeX sets a function's name apart from what stands beside it, the translator does not.
    rf"\\({FUNCTIONS})\s+(?=[\w\\])": r"\\\1\\, ",
    rf"(?<=[\w)}}])\s+\\({FUNCTIONS})\b": r"\\, \\\1",
}


def spell_out(formula: str) -> str:
    """Replace what the translator does not know, or reads in another way than TeX."""
    for pattern, known in SPELLINGS.items():
        formula = re.sub(pattern, known, formula)
    return formula
