import jax
import numpy as np
import pytest
import torch
from closeness import assert_close, to_numpy
from covers import axis, over, rows
from libraries import JAX, NUMPY, TORCH

from tidegate.tensors.attention import attention_scores, attention_weights, scaled_dot_product_attention
from tidegate.tensors.gating import bilinearly_modulated_attention
from tidegate.tensors.gradients import (
    attention_backward,
    bma_backward,
    grad_output_wrt_A,
    grad_output_wrt_V,
    grad_scores_wrt_K,
    grad_scores_wrt_Q,
    grad_softmax,
    gradient_flow_analysis,
    gradient_numerical_check,
    gradients_agree,
    verify_gradients,
)
from tidegate.tensors.namespace import sum_to_shape


def sample(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


B, H, T, h, v = 2, 3, 4, 2, 5
MASK = np.array([[True, False, False, True], [False] * 4, [True, True, True, False], [True] * 4])
SHAPES = {
    "matrices": {"Q": (T, h), "K": (T, h), "V": (T, v), "W_g": (h, v)},
    "heads": {"Q": (H, T, h), "K": (H, T, h), "V": (H, T, v), "W_g": (H, h, v)},
    "batch": {"Q": (B, H, T, h), "K": (B, H, T, h), "V": (B, H, T, v), "W_g": (H, h, v)},
    "broadcast": {"Q": (B, H, T, h), "K": (H, T, h), "V": (B, 1, T, v), "W_g": (1, h, v)},
}
INDEX, MASKS = axis(["source", "query"]), axis({"all": None, "masked": MASK}, "masked")
every_case = pytest.mark.parametrize(
    ("shapes", "index", "mask"),
    [
        pytest.param(SHAPES[row["shapes"]], row["index"], MASKS.values[row["mask"]], id="-".join(row.values()))
        for row in rows({"shapes": axis(SHAPES), "index": INDEX, "mask": MASKS}, full=True)
    ],
)


def arrays_of(shapes):
    return {name: sample(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}


class TestModulatedAttention:
    @every_case
    def test_gradients_by_hand_are_those_of_pytorch(self, shapes, index, mask):
        arrays = {name: torch.from_numpy(array).requires_grad_() for name, array in arrays_of(shapes).items()}
        output = bilinearly_modulated_attention(**arrays, index=index, mask=mask)
        E = torch.from_numpy(sample(*output.shape, seed=9))
        output.backward(E)
        found = bma_backward(E, **{n: a.detach() for n, a in arrays.items()}, index=index, mask=mask)
        assert list(found) == ["dL_dQ", "dL_dK", "dL_dV", "dL_dW_g"]
        for name, array in arrays.items():
            assert_close(found[f"dL_d{name}"], array.grad, what="gradient")

    @over(shapes=axis({name: SHAPES[name] for name in ("broadcast", "batch")}), index=INDEX, mask=MASKS)
    def test_gradients_by_hand_are_those_of_jax(self, shapes, index, mask):
        @jax.jit
        def both(arrays, E):
            _, back = jax.vjp(lambda named: bilinearly_modulated_attention(**named, index=index, mask=mask), arrays)
            return bma_backward(E, **arrays, index=index, mask=mask), back(E)[0]

        arrays = arrays_of(shapes)
        by_hand, judge = both(arrays, sample(*shapes["Q"][:-1], v, seed=9))
        for name in arrays:
            assert_close(by_hand[f"dL_d{name}"], judge[name], what="gradient")

    @over(shapes=axis(SHAPES), index=INDEX, mask=MASKS)
    def test_gradients_by_hand_are_those_of_central_differences(self, shapes, index, mask):
        found = gradient_numerical_check(**arrays_of(shapes), index=index, mask=mask)
        assert found["max_error"] < 1e-6
        assert found["rel_error"] < 1e-6

    @pytest.mark.parametrize("index", ["source", "query"])
    def test_an_empty_row_passes_no_gradient(self, index):
        E = np.zeros((T, v))
        E[1] = 1
        found = bma_backward(E, **arrays_of(SHAPES["matrices"]), index=index, mask=MASK)
        assert all((gradient == 0).all() for gradient in found.values())

    def test_the_query_gains_a_path_through_the_gate(self):
        """With nothing but the gate in motion (one position, so constant weights) SPEC 4.5 is all there is."""
        arrays = arrays_of({"Q": (1, h), "K": (1, h), "V": (1, v), "W_g": (h, v)})
        E, gate = sample(1, v, seed=9), 1 / (1 + np.exp(-arrays["Q"] @ arrays["W_g"]))
        dL_dP = arrays["V"] * E * gate * (1 - gate)
        found = bma_backward(E, **arrays)
        assert_close(found["dL_dQ"], dL_dP @ arrays["W_g"].T)
        assert_close(found["dL_dW_g"], arrays["Q"].T @ dL_dP)
        assert_close(found["dL_dV"], gate * E)
        assert_close(found["dL_dK"], np.zeros((1, h)))


class TestPlainAttention:
    @pytest.mark.parametrize("name", ["matrices", "broadcast"])
    @pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
    @pytest.mark.parametrize("library", [TORCH, JAX], ids=lambda library: library.name)
    def test_a_backward_pass_is_that_of_autodiff(self, name, mask, library):
        Q, K, V = (library.array(arrays_of(SHAPES[name])[key]) for key in "QKV")
        E = library.array(sample(*SHAPES[name]["Q"][:-1], v, seed=9))
        S = attention_scores(Q, K)
        found = attention_backward(E, Q, K, V, attention_weights(S, mask), S)
        if library is TORCH:
            leaves = [array.requires_grad_() for array in (Q, K, V)]
            scaled_dot_product_attention(*leaves, mask).backward(E)
            judge = [array.grad for array in leaves]
        else:

            def judged(*leaves):
                return jax.vjp(lambda *qkv: scaled_dot_product_attention(*qkv, mask), *leaves)[1](E)

            judge = jax.jit(judged)(Q, K, V)
        for gradient, expected in zip(found, judge, strict=True):
            assert_close(gradient, expected, what="gradient")

    def test_each_step_is_its_matrix_calculus(self, library):
        Q, K, V, dL_dS, E = sample(B, T, h), sample(B, 3, h), sample(B, 3, v), sample(B, T, 3), sample(B, T, v)
        A = np.abs(dL_dS)
        cases = [
            (grad_scores_wrt_Q, (dL_dS, K, 0.5), np.einsum("bij,bjk->bik", dL_dS, K) / 2),
            (grad_scores_wrt_K, (dL_dS, Q, 0.5), np.einsum("bij,bik->bjk", dL_dS, Q) / 2),
            (grad_output_wrt_A, (E, V), np.einsum("bik,bjk->bij", E, V)),
            (grad_output_wrt_V, (E, A), np.einsum("bij,bik->bjk", A, E)),
            (grad_softmax, (dL_dS, A), A * (dL_dS - (A * dL_dS).sum(-1, keepdims=True))),
        ]
        for function, arguments, expected in cases:
            found = library.call(function, *arguments)
            assert isinstance(found, library.kind)
            assert_close(found, expected)

    def test_a_softmax_passes_no_gradient_along_constants_or_empty_rows(self):
        A = attention_weights(sample(T, T), MASK)
        assert_close(grad_softmax(np.ones((T, T)), A), np.zeros((T, T)))
        assert (grad_softmax(sample(T, T), A)[1] == 0).all()
        assert_close(grad_softmax(sample(T, T, seed=3), A).sum(-1), np.zeros(T))


class TestCheckers:
    @pytest.mark.parametrize("library", [NUMPY, JAX, TORCH], ids=lambda library: library.name)
    @pytest.mark.parametrize("gated", [None, "source", "query"])
    def test_the_hand_derived_gradients_are_verified(self, library, gated):
        arrays = {name: library.array(array) for name, array in arrays_of(SHAPES["matrices"]).items()}
        W_g = arrays.pop("W_g")
        tolerance = 1e-6 if library is NUMPY else 1e-9
        options = {} if gated is None else {"W_g": W_g, "index": gated, "mask": MASK}
        found = verify_gradients(*arrays.values(), tolerance, tolerance, **options)
        names = ["dL_dQ", "dL_dK", "dL_dV", *(["dL_dW_g"] if gated else []), "all_correct"]
        assert found == dict.fromkeys(names, True)

    def test_a_mask_reaches_the_plain_form(self):
        Q, K, V, _ = arrays_of(SHAPES["matrices"]).values()
        assert verify_gradients(*map(torch.from_numpy, (Q, K, V)), 1e-9, 1e-9, mask=MASK)["all_correct"]
        masked, plain = (gradient_numerical_check(Q, K, V, mask=mask)["numerical"]["dL_dV"] for mask in (MASK, None))
        assert abs(masked - plain).max() > 0.01

    @pytest.mark.parametrize("library", [NUMPY, JAX, TORCH], ids=lambda library: library.name)
    @pytest.mark.parametrize("entry", [0, 5])
    def test_the_checker_finds_one_wrong_entry(self, library, entry):
        good = library.array(sample(2, 3))
        wrong = sample(2, 3)
        wrong.flat[entry] += 1e-3
        judge = {"Q": good, "K": good}
        found = gradients_agree({"dL_dQ": good, "dL_dK": good}, judge)
        assert found == {"dL_dQ": True, "dL_dK": True, "all_correct": True}
        found = gradients_agree({"dL_dQ": good, "dL_dK": library.array(wrong)}, judge)
        assert found == {"dL_dQ": True, "dL_dK": False, "all_correct": False}
        found = gradients_agree({"dL_dQ": library.array(wrong), "dL_dK": good}, judge)
        assert found == {"dL_dQ": False, "dL_dK": True, "all_correct": False}

    def test_the_checker_never_takes_nan_for_agreement(self):
        nan = np.array([np.nan, 1.0])
        assert not gradients_agree({"dL_dQ": nan}, {"Q": np.ones(2)})["all_correct"]
        assert not gradients_agree({"dL_dQ": np.ones(2)}, {"Q": nan})["all_correct"]

    def test_a_wrong_judge_is_found(self, monkeypatch):
        import tidegate.tensors.gradients as module

        monkeypatch.setattr(module, "grad_softmax", lambda dL_dA, A: A * dL_dA)
        found = verify_gradients(*map(torch.from_numpy, list(arrays_of(SHAPES["matrices"]).values())[:3]))
        assert found == {"dL_dQ": False, "dL_dK": False, "dL_dV": True, "all_correct": False}
        assert gradient_numerical_check(*list(arrays_of(SHAPES["matrices"]).values())[:3])["max_error"] > 1e-3

    @pytest.mark.parametrize("library", [NUMPY, JAX, TORCH], ids=lambda library: library.name)
    def test_a_numerical_check_reports_both_sides_and_their_distance(self, library):
        Q, K, V = (library.array(array) for array in list(arrays_of(SHAPES["matrices"]).values())[:3])
        found = gradient_numerical_check(Q, K, V, 1e-4)
        assert list(found) == ["numerical", "analytic", "max_error", "rel_error"]
        assert list(found["numerical"]) == ["dL_dQ", "dL_dK", "dL_dV"]
        errors = [
            abs(to_numpy(found["numerical"][name] - found["analytic"][name])).max() for name in found["numerical"]
        ]
        largest = max(abs(to_numpy(slope)).max() for slope in found["numerical"].values())
        assert found["max_error"] == max(errors)
        assert found["rel_error"] == max(errors) / largest
        assert 0 < found["max_error"] < 1e-6

    def test_without_any_gradient_the_relative_error_is_the_absolute_one(self):
        Q, K = sample(T, h), sample(T, h, seed=1)
        found = gradient_numerical_check(Q, K, np.zeros((T, v)))
        assert found["rel_error"] == found["max_error"] == 0

    def test_the_flow_shows_every_gradient_and_its_norm(self, library):
        Q, K, V = sample(B, T, h), sample(B, T, h, seed=1), sample(B, T, v, seed=2)
        flow = library.call(gradient_flow_analysis, Q, K, V)
        S = Q @ np.moveaxis(K, 1, 2) / np.sqrt(h)
        A = np.exp(S) / np.exp(S).sum(-1, keepdims=True)
        dL_dA = A @ V @ np.moveaxis(V, 1, 2)
        dL_dS = A * (dL_dA - (A * dL_dA).sum(-1, keepdims=True))
        expected = {
            "S": S,
            "A": A,
            "O": A @ V,
            "dL_dO": A @ V,
            "dL_dA": dL_dA,
            "dL_dS": dL_dS,
            "dL_dQ": dL_dS @ K / np.sqrt(h),
            "dL_dK": np.moveaxis(dL_dS, 1, 2) @ Q / np.sqrt(h),
            "dL_dV": np.moveaxis(A, 1, 2) @ A @ V,
        }
        norms = flow.pop("grad_norms")
        assert set(flow) == set(expected)
        for name, array in expected.items():
            assert isinstance(flow[name], library.kind)
            assert_close(flow[name], array)
        assert set(norms) == {name for name in expected if name.startswith("dL_d")}
        for name, norm in norms.items():
            assert_close(norm, np.sqrt((expected[name] ** 2).sum()))


@pytest.mark.parametrize(
    ("shape", "to"),
    [((2, 3, 4), (2, 3, 4)), ((2, 3, 4), (3, 4)), ((2, 3, 4), (1, 4)), ((2, 3, 4), (2, 1, 4)), ((5, 1, 4), (1, 1))],
)
def test_summing_is_the_transpose_of_broadcasting(library, shape, to):
    x, y = sample(*shape), sample(*to, seed=1)
    summed = library.call(lambda x: sum_to_shape(x, to), x)
    assert isinstance(summed, library.kind)
    assert summed.shape == to
    assert_close(np.sum(to_numpy(summed) * y), np.sum(x * np.broadcast_to(y, shape)))
