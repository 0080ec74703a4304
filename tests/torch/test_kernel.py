import pytest
import torch
from closeness import assert_close
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap
from torch_layers import sample

from tidegate.tensors.attention import scaled_dot_product_attention
from tidegate.torch import plain_kernel
from tidegate.torch.kernel import attend, attend_packed, inside_transform, packed_kernel_serves
from tidegate.torch.masks import AttentionMask, combine_masks


def heads(*, T=5, S=5, H=4, G=4, requires_grad=False):
    q = sample(2, H, T, 6, requires_grad=requires_grad)
    return q, *(sample(2, G, S, 6, seed=seed, requires_grad=requires_grad) for seed in (1, 2))


@pytest.mark.parametrize("G", [4, 2, 1])
@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 63), (63, 63), (5, 100)])
@pytest.mark.parametrize("kind", ["all", "bool", "additive"])
def test_attention_is_that_of_the_tensors(G, T, S, kind):
    q, k, v = heads(T=T, S=S, G=G)
    mask = None if kind == "all" else sample(2, 1, T, S, seed=3) > 0
    repeated = (tensor.repeat_interleave(4 // G, dim=1) for tensor in (k, v))
    expected = scaled_dot_product_attention(q, *repeated, mask)
    given = torch.where(mask, 0.0, float("-inf")).double() if kind == "additive" else mask
    assert_close(attend(q, k, v, mask=given), expected)
    with plain_kernel():
        assert_close(attend(q, k, v, mask=given), expected)


def test_the_fused_kernel_has_no_second_backward_and_the_plain_one_has():
    q, k, v = heads(requires_grad=True)

    def twice():
        (first,) = torch.autograd.grad(attend(q, k, v).square().sum(), q, create_graph=True)
        return torch.autograd.grad(first.square().sum(), k)[0]

    with pytest.raises(RuntimeError, match="not implemented"):
        twice()
    with plain_kernel():
        assert (twice() != 0).all()


def test_forward_mode_finds_the_plain_kernel_by_itself():
    q, k, v = heads()
    u = sample(2, 4, 5, 6, seed=9)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(attend(forward_ad.make_dual(q, u), k, v)).tangent
        by_value = forward_ad.unpack_dual(attend(q, k, forward_ad.make_dual(v, u))).tangent
    step = 1e-6
    assert_close(
        tangent, (attend(q + step * u, k, v) - attend(q - step * u, k, v)) / (2 * step), what="finite difference"
    )
    assert_close(by_value, attend(q, k, u))


def test_a_transform_is_noticed_inside_and_only_there():
    seen = []

    def noting(x):
        seen.append(inside_transform(x))
        return x.sum()

    x = torch.ones(3)
    noting(x)
    for transformed in (grad(noting), vmap(noting), lambda x: jvp(noting, (x,), (x,))):
        transformed(x)
    noting(x)
    with forward_ad.dual_level():
        noting(x)
        noting(forward_ad.make_dual(x, x))
    assert seen == [False, True, True, True, False, False, True]


def test_dropout_drops_weights_and_keeps_their_mean():
    torch.manual_seed(0)
    q, k = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 10_000, 2)
    v = torch.ones(1, 1, 10_000, 1).expand(-1, -1, -1, 2)
    mean = attend(q, k, v, dropout=0.5)
    # Each of 10,000 weights is 0 or 2e-4: the sum has the standard deviation 0.01.
    assert 0 < (mean - 1).abs().max() < 0.06


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_on_a_gpu_a_row_that_sees_nothing_gives_zero_with_gradient_zero(dtype, kind):
    q, k, v = (tensor.to("cuda", dtype).requires_grad_() for tensor in heads())
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool, device="cuda")
    mask[0, :, 2] = False
    given = (
        mask
        if kind == "bool"
        else torch.zeros(mask.shape, dtype=dtype, device="cuda").masked_fill(~mask, float("-inf"))
    )
    o = attend(q, k, v, mask=given)
    assert (o[0, :, 2] == 0).all()
    assert o.isfinite().all()
    for gradient in torch.autograd.grad(o[0, :, 2].sum(), (q, k, v), retain_graph=True):
        assert (gradient == 0).all()
    for gradient in torch.autograd.grad(o.square().sum(), (q, k, v)):
        assert gradient.isfinite().all()


def test_packed_documents_have_a_kernel_of_their_own_only_where_a_gpu_has_it():
    q, boundaries = torch.zeros(1, 4, 5, 6, dtype=torch.bfloat16), torch.tensor([0, 2, 5])
    assert not packed_kernel_serves(q, boundaries)
    assert packed_kernel_serves(q.to("meta"), boundaries) is False


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("G", [4, 2])
def test_packed_documents_on_a_gpu_are_those_of_a_mask(G, causal, window):
    q, k, v = (torch.randn(1, heads, 7, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, G, G))
    boundaries = torch.tensor([0, 3, 7], device="cuda")
    assert packed_kernel_serves(q, boundaries)
    packed = attend_packed(q, k, v, boundaries, causal=causal, window=window, scale=0.125)
    allowed = AttentionMask(causal, window, documents=boundaries)
    mask, _ = combine_masks(allowed, num_queries=7, num_keys=7, device=q.device)
    torch.testing.assert_close(packed, attend(q, k, v, mask=mask, scale=0.125), atol=2e-2, rtol=2e-2)
