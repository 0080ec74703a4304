"""Einsum notation: operations as einsum strings, and a parser that explains such strings.

A letter is an axis of one size wherever it occurs; `...` stands for batch axes that broadcast.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypedDict

from tidegate._validation import InputError
from tidegate.tensors._checks import check_arrays
from tidegate.tensors.namespace import Array

EINSUM_EXAMPLES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "dot_product": ("a,a->", "two vectors make a number"),
        "outer_product": ("a,b->ab", "two vectors make a matrix of all products"),
        "transpose": ("ij->ji", "rows become columns"),
        "diagonal": ("ii->i", "the diagonal: an index repeated and kept"),
        "trace": ("ii->", "the diagonal summed: an index repeated and dropped"),
        "sum_all": ("ij->", "every entry summed"),
        "sum_rows": ("ij->i", "each row summed"),
        "sum_cols": ("ij->j", "each column summed"),
        "matmul": ("ij,jk->ik", "rows against columns"),
        "matmul_transpose": ("ij,jk->ki", "a product, transposed for free"),
        "gram": ("ka,kb->ab", "columns against columns: WᵀW, a learned metric"),
        "hadamard": ("ij,ij->ij", "entry by entry"),
        "frobenius_sq": ("ij,ij->", "entry by entry and summed; of a matrix with itself its squared norm"),
        "trace_product": ("ij,ji->", "the trace of a product, without the product"),
        "batch_matmul": ("bij,bjk->bik", "one matrix product for each b"),
        "batch_trace": ("bii->b", "one trace for each b"),
        "any_batch_matmul": ("...ij,...jk->...ik", "matrix products over any batch axes"),
        "bilinear": ("a,ab,b->", "a vector, a metric and a vector: uᵀMv"),
        "batch_bilinear": ("ia,ab,jb->ij", "each query with each key in the metric g"),
        "attention_scores": ("ia,ja->ij", "each query with each key: QKᵀ"),
        "attention_output": ("ij,jc->ic", "values averaged by weights: AV"),
        "batched_scores": ("bia,bja->bij", "scores for each sequence b"),
        "batched_output": ("bij,bjc->bic", "outputs for each sequence b"),
        "mh_project": ("id,hda->hia", "the input projected for each head h"),
        "mh_scores": ("hia,hja->hij", "scores for each head"),
        "mh_output": ("hij,hjc->hic", "outputs for each head"),
        "mh_combine": ("hic,hcd->id", "heads projected back and summed"),
        "bmh_project": ("bid,hda->bhia", "each sequence projected for each head"),
        "bmh_scores": ("bhia,bhja->bhij", "scores for each sequence and head"),
        "gated_values": ("ij,ja,ja->ia", "values times their gates, averaged by weights: A(G⊙V)"),
    }
)
"""A tour of the notation: name -> (subscripts, meaning)."""


class ParsedEinsum(TypedDict):
    """The result of `parse_einsum`; the lists of indices are sorted and leave out the ellipsis."""

    inputs: list[str]
    output: str
    input_indices: list[str]
    free_indices: list[str]
    summation_indices: list[str]


def dot_product(u: Array, v: Array) -> Array:
    r"""$u_a v_a$: (..., a), (..., a) -> (...)."""
    return _contract("...a,...a->...", u=u, v=v)


def outer_product(u: Array, v: Array) -> Array:
    r"""$u_a v_b$: (..., a), (..., b) -> (..., a, b)."""
    return _contract("...a,...b->...ab", u=u, v=v)


def matrix_transpose(A: Array) -> Array:
    r"""$A_{ji}$: (..., i, j) -> (..., j, i)."""
    return _contract("...ij->...ji", A=A)


def trace(A: Array) -> Array:
    r"""$A_{ii}$: (..., i, i) -> (...)."""
    return _contract("...ii->...", A=A)


def matrix_multiply(A: Array, B: Array) -> Array:
    r"""$A_{ij} B_{jk}$: (..., i, j), (..., j, k) -> (..., i, k)."""
    return _contract("...ij,...jk->...ik", A=A, B=B)


def batch_matrix_multiply(A: Array, B: Array) -> Array:
    r"""$A_{bij} B_{bjk}$: (..., b, i, j), (..., b, j, k) -> (..., b, i, k); the axis b does not broadcast."""
    return _contract("...bij,...bjk->...bik", A=A, B=B)


def frobenius_norm_squared(A: Array) -> Array:
    r"""$A_{ij} A_{ij}$: (..., i, j) -> (...)."""
    return _contract("...ij,...ij->...", A=A, A_again=A)


def hadamard_product(A: Array, B: Array) -> Array:
    r"""$A_{ij} B_{ij}$, not summed: (..., i, j), (..., i, j) -> (..., i, j)."""
    return _contract("...ij,...ij->...ij", A=A, B=B)


def bilinear_form_einsum(u: Array, M: Array, v: Array) -> Array:
    r"""$u_a M_{ab} v_b$: (..., a), (..., a, b), (..., b) -> (...). M need not be square."""
    return _contract("...a,...ab,...b->...", u=u, M=M, v=v)


def batch_bilinear_form(Q: Array, g: Array, K: Array) -> Array:
    r"""$Q_{ia} g_{ab} K_{jb}$: (..., i, a), (..., a, b), (..., j, b) -> (..., i, j).

    It is a single sum; `bilinear.bilinear_form_batch` computes the same by two matrix products.
    """
    return _contract("...ia,...ab,...jb->...ij", Q=Q, g=g, K=K)


def attention_scores_einsum(Q: Array, K: Array, scale: bool = True) -> Array:
    r"""$Q_{ia} K_{ja}$, over $\sqrt{d}$ if `scale`, d the size of a: (..., i, a), (..., j, a) -> (..., i, j)."""
    scores = _contract("...ia,...ja->...ij", Q=Q, K=K)
    return scores / math.sqrt(Q.shape[-1]) if scale else scores


def attention_output_einsum(A: Array, V: Array) -> Array:
    r"""$A_{ij} V_{jc}$: (..., i, j), (..., j, c) -> (..., i, c)."""
    return _contract("...ij,...jc->...ic", A=A, V=V)


def batched_attention_scores_einsum(Q: Array, K: Array) -> Array:
    r"""$Q_{bia} K_{bja} / \sqrt{d}$, d the size of a: (..., b, i, a), (..., b, j, a) -> (..., b, i, j)."""
    return _contract("...bia,...bja->...bij", Q=Q, K=K) / math.sqrt(Q.shape[-1])


def batched_attention_output_einsum(A: Array, V: Array) -> Array:
    r"""$A_{bij} V_{bjc}$: (..., b, i, j), (..., b, j, c) -> (..., b, i, c)."""
    return _contract("...bij,...bjc->...bic", A=A, V=V)


def multihead_project_einsum(X: Array, W: Array) -> Array:
    r"""$X_{id} W_{hda}$: (..., i, d), (..., h, d, a) -> (..., h, i, a)."""
    return _contract("...id,...hda->...hia", X=X, W=W)


def multihead_scores_einsum(Q_h: Array, K_h: Array) -> Array:
    r"""$Q_{hia} K_{hja} / \sqrt{d}$, d the size of a: (..., h, i, a), (..., h, j, a) -> (..., h, i, j)."""
    return _contract("...hia,...hja->...hij", Q_h=Q_h, K_h=K_h) / math.sqrt(Q_h.shape[-1])


def multihead_output_einsum(A: Array, V_h: Array) -> Array:
    r"""$A_{hij} V_{hjc}$: (..., h, i, j), (..., h, j, c) -> (..., h, i, c)."""
    return _contract("...hij,...hjc->...hic", A=A, V_h=V_h)


def multihead_combine_einsum(O_h: Array, W_O: Array) -> Array:
    r"""$O_{hic} W_{hcd}$, summed over heads too: (..., h, i, c), (..., h, c, d) -> (..., i, d)."""
    return _contract("...hic,...hcd->...id", O_h=O_h, W_O=W_O)


def batched_multihead_project_einsum(X: Array, W: Array) -> Array:
    r"""$X_{bid} W_{hda}$: (..., b, i, d), (..., h, d, a) -> (..., b, h, i, a)."""
    return _contract("...bid,...hda->...bhia", X=X, W=W)


def batched_multihead_scores_einsum(Q_h: Array, K_h: Array) -> Array:
    r"""$Q_{bhia} K_{bhja} / \sqrt{d}$, d the size of a: (..., b, h, i, a), (..., b, h, j, a) -> (..., b, h, i, j)."""
    return _contract("...bhia,...bhja->...bhij", Q_h=Q_h, K_h=K_h) / math.sqrt(Q_h.shape[-1])


def parse_einsum(subscripts: str) -> ParsedEinsum:
    """Parse an einsum string; spaces are ignored. Raise InputError for a string that NumPy rejects.

    Without "->" the output is NumPy's: the ellipsis, if any, then the indices that occur exactly once, sorted.

    Returns:
        A dict: the indices of each operand, as in inputs ["...ia", "...ja"], and of the result, as in output "...ij";
        and as sorted lists all input_indices, the free_indices of the result, and the summation_indices
    """
    if not isinstance(subscripts, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"subscripts must be a string such as 'ij,jk->ik', got {type(subscripts).__name__}.")
    left, *right = "".join(subscripts.split()).split("->")
    if len(right) > 1:
        raise InputError("subscripts", expected="a string with at most one '->'", got=subscripts)
    inputs = left.split(",")
    counts = Counter("".join(_letters(term, subscripts) for term in inputs))
    ellipsis = "..." if "..." in left else ""
    output = right[0] if right else ellipsis + "".join(sorted(index for index in counts if counts[index] == 1))
    kept = Counter(_letters(output, subscripts))
    for index in sorted(kept):
        if index not in counts or kept[index] > 1:
            expected = "a string whose output has indices of the operands, each once"
            raise InputError("subscripts", expected=expected, got=subscripts, hint=f"Check {index!r} in the output.")
    if ("..." in output) != bool(ellipsis):
        raise InputError("subscripts", expected="a string with '...' on both sides of '->' or on none", got=subscripts)
    return {
        "inputs": inputs,
        "output": output,
        "input_indices": sorted(counts),
        "free_indices": sorted(kept),
        "summation_indices": sorted(counts.keys() - set(output)),
    }


def explain_einsum(subscripts: str) -> str:
    """Explain an einsum string: its tensors, the summed indices, and the formula of one entry of the result."""
    parsed = parse_einsum(subscripts)
    inputs, output, summed = parsed["inputs"], parsed["output"], parsed["summation_indices"]
    lines = [f"{','.join(inputs)}->{output}"]
    lines += [f"  Tensor {number}: {_index_list(term) or 'a number'}" for number, term in enumerate(inputs, 1)]
    lines += [f"  Result:   {_index_list(output) or 'a number'}", f"  Sum over: {', '.join(summed) or 'nothing'}"]
    for number, term in enumerate(inputs, 1):
        repeated = [index for index in parsed["input_indices"] if term.count(index) > 1]
        lines += [f"  Diagonal: Tensor {number} is read where its {index} are equal" for index in repeated]
    if "..." in output:
        lines += ["  Batch:    ... stands for any leading axes; they broadcast and are kept"]
    factors = " · ".join(f"T{number}[{_index_list(term)}]" for number, term in enumerate(inputs, 1))
    total = f"Σ_{{{','.join(summed)}}} " if summed else ""
    return "\n".join([*lines, f"  Formula:  R[{_index_list(output)}] = {total}{factors}"])


def _contract(subscripts: str, **operands: Array) -> Array:
    """Evaluate an einsum after checking ranks, sizes and batch axes by its string."""
    terms = subscripts.split("->")[0].split(",")
    xp, *arrays = check_arrays(
        **{name: (array, _index_list(term)) for (name, array), term in zip(operands.items(), terms, strict=True)}
    )
    return xp.einsum(subscripts, *arrays)


def _letters(term: str, subscripts: str) -> str:
    """Return the indices of one operand, without its ellipsis."""
    letters = term.replace("...", "", 1)
    for character in letters:
        if not (character.isascii() and character.isalpha()):
            expected = "a string of letters, ',', '->' and at most one '...' per operand"
            raise InputError("subscripts", expected=expected, got=subscripts, hint=f"Check {character!r} in {term!r}.")
    return letters


def _index_list(term: str) -> str:
    """Return the indices with commas between, such as "..., i, a"."""
    return ", ".join(re.findall(r"\.\.\.|\w", term))
