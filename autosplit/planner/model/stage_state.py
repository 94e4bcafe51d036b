"""Which stage has which parameters and buffers, and under which of their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autosplit.capture.module_paths import stack
from autosplit.capture.roles import canonical_names
from autosplit.errors import PlanError

from .captured_model import WholeModel
from .subgraph_module import StageGraph


@dataclass(frozen=True)
class StageNames:
    """The names of parameters and buffers, in the model and in its stages.

    Attributes:
        held: what each stage holds, in the model's order.
        aliases: all names that the model has for what has this first name.
    """

    held: tuple[tuple[str, ...], ...]
    aliases: Mapping[str, Sequence[str]]

    def renamed(self, stage: int, program: StageGraph) -> StageGraph:
        """With the names that a stage has for what the program reads.

        Raises:
            PlanError: it reads what only other stages hold.
        """
        own = set(self.held[stage])
        found = []
        for first in program.state:
            if own.isdisjoint(self.aliases[first]):
                raise PlanError(f"stage {stage} would read {first!r}, which other stages hold")
            found.append(self.local(stage, first))
        return replace(program, state=tuple(found))

    def local(self, stage: int, first: str) -> str:
        """The first name that a stage has for what has this first name in the model."""
        own = self.held[stage]
        return next(name for name in self.aliases[first] if name in own)


class StageState:
    """Every parameter and buffer of a model is in the stages that read it. What no stage reads is
    with its neighbours in the model, so that the stages together have all that the model has.

    Args:
        whole: the model.
        nodes: the operations of every stage.

    Attributes:
        names: of what each stage holds.
    """

    def __init__(self, whole: WholeModel, nodes: Sequence[Sequence[fx.Node]]) -> None:
        self._whole = whole
        self._aliases: dict[str, list[str]] = {}
        for name, first in canonical_names(whole.model).items():
            self._aliases.setdefault(first, []).append(name)
        self._readers = self._find_readers(nodes)
        held: list[set[str]] = [set() for _ in nodes]
        for first in self._aliases:
            for stage, names in self._place(first).items():
                held[stage].update(names)
        order = [name for names in self._aliases.values() for name in names]
        every = tuple(tuple(name for name in order if name in own) for own in held)
        self.names = StageNames(every, self._aliases)

    def shared(self) -> tuple[tuple[tuple[int, str], ...], ...]:
        """Of each parameter in several stages, where it is: (stage, name)."""
        found = []
        for first in self._whole.line.forward.parameters & self._readers.keys():
            place = self._place(first)
            if len(place) > 1:
                found.append(
                    tuple((stage, self.names.local(stage, first)) for stage in sorted(place))
                )
        return tuple(sorted(found))

    def _find_readers(self, nodes: Sequence[Sequence[fx.Node]]) -> dict[str, dict[int, set[str]]]:
        """First name -> stage -> the modules that read it there."""
        state = self._whole.line.forward.state
        found: dict[str, dict[int, set[str]]] = {}
        for stage, own in enumerate(nodes):
            for node in own:
                for read in node.all_input_nodes:
                    if read in state:
                        modules = found.setdefault(state[read], {}).setdefault(stage, set())
                        modules.update(path.partition("@")[0] for path in stack(node))
        for read in self._whole.line.results:
            if read in state:
                found.setdefault(state[read], {}).setdefault(len(nodes) - 1, set())
        return found

    def _place(self, first: str) -> dict[int, list[str]]:
        """Stage -> the names that a parameter or buffer has there; each of its names somewhere."""
        aliases = self._aliases[first]
        readers = self._readers.get(first) or {self._neighbour(first): set[str]()}
        found = {
            stage: [a for a in aliases if a.rpartition(".")[0] in modules] or [first]
            for stage, modules in readers.items()
        }
        left = [a for a in aliases if not any(a in names for names in found.values())]
        found[min(found)] += left
        return found

    def _neighbour(self, name: str) -> int:
        """The stage of what is nearest in the model, by name."""
        path = name.split(".")

        def nearness(other: str) -> int:
            pairs = zip(path, other.split("."), strict=False)
            return next((i for i, (a, b) in enumerate(pairs) if a != b), len(path))

        nearest = max(self._readers, key=nearness, default=None)
        return min(self._readers[nearest]) if nearest is not None else 0
