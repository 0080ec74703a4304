import re
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate import HeadShape
from tidegate.sizes import require_size


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
    with pytest.raises(
        ValueError, match=f"^{re.escape(f'{name} must be a whole number of at least 1; got {size!r}.')}$"
    ):
        HeadShape(**sizes)


def test_one_of_everything_is_a_layer():
    assert HeadShape.of(d_model=1, num_heads=1).group_size == 1


def test_key_heads_that_do_not_divide_the_heads_are_refused():
    with pytest.raises(ValueError, match=r"^num_kv_heads must divide num_heads; got num_kv_heads=3, num_heads=4\.$"):
        HeadShape.of(d_model=8, num_heads=4, num_kv_heads=3)


@pytest.mark.parametrize(("d_model", "num_heads"), [(10, 4), (9, 2)])
def test_heads_that_do_not_split_the_width_ask_for_a_head_width(d_model, num_heads):
    message = (
        f"d_model must be a multiple of num_heads when head_dim is not given; got d_model={d_model}, "
        f"num_heads={num_heads}. Give head_dim, or change one of them."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        HeadShape.of(d_model=d_model, num_heads=num_heads)
    assert HeadShape.of(d_model=d_model, num_heads=num_heads, head_dim=3).head_dim == 3


@pytest.mark.parametrize("name", ["d_model", "num_heads"])
@pytest.mark.parametrize("size", [0, -2, "64", None])
def test_a_size_is_refused_by_name_before_defaults_are_filled_in(name, size):
    message = f"{name} must be a whole number of at least 1; got {size!r}."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        HeadShape.of(**{"d_model": 8, "num_heads": 2, name: size})


def test_sizes_are_frozen_and_hashable():
    shape = HeadShape.of(d_model=8, num_heads=2)
    with pytest.raises(FrozenInstanceError):
        shape.d_model = 4
    assert len({shape, HeadShape.of(d_model=8, num_heads=2, num_kv_heads=2, head_dim=4)}) == 1


@pytest.mark.parametrize("size", [0, 1.5, False])
def test_none_is_admitted_only_where_the_message_says_so(size):
    require_size("reach", None, otherwise="or None for all keys")
    message = f"reach must be a whole number of at least 1, or None for all keys; got {size!r}."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        require_size("reach", size, otherwise="or None for all keys")
    with pytest.raises(ValueError, match=r"^reach must be a whole number of at least 1; got None\.$"):
        require_size("reach", None)


def test_a_size_is_refused_by_an_error_of_the_callers():
    class MyError(ValueError):
        pass

    with pytest.raises(MyError, match="reach must be"):
        require_size("reach", 0, error=MyError)
