"""Pytrees with names for their leaves, and objects that hold tensors as pytrees.

torch's pytrees know lists, tuples, dicts and registered classes. A forward may return other
objects too, a plain dataclass or a cache of keys and values. Such an object is taken apart
into its attributes: those with tensors inside become children, the rest is kept as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
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


_PLAIN = (torch.Tensor, int, float, complex, bool, str, bytes, type(None), torch.SymInt)


@dataclasses.dataclass(frozen=True)
class Holder:
    """An object on its way through a pytree; flattening it gives its tensors, and putting the
    tree together again gives an object of the same class.
    """

    value: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Skeleton:
    """Class and attributes of an object without its tensors. Equal where class and attributes
    are.
    """

    kind: type
    children: tuple[str, ...]
    rest: dict[str, Any]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Skeleton) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[type, tuple[str, ...], tuple[str, ...]]:
        return self.kind, self.children, tuple(self.rest)


def hold(tree: Any) -> Any:
    """The tree with every object that holds tensors, and is no pytree node, in a Holder."""
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([_hold_leaf(leaf) for leaf in leaves], spec)


def _hold_leaf(leaf: Any) -> Any:
    return Holder(leaf) if _holds_tensors(leaf, set()) else leaf


def _holds_tensors(leaf: Any, seen: set[int]) -> bool:
    if isinstance(leaf, (*_PLAIN, type, torch.nn.Module)) or not hasattr(leaf, "__dict__"):
        return False
    if id(leaf) in seen:
        return False
    seen.add(id(leaf))
    inside, _ = tree_flatten(dict(vars(leaf)))
    return any(torch.is_tensor(item) or _holds_tensors(item, seen) for item in inside)


def _flatten(holder: Holder) -> tuple[list[Any], Skeleton]:
    attributes = {name: hold(value) for name, value in vars(holder.value).items()}
    children = tuple(name for name, value in attributes.items() if _has_tensor(value))
    rest = {name: value for name, value in attributes.items() if name not in children}
    skeleton = Skeleton(type(holder.value), children, rest)
    return [attributes[name] for name in children], skeleton


def _has_tensor(tree: Any) -> bool:
    return any(map(torch.is_tensor, tree_flatten(tree)[0]))


def _unflatten(children: Any, skeleton: Skeleton) -> Any:
    value: Any = object.__new__(skeleton.kind)
    value.__dict__.update(skeleton.rest)
    value.__dict__.update(zip(skeleton.children, children, strict=True))
    return value


register_node(Holder, _flatten, _unflatten, lambda skeleton: skeleton.children)
