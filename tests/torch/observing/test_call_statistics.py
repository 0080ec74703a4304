from dataclasses import fields

import torch
from covers import axis, over
from observed import qkv

from tidegate.torch.observing import call_statistics
from tidegate.torch.observing.statistics import AttentionCall, AttentionStatistics, attention_statistics

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
    num_rows=axis([0, 1, 2, 3], 1, 2),
)
def test_parts_of_any_size_give_the_whole(num_groups, mask, keys, num_rows, monkeypatch):
    monkeypatch.setattr(call_statistics, "_PART", num_rows * 4 * 7 * 8)
    q, k, v = qkv(B=3, G=num_groups)
    options, causal = {"keys": KEYS[keys], "heat": True}, mask == "none"
    found = call_statistics.statistics_in_parts(AttentionCall(q, k, v, MASKS[mask], causal, None), **options)
    expected = attention_statistics(q, k, v, mask=MASKS[mask], causal=causal, **options)
    for field in fields(AttentionStatistics):
        torch.testing.assert_close(getattr(found, field.name), getattr(expected, field.name), atol=1e-12, rtol=1e-12)
