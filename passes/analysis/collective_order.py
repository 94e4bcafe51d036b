"""List scheduling of operators around collectives: what does not depend on one runs while it is
under way.

Two resources: the device runs operators one after another, the link collectives, in the order in
which they begin. An operator is urgent where a later collective depends on it; everything else
fills windows, from the start of a collective to the first urgent reader of its result. The order of
urgent operators follows from the graph alone, never from costs, so that all ranks begin their
collectives in one order whatever each estimates.
"""

from __future__ import annotations

import operator
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from torch import fx

from ..graph import ancestors, is_size
from ..memory_policy import Rates
from .aliasing import is_free
from .operator_cost import duration, exchange_duration
from .operators import is_start, is_wait, start_of

_ROUNDING = 0.5  # an operator fills a window of which it leaves less than so much of itself outside


@dataclass
class CollectiveOrder:
    """Operators in a new order.

    Attributes:
        nodes: all of them.
        hidden_in: operator that fills a window -> the wait that it is before.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    hidden_in: dict[fx.Node, fx.Node] = field(default_factory=dict)


def exposed_time(order: Iterable[fx.Node], scale: float = 1.0, rates: Rates | None = None) -> float:
    """Time that the device waits for collectives, where these take ``scale`` times their cost at
    these rates, or by estimates without.
    """
    clock = link = exposed = 0.0
    ends: dict[fx.Node, float] = {}
    for node in order:
        if is_start(node):
            link = ends[node] = max(clock, link) + scale * exchange_duration(node, rates)
        elif is_wait(node):
            stall = max(0.0, ends.get(start_of(node), 0.0) - clock)
            clock, exposed = clock + stall, exposed + stall
        else:
            clock += duration(node, rates)
    return exposed


class CollectiveScheduler:
    """Orders a graph's operators.

    Args:
        nodes: the operators to order, as they run now; what they read besides is there.
        rates: of operators and collectives; None: they are estimated.
    """

    def __init__(self, nodes: Sequence[fx.Node], rates: Rates | None = None) -> None:
        self.rates = rates
        self.index = {node: at for at, node in enumerate(nodes)}
        self.heavy = [node for node in nodes if not _is_light(node)]
        self.reads: dict[fx.Node, set[fx.Node]] = {}
        for node in nodes:
            found: set[fx.Node] = set()
            for each in node.all_input_nodes:
                if each in self.index:
                    found |= self.reads[each] if _is_light(each) else {each}
            self.reads[node] = found
        starts = (node for node in nodes if is_start(node))
        self.urgent = ancestors(starts, self.reads.__getitem__)

    def order(self, fill: float, *, hold: bool = True, pack: bool = False) -> CollectiveOrder:
        """An order.

        Args:
            fill: how much of a collective's time to fill.
            hold: whether what finds no room in one window waits for a later one. Without, it runs
                behind the first.
            pack: whether of what has room in a window the longest fills it first, and what would
                stick out last. Without, the oldest does, which holds least.
        """
        run = _Run(self, fill, pack)
        while True:
            for each in run.over():
                run.emit(each)
            node = run.first(urgent=True, wait=False)
            wait = run.first(urgent=True, wait=True)
            if node is not None:
                run.emit(node)
            elif wait is not None:
                run.fill_window(wait)
                run.emit(wait)
                while not hold and (node := run.first(urgent=False, wait=False)):
                    run.emit(node)
            elif node := run.first(urgent=False, wait=False):
                run.note_hidden(node)
                run.emit(node)
            elif node := run.first(urgent=False, wait=True):
                run.emit(node)
            else:
                break
        run.rest()
        return run.order


class _Run:
    """One pass of list scheduling."""

    def __init__(self, scheduler: CollectiveScheduler, fill: float, pack: bool) -> None:
        heavy, reads = scheduler.heavy, scheduler.reads
        self.order = CollectiveOrder()
        self._index, self._urgent = scheduler.index, scheduler.urgent
        self._rates = scheduler.rates
        self._fill, self._pack = fill, pack
        self._done: set[fx.Node] = set()
        self._clock = self._link = 0.0
        self._ends: dict[fx.Node, float] = {}
        self._missing = {node: len(reads[node]) for node in heavy}
        self._readers: dict[fx.Node, list[fx.Node]] = {node: [] for node in heavy}
        for node in heavy:
            for each in reads[node]:
                self._readers[each].append(node)
        # Ready operators by their place: urgent ones, fillers, urgent waits and other waits.
        self._ready: dict[tuple[bool, bool], list[tuple[int, fx.Node]]] = {
            (urgent, wait): [] for urgent in (True, False) for wait in (True, False)
        }
        for node in heavy:
            if not self._missing[node]:
                self._arrive(node)

    def first(self, *, urgent: bool, wait: bool) -> fx.Node | None:
        ready = self._ready[urgent, wait]
        return ready[0][1] if ready else None

    def over(self) -> list[fx.Node]:
        """Waits that nothing urgent reads, for what is over by now: its operands may go."""
        return [w for _, w in self._ready[False, True] if self._end(w) <= self._clock]

    def fill_window(self, wait: fx.Node) -> None:
        """Run fillers until the collective is over."""
        end = self._end(wait)
        while (node := self._filler_for(end - self._clock)) is not None:
            self.order.hidden_in[node] = wait
            self.emit(node)

    def _filler_for(self, left: float) -> fx.Node | None:
        """The next filler for what is left of a window, if any has room."""
        timed = [(duration(node, self._rates), at, node) for at, node in self._ready[False, False]]
        room = [each for each in timed if (1 - _ROUNDING) * each[0] <= left]
        if left <= 0 or not room:
            return None
        if not self._pack:
            return min(room, key=itemgetter(1))[2]
        return min(room, key=lambda e: (e[0] > left, abs(left - e[0]), e[1]))[2]

    def note_hidden(self, node: fx.Node) -> None:
        """Note whether a filler would run beside a collective whose result is not urgent."""
        waits = self._ready[False, True]
        wait = max((each for _, each in waits), key=self._end, default=None)
        if (
            wait is not None
            and (1 - _ROUNDING) * duration(node, self._rates) <= self._end(wait) - self._clock
        ):
            self.order.hidden_in[node] = wait

    def _end(self, wait: fx.Node) -> float:
        return self._ends.get(start_of(wait), 0.0)

    def emit(self, node: fx.Node) -> None:
        """Run an operator, and the views before it."""
        ready = self._ready[node in self._urgent, is_wait(node)]
        ready.remove((self._index[node], node))
        self._append(node)
        if is_start(node):
            exchange = exchange_duration(node, self._rates)
            self._link = max(self._clock, self._link) + self._fill * exchange
            self._ends[node] = self._link
        elif is_wait(node):
            self._clock = max(self._clock, self._end(node))
        else:
            self._clock += duration(node, self._rates)
        for reader in self._readers[node]:
            self._missing[reader] -= 1
            if not self._missing[reader]:
                self._arrive(reader)

    def rest(self) -> None:
        """Views that nobody here reads."""
        for node in self._index:
            self._append(node)

    def _append(self, node: fx.Node) -> None:
        stack = [node]
        while stack:
            read = [e for e in stack[-1].all_input_nodes if e in self._index]
            missing = [each for each in read if each not in self._done]
            if missing:
                stack += missing
                continue
            last = stack.pop()
            if last not in self._done:
                self._done.add(last)
                self.order.nodes.append(last)

    def _arrive(self, node: fx.Node) -> None:
        ready = self._ready[node in self._urgent, is_wait(node)]
        insort(ready, (self._index[node], node))


def _is_light(node: fx.Node) -> bool:
    """Whether the node takes no time and runs just before its first reader."""
    return is_free(node) or node.target is operator.getitem or is_size(node)
