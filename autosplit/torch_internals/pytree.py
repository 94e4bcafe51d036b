"""Pytrees with names for their leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils._pytree import (
    GetAttrKey,
    MappingKey,
    SequenceKey,
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

__all__ = ["TreeSpec", "flatten_named", "register_node", "tree_flatten", "tree_unflatten"]


def flatten_named(root: str, tree: Any) -> list[tuple[str, Any]]:
    """Leaves of a pytree with the Python path that reaches each: ``output['logits'][0]``. In
    classes that were registered without keys, numbers stand for them.
    """

    def is_inside(node: Any) -> bool:
        return node is not tree

    try:
        pairs = tree_flatten_with_path(tree, is_leaf=is_inside)[0]
        children = [("".join(map(_key, path)), child) for path, child in pairs]
    except ValueError:
        numbered = enumerate(tree_flatten(tree, is_leaf=is_inside)[0])
        children = [(f"[{at}]", child) for at, child in numbered]
    if any(child is tree for _, child in children):
        return [(root, tree)]
    return [leaf for key, child in children for leaf in flatten_named(root + key, child)]


def register_node(
    kind: type,
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Any, Any], Any],
    names: Callable[[Any], Iterable[str]],
) -> None:
    """Make a class a pytree node; ``names`` gives the attribute behind each child."""

    def with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, context = flatten(value)
        keys = [GetAttrKey(name) for name in names(context)]
        return list(zip(keys, children, strict=True)), context

    register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=with_keys,
    )


def _key(key: Any) -> str:
    if isinstance(key, MappingKey):
        return f"[{key.key!r}]"
    if isinstance(key, SequenceKey):
        return f"[{key.idx}]"
    if isinstance(key, GetAttrKey):
        return f".{key.name}"
    return f"[{key}]"
