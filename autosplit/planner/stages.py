"""A whole model, cut: who feeds whom, the modules of its stages, and which of them has which
parameters and buffers, under which of their names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import fx, nn

from autosplit.capture.module_paths import inside, stack
from autosplit.capture.roles import canonical_names
from autosplit.errors import AutosplitError, PlanError
from autosplit.pipeline.schedule.wiring import Wiring
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.meta_model import Initialiser, materialise_stage
from autosplit.planner.operation_sequence import OperationSequence
from autosplit.planner.stage_module import (
    StageGraph,
    StageLayout,
)


def _keys(line: OperationSequence) -> list[list[Any]]:
    """Each operation by its modules, what it calls, and how often that came before, with its line
    and, for what has another line in another mode, without. A region that is checkpointed in one
    mode only is known by the operations in it.
    """
    seen: Counter[Any] = Counter()
    found = []
    for node in line.body:
        exact: list[Any] = []
        loose: list[Any] = []
        for part in inside(node) or [node]:
            called = (stack(part), str(part.target))
            for keys, key in ((exact, (*called, part.stack_trace)), (loose, called)):
                seen[key] += 1
                keys.append((key, seen[key]))
        found.append(exact + loose)
    return found


def _found(places: Sequence[tuple[list[Any], str]], line: OperationSequence) -> list[int]:
    """Where the same lines of the user's code run in another capture.

    Raises:
        PlanError: it cannot be cut there.
    """
    known = {key: index for index, keys in enumerate(_keys(line)) for key in keys}
    found: list[int] = []
    for keys, name in places:
        place = next((known[key] for key in keys if key in known), None)
        if place is None or place in line.forbidden or place in (0, *found):
            raise PlanError(f"there can be no cut before {name}")
        found.append(place)
    return found


@dataclass(frozen=True)
class StageNames:
    """The names of parameters and buffers, in the model and in its stages.

    Every parameter and buffer of a model is in the stages that read it. What no stage reads is with
    its neighbours in the model, so that the stages together have all that the model has.

    Attributes:
        places: by the first name in the model, by stage, all names that it has there; each name is
            in some stage.
    """

    places: Mapping[str, Mapping[int, Sequence[str]]]

    @classmethod
    def of(cls, whole: WholeModel, nodes: Sequence[Sequence[fx.Node]]) -> StageNames:
        """Of a model whose stages run these operations."""
        aliases: dict[str, list[str]] = {}
        for name, first in canonical_names(whole.model).items():
            aliases.setdefault(first, []).append(name)
        readers = _readers(whole, nodes)
        return cls(
            {
                first: _placed(
                    names, readers.get(first) or {_neighbour(first, readers): set[str]()}
                )
                for first, names in aliases.items()
            }
        )

    def held(self, stage: int) -> list[str]:
        """What a stage holds, in the model's order."""
        return [name for place in self.places.values() for name in place.get(stage, ())]

    def shared(self, parameters: Collection[str]) -> tuple[tuple[tuple[int, str], ...], ...]:
        """Of each parameter in several stages, where it is: (stage, name)."""
        places = [self.places[first] for first in self.places if first in parameters]
        found = [[(stage, place[stage][0]) for stage in sorted(place)] for place in places]
        return tuple(sorted(tuple(each) for each in found if len(each) > 1))

    def renamed(self, stage: int, program: StageGraph) -> StageGraph:
        """With the names that a stage has for what the program reads.

        Raises:
            PlanError: it reads what only other stages hold.
        """
        for first in program.state:
            if stage not in self.places[first]:
                raise PlanError(f"stage {stage} would read {first!r}, which other stages hold")
        return replace(program, state=tuple(self.places[f][stage][0] for f in program.state))


def _readers(
    whole: WholeModel, nodes: Sequence[Sequence[fx.Node]]
) -> dict[str, dict[int, set[str]]]:
    """First name -> stage -> the modules that read it there."""
    state = whole.line.forward.state
    found: dict[str, dict[int, set[str]]] = {}
    for stage, own in enumerate(nodes):
        for node in own:
            for read in node.all_input_nodes:
                if read in state:
                    modules = found.setdefault(state[read], {}).setdefault(stage, set())
                    modules.update(path.partition("@")[0] for path in stack(node))
    for read in whole.line.results:
        if read in state:
            found.setdefault(state[read], {}).setdefault(len(nodes) - 1, set())
    return found


def _placed(aliases: list[str], readers: Mapping[int, set[str]]) -> dict[int, list[str]]:
    """Stage -> the names that a parameter or buffer has there."""
    found = {
        stage: [a for a in aliases if a.rpartition(".")[0] in modules] or aliases[:1]
        for stage, modules in readers.items()
    }
    known = {name for names in found.values() for name in names}
    first = found[min(found)]
    found[min(found)] = [a for a in aliases if a in first or a not in known]
    return found


def _neighbour(name: str, readers: Mapping[str, Mapping[int, set[str]]]) -> int:
    """The stage of what is nearest in the model, by name."""
    path = name.split(".")

    def nearness(other: str) -> int:
        pairs = zip(path, other.split("."), strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(path))

    nearest = max(readers, key=nearness, default=None)
    return min(readers[nearest]) if nearest is not None else 0


def cut(whole: WholeModel, cuts: Sequence[int]) -> Partition:
    """Cut a model into stages.

    Args:
        whole: the model.
        cuts: for every stage but the first, its first block.

    Raises:
        PlanError: the cuts do not increase, or there is no such block.
    """
    cuts = tuple(cuts)
    count = len(whole.blocks)
    if list(cuts) != sorted({*cuts}) or any(not 0 < k < count for k in cuts):
        raise PlanError(
            f"cuts are the first blocks of all stages but the first, increasing, of 1 to "
            f"{count - 1}; got {list(cuts)}"
        )
    return Partition(whole, cuts)


class Partition:
    """A model in stages.

    Attributes:
        whole: the model.
        cuts: the first block of every stage but the first.
        wiring: who feeds whom.
        shared: for each parameter in several stages, where it is: (stage, name).
    """

    def __init__(self, whole: WholeModel, cuts: tuple[int, ...]) -> None:
        self.whole = whole
        self.cuts = cuts
        layout = StageLayout(whole.line, [whole.blocks[k].first for k in cuts])
        given = tuple(tuple(map(layout.source, each)) for each in layout.given)
        self.wiring = Wiring(given, tuple(map(len, layout.sent)), whole.names)
        self._layout = layout
        self._names = StageNames.of(whole, layout.nodes)
        self._values: Initialiser | None = None
        self.shared = self._names.shared(whole.line.forward.parameters)

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.cuts) + 1

    def initialise(self, *, seed: int = 0) -> None:
        """Have stages that are built from now on start with initial values.

        Only what the model has on the meta device gets any, and only on the rank that builds the
        stage. They depend on the seed alone, not on the cuts.

        Args:
            seed: of all random numbers.
        """
        self._values = Initialiser(self.whole.model, seed=seed)

    def build(self, index: int) -> nn.Module:
        """The module of a stage, with the model's own parameters and buffers. What the model has on
        the meta device is here on the CPU, with the values that ``initialise`` chose.

        It runs the forward as it is in training and as it is in evaluation, and is in the mode that
        the model is in now. The mode in which the model was not captured is captured when the
        module is put into it, from a copy of the model as it is now, without its parameters; now,
        where the model cannot be copied so.

        Raises:
            PlanError: there is no such stage, or something on the meta device has no values.
        """
        if not 0 <= index < self.stages:
            raise PlanError(f"there are stages 0 to {self.stages - 1}, got {index}")
        own = self._names.renamed(index, self._layout.program(index))
        module = self.whole.module(index, own, self._other(index), self._names.held(index))
        module.tied_elsewhere = tuple(
            name for held in self.shared for at, name in held if at == index
        )
        module.enter(self.whole.model.training)  # what is inside has that of the model already
        return materialise_stage(module, self._values)

    def _other(self, index: int) -> Callable[[], StageGraph]:
        """What makes the graph of a stage in the other mode. Of all that this holds, it keeps only
        what says where the cuts are: not the model, of which other stages may be on other ranks.
        """
        names, line, given = self._names, self.whole.other_mode, self.wiring.inputs[index]
        looks, places = self._layout.looks(), self._places
        mode = "evaluation" if self.whole.training else "training"

        def make() -> StageGraph:
            try:
                there = line()
            except AutosplitError as error:
                raise PlanError(f"the model cannot be captured for {mode}: {error}") from error
            try:
                layout = StageLayout(there, _found(places, there))
                if looks != layout.looks():
                    raise PlanError(
                        "other tensors would be sent from stage to stage; is there a result that "
                        "one mode alone has, as a cache (transformers: config.use_cache = False)?"
                    )
                known = {layout.source(node): node for node in layout.given[index]}
                if not known.keys() <= {*given}:
                    raise PlanError(f"stage {index} would need inputs that it is not given")
                return names.renamed(index, layout.program(index, [*map(known.get, given)]))
            except PlanError as error:
                raise PlanError(
                    f"the model cannot be cut for {mode} where it is cut: {error}"
                ) from error

        return make

    @cached_property
    def _places(self) -> list[tuple[list[Any], str]]:
        """Of the first operation of every stage but the first, its keys and its name, which hold in
        each capture of the model.
        """
        keys, body = _keys(self.whole.line), self.whole.line.body
        return [(keys[place], body[place].name) for place in self._layout.places]
