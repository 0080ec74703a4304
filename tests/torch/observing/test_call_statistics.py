from dataclasses import fields

import torch
from covers import axis, over
from observed import qkv

from tidegate.torch.observing import call_statistics as module
from tidegate.torch.observing.call_statistics import statistics_in_parts
from tidegate.torch.observing.statistics import (
    AttentionCall,
    AttentionStatistics,
    attention_statistics,
    statistics_of_call,
)

RNG = torch.Generator().manual_seed(0)
MASKS = {
    "none": None,
    "by row": torch.rand(3, 1, 1, 7, generator=RNG) < 0.7,
    "by head": torch.rand(1, 4, 7, 7, generator=RNG) < 0.7,
    "by row and head": torch.randn(3, 4, 7, 7, generator=RNG, dtype=torch.float64),
}
KEYS = {"positions": (0, 2), "one set": torch.arange(7) < 3, "by row": torch.rand(3, 7, generator=RNG) < 0.5}


@over(
    num_groups=axis([1, 2, 4], 2),
    mask=axis(list(MASKS), "none", "by row and head"),
    keys=axis(list(KEYS), "by row"),
    size=axis([1, 7 * 8 * 2, 7 * 8 * 4, 7 * 8 * 4 * 2, 10**9], 1, 7 * 8 * 2),
)
def test_parts_of_any_size_give_the_whole(num_groups, mask, keys, size, monkeypatch):
    calls = []

    def counted(call, **options):
        calls.append(call.query.numel())
        return statistics_of_call(call, **options)

    monkeypatch.setattr(module, "_PART", size)
    monkeypatch.setattr(module, "statistics_of_call", counted)
    q, k, v = qkv(B=3, G=num_groups)
    options = {"keys": KEYS[keys], "heat": True}
    causal = mask == "none"
    actual = statistics_in_parts(AttentionCall(q, k, v, MASKS[mask], causal, None), **options)
    expected = attention_statistics(q, k, v, mask=MASKS[mask], causal=causal, **options)
    assert sum(calls) == q.numel()
    assert max(calls) <= max(size, 7 * 8 * 4 // num_groups)
    for field in fields(AttentionStatistics):
        torch.testing.assert_close(getattr(actual, field.name), getattr(expected, field.name), atol=1e-12, rtol=1e-12)
