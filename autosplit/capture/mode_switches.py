"""Grad mode and autocast of the nodes of a forward graph.

No node reads the nodes that switch grad mode and autocast, so a part of the graph could lose its
switches and run under other settings. The capture therefore removes all switches, and each part
gets the switches that it needs.
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
        grad: False under ``no_grad``; None for the caller's grad mode.
        autocasts: the nodes that entered the surrounding regions of autocast, outermost first.
    """

    grad: bool | None = None
    autocasts: tuple[fx.Node, ...] = ()


def settings(graph: fx.Graph) -> dict[fx.Node, Setting | None]:
    """The grad mode and autocast of every node; None for nodes that only switch grad mode or
    autocast, and for nodes without effect.
    """
    setting_of: dict[fx.Node, Setting | None] = {}
    now = Setting()
    for node in graph.nodes:
        setting_of[node] = None
        if node.target is _GRAD:
            # Graphs are captured with gradients on, so True is the caller's mode.
            now = Setting(None if node.args[0] else False, now.autocasts)
        elif node.target is _enter_autocast:
            now = Setting(now.grad, (*now.autocasts, node))
        elif node.target is _exit_autocast:
            kept = tuple(enter for enter in now.autocasts if enter is not node.args[0])
            now = Setting(now.grad, kept)
        elif node.target not in _NOTHING:
            setting_of[node] = now
    return setting_of


def enters_autocast(node: fx.Node) -> bool:
    """Whether the node enters a region of autocast. Its first argument is a device type."""
    return node.target is _enter_autocast


class Switches:
    """Writes into a new graph the nodes that switch grad mode and autocast."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._grad: bool | None = None
        self._callers: fx.Node | None = None
        self._entered: list[tuple[fx.Node, fx.Node]] = []

    def to(self, setting: Setting) -> None:
        """Write the nodes that switch to the grad mode and autocast of ``setting``."""
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
