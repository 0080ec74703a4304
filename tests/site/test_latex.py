import pytest
from latex import spell_out


@pytest.mark.parametrize(
    ("written", "known"),
    [
        (r"\tfrac34, \frac12x", r"\tfrac{3}{4}, \frac{1}{2}x"),
        (r"\tfrac{13}4 + \tfrac1\beta", r"\tfrac{13}{4} + \tfrac{1}\beta"),
        (r"\frac{1}{\sqrt h}\, 12", r"\frac{1}{\sqrt h}\, 12"),
        (r"x_1 \dots x_N, \dotsb", r"x_1 \ldots x_N, \dotsb"),
        (r"p_j \log p_j - \log(x) + \max_j x", r"p_j\, \log\, p_j - \log(x) + \max_j x"),
        (r"\Big( a \Big)", r"\Bigl( a \Bigr)"),
        (r"\bar S_{ik} + \tilde V^1 + \bar V", r"{\bar S{}}_{ik} + {\tilde V{}}^1 + \bar V"),
    ],
)
def test_what_tex_reads_is_what_the_translator_reads(written, known):
    assert spell_out(written) == known
