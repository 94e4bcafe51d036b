"""Grad mode and autocast around each node of a Dynamo graph.

The switches are nodes without inputs or results that anybody reads. A part of the graph that
does not hold them would run under other settings, so they are taken out, and put back where a
part needs them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

_GRAD = torch._C._set_grad_enabled
_NOTHING = (torch._C._log_api_usage_once,)


@dataclass(frozen=True)
class Setting:
    """Grad mode and autocast regions around a node.

    Attributes:
        grad: False under ``no_grad``; None where it is as the caller has it.
        autocasts: the nodes that entered the regions of autocast around it, outermost first.
    """

    grad: bool | None = None
    autocasts: tuple[fx.Node, ...] = ()


def settings(graph: fx.Graph) -> dict[fx.Node, Setting | None]:
    """The setting of every node; None for the switches themselves, and for nodes without effect."""
    found: dict[fx.Node, Setting | None] = {}
    now = Setting()
    for node in graph.nodes:
        found[node] = None
        if node.target is _GRAD:
            # A graph is captured with gradients on, so True is what the caller has.
            now = Setting(None if node.args[0] else False, now.autocasts)
        elif node.target is _enter_autocast:
            now = Setting(now.grad, (*now.autocasts, node))
        elif node.target is _exit_autocast:
            kept = tuple(each for each in now.autocasts if each is not node.args[0])
            now = Setting(now.grad, kept)
        elif node.target not in _NOTHING:
            found[node] = now
    return found


def enters_autocast(node: fx.Node) -> bool:
    """Whether the node enters a region of autocast; its first argument is a type of device."""
    return node.target is _enter_autocast


class Switches:
    """Writes the switches that the nodes of a new graph need."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._grad: bool | None = None
        self._callers: fx.Node | None = None
        self._entered: list[tuple[fx.Node, fx.Node]] = []

    def to(self, setting: Setting) -> None:
        """From here on the nodes written run under ``setting``."""
        wanted = setting.autocasts
        common = 0
        while common < min(len(wanted), len(self._entered)):
            if self._entered[common][0] is not wanted[common]:
                break
            common += 1
        while len(self._entered) > common:
            self._graph.call_function(_exit_autocast, (self._entered.pop()[1],))
        for enter in wanted[common:]:
            token = self._graph.call_function(_enter_autocast, enter.args, enter.kwargs)
            self._entered.append((enter, token))
        if setting.grad != self._grad:
            if self._callers is None:
                self._callers = self._graph.call_function(torch.is_grad_enabled)
            self._graph.call_function(_GRAD, (self._callers if setting.grad is None else False,))
            self._grad = setting.grad
