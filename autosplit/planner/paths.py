"""Where in the model an operation comes from."""

from __future__ import annotations

import re

from torch import fx

_ROOT = re.compile(r"^[LG]\['\w+'\]\.?")
_ENTRY = re.compile(r"\._modules\['([^']*)'\]|\[(?:'([^']*)'|(\d+))\]")


def stack(node: fx.Node) -> tuple[str, ...]:
    """The modules around an operation, outermost first. A later call of the same module has its
    number behind it, as in ``block@1``.
    """
    found = []
    for key, (path, _) in node.meta.get("nn_module_stack", {}).items():
        name = _ENTRY.sub(lambda m: "." + next(filter(None, m.groups())), _ROOT.sub("", path))
        call = str(key).partition("@")[2]
        if name:
            found.append(f"{name.removeprefix('.')}@{call}" if call else name.removeprefix("."))
    return tuple(found)


def common(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[str, ...]:
    """The modules around both."""
    length = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        length += 1
    return a[:length]
