"""Where in the model an operation comes from."""

from __future__ import annotations

import functools
import operator
import re

from torch import fx

_ROOT = re.compile(r"^[LG]\['\w+'\]\.?")
_ENTRY = re.compile(r"\._modules\['([^']*)'\]|\[(?:'([^']*)'|(\d+))\]")


def stack(node: fx.Node) -> tuple[str, ...]:
    """The modules around an operation, outermost first. A later call of the same module has its
    number behind it, as in ``block@1``. A checkpointed region is where its operations are.
    """
    for held in node.all_input_nodes:
        if held.op == "get_attr" and node.graph.owning_module is not None:
            body = operator.attrgetter(str(held.target))(node.graph.owning_module)
            if isinstance(body, fx.GraphModule):
                inside = [stack(n) for n in body.graph.nodes if n.op.startswith("call_")]
                return functools.reduce(common, inside) if inside else ()
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
