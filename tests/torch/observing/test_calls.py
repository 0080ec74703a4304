import threading
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from observed import qkv
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tidegate.torch.observing.calls import AttentionCalls

attend = F.scaled_dot_product_attention
BIAS = torch.linspace(-1, 1, 49).view(7, 7)

MODES = {
    "gradients": nullcontext,
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
    "plain kernel": partial(sdpa_kernel, SDPBackend.MATH),
}
CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": BIAS > -0.5},
    "additive mask": {"attn_mask": BIAS},
    "additive mask that learns": {"attn_mask": BIAS.clone().requires_grad_()},
    "dropout": {"dropout_p": 0.5},
    "grouped heads": {"enable_gqa": True},
    "scale": {"scale": 0.3},
}


@contextmanager
def watching():
    """Yield a list that receives every reported call."""
    seen = []
    with AttentionCalls(seen.append, seen.append):
        yield seen


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode", MODES)
def test_a_call_is_reported_once_with_its_arguments_and_does_not_change(mode, call, learns):
    grouped = call == "grouped heads"
    q, k, v = (x.requires_grad_(learns) for x in qkv(G=2 if grouped else 4, dtype=torch.float32))
    options = CALLS[call]
    with MODES[mode]():
        torch.manual_seed(0)
        expected = attend(q, k, v, **options)
        torch.manual_seed(0)
        with watching() as seen:
            actual = attend(q, k, v, **options)
    assert torch.equal(actual, expected)
    assert actual.requires_grad == expected.requires_grad
    (found,) = seen
    tolerance = {"atol": 0.03, "rtol": 0.03} if mode == "autocast" else {"atol": 0, "rtol": 0}
    for mine, theirs in zip(found[:3], (q, k, v), strict=True):
        torch.testing.assert_close(mine.float(), theirs.detach(), **tolerance)
        assert not mine.requires_grad
    mask = options.get("attn_mask")
    assert (found.mask is None) == (mask is None)
    if mask is not None:
        torch.testing.assert_close(found.mask.float(), mask.detach().expand(1, 1, 7, 7).float(), **tolerance)
    assert found.causal is options.get("is_causal", False)
    assert found.scale == options.get("scale")


def test_a_fused_kernel_called_by_name_is_reported():
    q, k, v = qkv(dtype=torch.float32)
    with watching() as seen:
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query=q, key=k, value=v, is_causal=True, scale=0.5)
    (found,) = seen
    assert found.causal
    assert found.scale == 0.5
    assert torch.equal(found.key, k)


@pytest.mark.parametrize(
    ("lead", "mask_shape", "expected", "expected_mask"),
    [
        ((), (5, 5), (1, 1, 5, 8), (1, 1, 5, 5)),
        ((3,), (3, 5, 5), (3, 1, 5, 8), (3, 1, 5, 5)),
        ((3,), (5, 5), (3, 1, 5, 8), (1, 1, 5, 5)),
        ((3, 2), (2, 1, 5), (3, 2, 5, 8), (1, 2, 1, 5)),
        ((4, 3, 2), (4, 1, 1, 5, 5), (12, 2, 5, 8), (12, 1, 5, 5)),
        ((4, 3, 2), (2, 5, 5), (12, 2, 5, 8), (1, 2, 5, 5)),
    ],
)
def test_tensors_of_any_rank_get_four_axes(lead, mask_shape, expected, expected_mask):
    x = torch.randn(*lead, 5, 8, generator=torch.Generator().manual_seed(0))
    with watching() as seen:
        attend(x, x, x, attn_mask=torch.ones(mask_shape, dtype=torch.bool))
    (found,) = seen
    assert found.query.shape == found.key.shape == found.value.shape == expected
    assert found.mask.shape == expected_mask


def test_calls_made_by_a_watcher_are_not_reported():
    q, k, v = qkv(dtype=torch.float32)
    outer, inner = [], []

    def look(call):
        inner.append(call)
        attend(call.query, call.key, call.value)

    with AttentionCalls(outer.append, outer.append), AttentionCalls(look, inner.append):
        attend(q, k, v)
        with torch.inference_mode():
            attend(q, k, v)
    assert len(outer) == len(inner) == 2


def test_the_kernel_is_removed_after_an_error():
    q, k, v = qkv(dtype=torch.float32)
    with pytest.raises(RuntimeError), watching() as seen:
        attend(q, k[..., :3], v)
    attend(q, k, v)
    assert seen == []
    key = torch._C.DispatchKey.AutogradCPU
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::scaled_dot_product_attention", key)


def test_transforms_the_meta_device_other_threads_and_later_calls_are_ignored():
    q, k, v = qkv(dtype=torch.float32)
    with watching() as seen:
        found = torch.func.grad(lambda x: attend(x, k, v, dropout_p=0.0).sum())(q)
        attend(*(x.to("meta") for x in (q, k, v)))
        thread = threading.Thread(target=attend, args=(q, k, v))
        thread.start()
        thread.join()
    assert torch.equal(found, torch.func.grad(lambda x: attend(x, k, v).sum())(q))
    attend(q, k, v)
    assert seen == []
