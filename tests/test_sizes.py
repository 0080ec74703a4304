import pytest
from errors import rejects
from hypothesis import given
from hypothesis import strategies as st

from tidegate import HeadShape


@given(groups=st.integers(1, 8), group_size=st.integers(1, 8), h=st.integers(1, 64))
def test_defaults_fill_in_as_many_key_heads_as_heads_and_heads_that_split_the_width(groups, group_size, h):
    H = groups * group_size
    assert HeadShape.of(d_model=H * h, num_heads=H) == HeadShape(d_model=H * h, num_heads=H, num_kv_heads=H, head_dim=h)
    grouped = HeadShape.of(d_model=7, num_heads=H, num_kv_heads=groups, head_dim=h)
    assert grouped == HeadShape(d_model=7, num_heads=H, num_kv_heads=groups, head_dim=h)
    assert grouped.group_size == group_size


@pytest.mark.parametrize("name", ["d_model", "num_heads", "num_kv_heads", "head_dim"])
@pytest.mark.parametrize("size", [0, -1, 2.0, "2", True, None])
def test_a_size_that_is_no_count_is_refused_by_name(name, size):
    sizes = {"d_model": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, name: size}
    with rejects(name):
        HeadShape(**sizes)
    if name in ("d_model", "num_heads"):
        # Before defaults are derived from it.
        with rejects(name):
            HeadShape.of(**{"d_model": 8, "num_heads": 2, name: size})


def test_key_heads_that_do_not_divide_the_heads_are_refused():
    with rejects("num_kv_heads"):
        HeadShape.of(d_model=8, num_heads=4, num_kv_heads=3)


@pytest.mark.parametrize(("d_model", "num_heads"), [(10, 4), (9, 2)])
def test_heads_that_do_not_split_the_width_ask_for_a_head_width(d_model, num_heads):
    with rejects("d_model", hint="Set head_dim"):
        HeadShape.of(d_model=d_model, num_heads=num_heads)
    assert HeadShape.of(d_model=d_model, num_heads=num_heads, head_dim=3).head_dim == 3
