"""Pytrees with names for their leaves, and objects that hold tensors as pytrees.

torch's pytrees support lists, tuples, dicts and registered classes. A forward may also accept and
return other objects, such as a dataclass, a ``BlockMask`` or a cache of keys and values. The
functions of this file flatten such objects by attribute: attributes with tensors become children,
and the others are kept in the structure. The closure of a ``BlockMask``'s function becomes children
too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._pytree import (
    GetAttrKey,
    TreeSpec,
    keystr,
    register_pytree_node,
    tree_flatten_with_path,
    tree_map,
    tree_unflatten,
)

from autosplit.errors import CaptureError

from . import TORCH
from .patches import patched

__all__ = ["TreeSpec", "class_of", "flatten_named", "tree_flatten", "tree_map", "tree_unflatten"]


def tree_flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Flatten a pytree as torch's ``tree_flatten`` does, and also flatten objects that hold
    tensors.
    """
    leaves, spec = _pytree.tree_flatten(tree)
    wrapped = [*map(_hold_leaf, leaves)]
    if all(map(operator.is_, wrapped, leaves)):
        return leaves, spec
    return _pytree.tree_flatten(tree_unflatten(wrapped, spec))


def class_of(spec: Any) -> Any:
    """The class of a pytree's root node, from its spec. The root must not be a leaf."""
    # All named tuples have one type, a function.
    return spec.type if isinstance(spec.type, type) else spec.context


def is_flat(spec: Any) -> bool:
    """Whether a pytree is one leaf, or a tuple or list of leaves."""
    if spec.is_leaf():
        return True
    is_row = issubclass(class_of(spec), tuple | list)
    return is_row and all(child.is_leaf() for child in spec.children())


def flatten_named(root: str, tree: Any) -> list[tuple[str, Any]]:
    """Leaves of a pytree, each with its path in Python: ``output['logits'][0]``.

    If a class was registered without keys, its children are numbered.
    """

    def is_inside(node: Any) -> bool:
        return node is not tree

    try:
        pairs = tree_flatten_with_path(tree, is_leaf=is_inside)[0]
        children = [(keystr(path), child) for path, child in pairs]
    except ValueError:
        numbered = enumerate(_pytree.tree_flatten(tree, is_leaf=is_inside)[0])
        children = [(f"[{at}]", child) for at, child in numbered]
    if any(child is tree for _, child in children):
        wrapped = _hold_leaf(tree)
        return [(root, tree)] if wrapped is tree else flatten_named(root, wrapped)
    return [leaf for key, child in children for leaf in flatten_named(root + key, child)]


_VALUES = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
_PLAIN = (torch.Tensor, *_VALUES, torch.SymInt, type, torch.nn.Module)
# Modules of torch whose objects are not data, even if they refer to tensors.
_MACHINERY = ("torch.fx.", "torch.distributed.", "torch._")


@dataclasses.dataclass(frozen=True)
class Holder:
    """Wrapper that makes an object a pytree node, whose children are its tensors.

    Unflattening creates an object of the same class.

    Attributes:
        value: the object.
        within: ids of the objects that lead to it. An object that leads to itself is refused,
            because it is no tree.
    """

    value: Any
    within: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, eq=False)
class Skeleton:
    """Class and attributes of an object without its tensors.

    Two skeletons are equal if their classes, names of attributes, and attributes that are numbers
    or text are equal.

    Attributes:
        kind: the class.
        children: names of the attributes with tensors.
        rest: the other attributes.
        context: for a class with its own flatten method, the context that the method returned, in
            place of ``rest``.
    """

    kind: type
    children: tuple[str, ...]
    rest: dict[str, Any]
    context: Any = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Skeleton) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        values = [repr(value) if isinstance(value, _VALUES) else "" for value in self.rest.values()]
        return self.kind, self.children, *self.rest, *values, self.context


def hold(tree: Any, within: frozenset[int] = frozenset()) -> Any:
    """Wrap leaves of a pytree in a Holder: those that are objects with tensors.

    Args:
        tree: a pytree.
        within: ids of the objects whose attribute the tree is.

    Raises:
        CaptureError: an object of the tree refers to itself.
    """
    return tree_map(partial(_hold_leaf, within=within), tree)


def _hold_leaf(leaf: Any, within: frozenset[int] = frozenset()) -> Any:
    if isinstance(leaf, Holder) or not _holds_tensors(leaf, set()):
        return leaf
    if id(leaf) in within:
        name = type(leaf).__qualname__
        raise CaptureError(
            f"an object of class {name} holds tensors and refers to itself, so that it is no tree "
            "of tensors. Pass its tensors, or an object without that reference"
        )
    return Holder(leaf, within | {id(leaf)})


def _holds_tensors(leaf: Any, seen: set[int]) -> bool:
    if isinstance(leaf, _PLAIN) or not hasattr(leaf, "__dict__"):
        return False
    kind = type(leaf)
    if id(leaf) in seen or kind.__module__.startswith(_MACHINERY):
        return False
    if _is_block_mask(kind) and TORCH < (2, 13):  # its function is compared by its closure
        return False
    seen.add(id(leaf))
    inside, _ = _pytree.tree_flatten(dict(vars(leaf)))
    return any(torch.is_tensor(item) or _holds_tensors(item, seen) for item in inside)


def _is_block_mask(kind: type) -> bool:
    """Whether a class is torch's ``BlockMask``, which can flatten itself but is not registered.

    The class is compared by name, because its import is slow.
    """
    return (kind.__module__, kind.__name__) == ("torch.nn.attention.flex_attention", "BlockMask")


def _flatten(holder: Holder) -> tuple[list[Any], Skeleton]:
    kind = type(holder.value)
    if _is_block_mask(kind):
        # While torch compiles, BlockMask does not flatten the closure of its function.
        compiling = torch.compiler.is_compiling() and patched(
            torch.compiler, "is_compiling", lambda: False
        )
        with compiling or contextlib.nullcontext():
            children, context = holder.value._flatten()
        names = [n for n in kind._TENSOR_ATTRS if getattr(holder.value, n) is not None]
        names += [f"closure_{at}" for at in range(len(children) - len(names))]
        return [hold(c, holder.within) for c in children], Skeleton(
            kind, tuple(names[: len(children)]), {}, context
        )
    attributes = {name: hold(value, holder.within) for name, value in vars(holder.value).items()}
    leaves = {name: tree_flatten(value)[0] for name, value in attributes.items()}
    children = tuple(name for name in attributes if any(map(torch.is_tensor, leaves[name])))
    rest = {name: value for name, value in attributes.items() if name not in children}
    skeleton = Skeleton(type(holder.value), children, rest)
    return [attributes[name] for name in children], skeleton


def _unflatten(children: Any, skeleton: Skeleton) -> Any:
    if skeleton.context is not None:
        return skeleton.kind._unflatten(tuple(children), skeleton.context)  # type: ignore[attr-defined]
    value: Any = object.__new__(skeleton.kind)
    value.__dict__.update(skeleton.rest)
    value.__dict__.update(zip(skeleton.children, children, strict=True))
    return value


def _flatten_with_keys(holder: Holder) -> tuple[list[tuple[Any, Any]], Skeleton]:
    children, skeleton = _flatten(holder)
    return list(zip(map(GetAttrKey, skeleton.children), children, strict=True)), skeleton


register_pytree_node(
    Holder,
    _flatten,
    _unflatten,
    serialized_type_name=f"{Holder.__module__}.{Holder.__qualname__}",
    flatten_with_keys_fn=_flatten_with_keys,
)
