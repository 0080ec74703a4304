"""The array library of the caller, as `tidegate.tensors` finds it."""

from tidegate.tensors._namespace import (  # pyright: ignore[reportPrivateUsage]
    Array,
    Namespace,
    namespace_of,
)

__all__ = ["Array", "Namespace", "namespace_of"]
