import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tidegate.tensors.namespace import namespace_of, unify


def dtypes_after_unify(library, *own, **constants):
    """Dtypes by name that `unify` gives to the library's arrays and NumPy constants, also while tracing."""
    seen = {}

    def function(*arrays):
        named = {f"own{i}": array for i, array in enumerate(arrays)} | constants
        xp, *unified = unify(**named)
        assert all(array is None or namespace_of(array) is xp for array in unified)
        for name, array in zip(named, unified, strict=True):
            seen[name] = None if array is None else str(array.dtype).removeprefix("torch.")
        return arrays[0]

    library.call(function, *own)
    return seen


def test_constants_of_numpy_follow_the_callers_kind_and_dtype(library):
    constants = {"real": np.ones(3), "mask": np.array([True]), "count": np.arange(2), "none": None}
    seen = dtypes_after_unify(library, np.ones(2, np.float32), **constants)
    wide = "float64" if library.name == "numpy" else "float32"
    assert seen == {"own0": wide, "real": wide, "mask": "bool", "count": "int64", "none": None}


def test_floating_dtypes_of_one_kind_are_promoted_and_others_kept(library):
    seen = dtypes_after_unify(library, np.ones(2, np.float32), np.ones(2), np.arange(2), np.array([True]))
    assert list(seen.values()) == ["float64", "float64", "int64", "bool"]
    seen = dtypes_after_unify(library, np.arange(2), c=np.array([True]))
    assert seen == {"own0": "int64", "c": "bool"}


def test_numpy_scalars_count_as_constants_and_go_to_the_callers_device():
    _, x, scalar, constant = unify(x=torch.ones(2, device="meta"), scalar=np.float64(2.0), constant=np.ones(2))
    assert isinstance(scalar, torch.Tensor)
    assert (x.dtype, scalar.dtype) == (torch.float32, torch.float32)
    assert scalar.device == constant.device == x.device


def test_other_values_and_two_libraries_are_rejected_by_name():
    for value in ([1.0, 2.0], 3.0, "text"):
        with pytest.raises(TypeError, match=r"^Q must be an array .*numpy\.asarray\(Q\)"):
            unify(K=np.ones(2), Q=value)
    with pytest.raises(TypeError, match=r"Q is torch, K is jax.*numpy\.asarray"):
        unify(Q=torch.ones(2), K=jnp.ones(2), V=np.ones(2))
