"""Nested state (an optimiser's, a random generator's) as plain JSON and named tensors, so that no file needs pickle."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

Plain = Any
"""What JSON can say."""


def split_tensors(value: Any, name: str = "") -> tuple[Plain, dict[str, Tensor]]:
    """Take the tensors out of nested dictionaries, lists and tuples.

    Returns:
        The rest as JSON values, each tensor replaced by its name; and the tensors by name, on the CPU and contiguous.

    Raises:
        TypeError: something else is in it.
    """
    tensors: dict[str, Tensor] = {}

    def walk(item: Any, path: str) -> Plain:
        if isinstance(item, Tensor):
            tensors[path] = item.detach().cpu().contiguous()
            return {"tensor": path}
        if isinstance(item, Mapping):
            pairs = []
            for key, inner in item.items():
                if not isinstance(key, str | int):
                    raise TypeError(f"a key of the state is a {type(key).__name__}: {key!r}")
                pairs.append([key, walk(inner, f"{path}.{key}" if path else str(key))])
            return {"map": pairs}
        if isinstance(item, list | tuple):
            kind = "list" if isinstance(item, list) else "tuple"
            return {kind: [walk(inner, f"{path}.{place}") for place, inner in enumerate(item)]}
        if item is None or isinstance(item, bool | int | float | str):
            return item
        raise TypeError(f"the state has a {type(item).__name__} at {path!r}, which JSON cannot say")

    return walk(value, name), tensors


def join_tensors(plain: Plain, tensors: Mapping[str, Tensor]) -> Any:
    """The value that ``split_tensors`` took apart.

    Raises:
        KeyError, TypeError, ValueError: ``plain`` is something else, or names a tensor that is not there.
    """
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "map":
        return {key: join_tensors(inner, tensors) for key, inner in content}
    if kind not in ("list", "tuple"):
        raise ValueError(f"{kind!r} is no kind of value")
    items = [join_tensors(inner, tensors) for inner in content]
    return items if kind == "list" else tuple(items)
