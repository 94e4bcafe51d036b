"""Text of what a guard of Dynamo found: equal in another process, the guard would be the same."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from autosplit.capture.cache.argument_text import NoFingerprintError

from .object_text import PLAIN, ObjectTexts

_EXACT = frozenset(
    {
        "BOOL_MATCH",
        "BUILTIN_MATCH",
        "CLASS_MATCH",
        "CLOSURE_MATCH",
        "CONSTANT_MATCH",
        "EQUALS_MATCH",
        "FUNCTION_MATCH",
        "ID_MATCH",
        "MODULE_MATCH",
        "NONE_MATCH",
    }
)
"""Kinds that look at a value itself."""
_OUTLINE = frozenset(
    {
        "DICT_KEYS_MATCH",
        "EMPTY_NN_MODULE_HOOKS_DICT",
        "MAPPING_KEYS_CHECK",
        "NOT_NONE_MATCH",
        "SEQUENCE_LENGTH",
        "TYPE_MATCH",
    }
)
"""Kinds that look at a class, a length, or keys."""
_OF_PROCESS = frozenset(
    {
        "AUTOGRAD_SAVED_TENSORS_HOOKS",
        "DEFAULT_DEVICE",
        "DETERMINISTIC_ALGORITHMS",
        "DUAL_LEVEL",
        "GLOBAL_STATE",
        "GRAD_MODE",
        "SHAPE_ENV",
        "TORCH_FUNCTION_STATE",
    }
)
"""Kinds that look at settings of the process, which are in the call's key."""


def reads_process(kind: str) -> bool:
    """Whether a kind of guard looks at no value."""
    return kind in _OF_PROCESS


def guard_text(kind: str, options: dict[str, Any], value: Any, texts: ObjectTexts) -> str:
    """Text of all that a guard of this kind takes from a value.

    Args:
        kind: of the guard.
        options: of the guard; a source among them by the value that is found there.
        value: that is found at the guard's source.
        texts: of all guards of one capture.

    Raises:
        NoFingerprintError: there is none.
    """
    if kind in _EXACT:
        return f"{kind} {texts.exact(value)}"
    if kind in _OUTLINE:
        return f"{kind} {texts.outline(value)}"
    if kind == "TENSOR_MATCH" and isinstance(value, Tensor):
        return f"{kind} {texts.tensor(value)}"
    if kind == "DUPLICATE_INPUT":
        return f"{kind} {options['source_b'] is value}"
    if kind == "HASATTR":
        return f"{kind} {_shape(value, texts)} {options['attr']} {hasattr(value, options['attr'])}"
    if kind == "NOT_PRESENT_IN_GENERIC_DICT":
        return f"{kind} {_shape(value, texts)} {options['attr']} {options['attr'] in vars(value)}"
    if kind in {"DICT_CONTAINS", "DICT_NOT_CONTAINS"}:
        plain = isinstance(value, dict)
        found = dict.__contains__(value, options["key"]) if plain else options["key"] in value
        key = texts.hooks.key_text(value, options["key"]) or repr(options["key"])
        return f"{kind} {_shape(value, texts)} {key} {found}"
    if kind in {"SET_CONTAINS", "SET_NOT_CONTAINS"}:
        return f"{kind} {_shape(value, texts)} {options['key']!r} {options['key'] in value}"
    raise NoFingerprintError(f"a guard is of kind {kind}")


def _shape(value: Any, texts: ObjectTexts) -> str:
    """What an object is, apart from what it holds."""
    if type(value) in PLAIN or isinstance(value, type):
        return texts.exact(value)
    return f"{texts.exact(type(value))} #{texts.number(value)}"
