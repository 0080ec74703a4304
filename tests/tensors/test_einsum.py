import jax
import numpy as np
import pytest
from closeness import assert_close, naming, to_numpy
from errors import rejects
from hypothesis import given
from hypothesis import strategies as st

from tidegate import InputError
from tidegate.tensors import einsum
from tidegate.tensors.einsum import EINSUM_EXAMPLES, explain_einsum, parse_einsum

T = np.matrix_transpose
ROOT = np.sqrt(5)


def heads_project(X, W):
    return X[..., None, :, :] @ W


# Each function, the shapes of its operands without batch axes, and the same thing in plain NumPy.
OPERATIONS = [
    ("dot_product", [(5,), (5,)], lambda u, v: np.sum(u * v, axis=-1)),
    ("outer_product", [(5,), (3,)], lambda u, v: u[..., :, None] * v[..., None, :]),
    ("matrix_transpose", [(2, 3)], T),
    ("trace", [(3, 3)], lambda A: np.trace(A, axis1=-2, axis2=-1)),
    ("matrix_multiply", [(2, 3), (3, 4)], np.matmul),
    ("batch_matrix_multiply", [(6, 2, 3), (6, 3, 4)], np.matmul),
    ("frobenius_norm_squared", [(2, 3)], lambda A: np.linalg.norm(A, axis=(-2, -1)) ** 2),
    ("hadamard_product", [(2, 3), (2, 3)], np.multiply),
    ("bilinear_form_einsum", [(2,), (2, 3), (3,)], lambda u, M, v: np.sum(u * (M @ v[..., None])[..., 0], axis=-1)),
    ("batch_bilinear_form", [(2, 5), (5, 4), (3, 4)], lambda Q, g, K: Q @ g @ T(K)),
    ("attention_scores_einsum", [(2, 5), (3, 5)], lambda Q, K: Q @ T(K) / ROOT),
    ("attention_output_einsum", [(2, 3), (3, 4)], np.matmul),
    ("batched_attention_scores_einsum", [(6, 2, 5), (6, 3, 5)], lambda Q, K: Q @ T(K) / ROOT),
    ("batched_attention_output_einsum", [(6, 2, 3), (6, 3, 4)], np.matmul),
    ("multihead_project_einsum", [(2, 3), (6, 3, 4)], heads_project),
    ("multihead_scores_einsum", [(6, 2, 5), (6, 3, 5)], lambda Q, K: Q @ T(K) / ROOT),
    ("multihead_output_einsum", [(6, 2, 3), (6, 3, 4)], np.matmul),
    ("multihead_combine_einsum", [(6, 2, 3), (6, 3, 4)], lambda O_h, W_O: np.sum(O_h @ W_O, axis=-3)),
    ("batched_multihead_project_einsum", [(7, 2, 3), (6, 3, 4)], lambda X, W: heads_project(X, W[..., None, :, :, :])),
    ("batched_multihead_scores_einsum", [(7, 6, 2, 5), (7, 6, 3, 5)], lambda Q, K: Q @ T(K) / ROOT),
]


def operands(shapes, batch=(), dtype=np.float64):
    random = np.random.default_rng(0)
    return [random.standard_normal((*batch, *shape)).astype(dtype) for shape in shapes]


def test_every_operation_is_in_the_table():
    functions = {name for name, value in vars(einsum).items() if getattr(value, "__module__", "") == einsum.__name__}
    others = {"ParsedEinsum", "explain_einsum", "parse_einsum"}
    assert {row[0] for row in OPERATIONS} == {name for name in functions if not name.startswith("_")} - others


def call_all(library, given):
    """What operations give for their operands, by name: in one call, which JAX compiles once and not for each."""
    flat, tree = jax.tree.flatten(given)

    def all_of_them(*arrays):
        return {name: getattr(einsum, name)(*own) for name, own in jax.tree.unflatten(tree, arrays).items()}

    return library.call(all_of_them, *flat)


def check_all(library, *, batch=(), dtype=np.float64):
    given = {name: operands(shapes, batch, dtype) for name, shapes, _ in OPERATIONS}
    results = call_all(library, given)
    for name, _, plain in OPERATIONS:
        with naming(name):
            assert_close(results[name], plain(*given[name]))
            assert to_numpy(results[name]).dtype == dtype
            if to_numpy(results[name]).ndim:
                assert isinstance(results[name], library.kind)


def test_the_string_means_the_plain_expression(library):
    check_all(library)


def test_the_string_means_the_plain_expression_in_a_batch(library):
    check_all(library, batch=(2, 3))


SEVERAL_OPERANDS = [(name, shapes) for name, shapes, _ in OPERATIONS if len(shapes) > 1]


def test_batch_axes_broadcast(library):
    given = {name: [operands(shapes, (2, 1))[0], *operands(shapes, (4,))[1:]] for name, shapes in SEVERAL_OPERANDS}
    for name, result in call_all(library, given).items():
        first, *others = given[name]
        full = [np.repeat(first, 4, axis=1), *(np.stack([other, other]) for other in others)]
        with naming(name):
            assert_close(result, getattr(einsum, name)(*full))


def test_operands_that_do_not_fit_are_rejected(library):
    for name, shapes, _ in OPERATIONS:
        function, (first, *others) = getattr(einsum, name), operands(shapes)
        with naming(name):
            with pytest.raises(InputError, check=lambda error: "(..., " in error.expected):
                library.call(function, first[0], *others)
            with pytest.raises(TypeError, match="must have a real floating dtype"):
                function(first.astype(int), *others)
            if others:
                batched = [np.stack([other] * 3) for other in others]
                with pytest.raises(InputError, check=lambda error: "leading axes" in error.expected):
                    function(np.stack([first] * 2), *batched)
            # `outer_product` has no index in common; a size of 1 is not stretched.
            if others and name != "outer_product":
                with pytest.raises(InputError, check=lambda error: ", as in " in error.expected):
                    library.call(function, first[..., :1], *others)


def test_scores_without_their_scale_are_larger_by_the_root_of_the_width(library):
    Q, K = operands([(2, 5), (3, 5)])
    assert_close(library.call(einsum.attention_scores_einsum, Q, K, False), Q @ K.T)


def test_every_example_parses_explains_and_runs():
    for name, (subscripts, meaning) in EINSUM_EXAMPLES.items():
        with naming(name):
            parsed = parse_einsum(subscripts)
            size = {index: number for number, index in enumerate(parsed["input_indices"], 2)}
            arrays = operands([tuple(size[index] for index in term if index != ".") for term in parsed["inputs"]])
            shape = tuple(size[index] for index in parsed["output"] if index != ".")
            assert np.einsum(subscripts, *arrays).shape == shape
            assert explain_einsum(subscripts).startswith(subscripts)
            assert meaning


def test_a_product_is_taken_apart():
    assert parse_einsum("ij,jk->ik") == {
        "inputs": ["ij", "jk"],
        "output": "ik",
        "input_indices": ["i", "j", "k"],
        "free_indices": ["i", "k"],
        "summation_indices": ["j"],
    }


@pytest.mark.parametrize(
    ("subscripts", "output", "summed"),
    [
        ("bA", "Ab", []),
        ("b...a,a", "...b", ["a"]),
        (" i j , j k -> k i ", "ki", ["j"]),
        ("", "", []),
        (",a->a", "a", []),
    ],
)
def test_outputs_follow_numpy(subscripts, output, summed):
    parsed = parse_einsum(subscripts)
    assert parsed["output"] == output
    assert parsed["summation_indices"] == summed


@given(terms=st.lists(st.text("abCD", max_size=3), min_size=1, max_size=3), batched=st.booleans())
def test_the_implied_output_is_the_one_numpy_takes(terms, batched):
    terms = [("..." if batched else "") + term for term in terms]
    size = dict(zip("abCD", (2, 3, 4, 5), strict=True))
    arrays = operands([(*[6] * batched, *(size[index] for index in term if index != ".")) for term in terms])
    parsed = parse_einsum(",".join(terms))
    implied = np.einsum(",".join(terms), *arrays)
    explicit = np.einsum(f"{','.join(terms)}->{parsed['output']}", *arrays)
    assert np.array_equal(implied, explicit)


@pytest.mark.parametrize(
    ("subscripts", "hint"),
    [
        ("ij,jk->ik->i", ""),
        ("i1->i", "'1' in 'i1'"),
        ("i.j->ij", "'.'"),
        ("ij->k", "'k' in the output"),
        ("ij->ii", "'i' in the output"),
        ("...i->i", ""),
    ],
)
def test_a_bad_string_is_rejected_with_what_is_wrong(subscripts, hint):
    for function in (parse_einsum, explain_einsum):
        with rejects("subscripts", hint=hint):
            function(subscripts)
    with pytest.raises(TypeError, match="subscripts must be a string"):
        parse_einsum(3)


def test_an_explanation_points_out_diagonals_and_batches():
    *_, diagonal, batch, formula = explain_einsum("i...i->...").splitlines()
    assert diagonal.startswith("  Diagonal: Tensor 1")
    assert batch.startswith("  Batch:    ...")
    assert formula == "  Formula:  R[...] = Σ_{i} T1[i, ..., i]"
