"""Data flow between stages: where the inputs of every stage come from, as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autosplit.errors import PipelineError

T = TypeVar("T")


@dataclass(frozen=True, order=True, slots=True)
class Source:
    """Where one input of a stage comes from.

    Attributes:
        stage: an earlier stage, or None for the batch.
        position: which output of that stage, or which tensor of the batch's inputs.
    """

    stage: int | None
    position: int

    def __str__(self) -> str:
        if self.stage is None:
            return f"the batch's input {self.position}"
        return f"output {self.position} of stage {self.stage}"


@dataclass(frozen=True, slots=True)
class Wiring:
    """The inputs of every stage. Stages are in order: each takes only from earlier ones.

    An output may go to several stages; the gradients that come back are added up from the last
    of them to the first, as autograd does. What the batch gives, any stage may take; the process
    that holds it takes it from its own batch.

    Attributes:
        inputs: per stage, the sources of its module's arguments, in order.
        outputs: how many output tensors each stage but the last has.
        names: the names of the batch's inputs in the order of their positions, where a batch
            gives them as a dictionary; empty where it gives a tensor or a tuple.

    Raises:
        PipelineError: no stage; not one count of outputs for each stage but the last; a source
            that is not there when the stage runs; or one name twice.
    """

    inputs: tuple[tuple[Source, ...], ...]
    outputs: tuple[int, ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.inputs or len(self.outputs) != len(self.inputs) - 1:
            raise PipelineError(
                "a wiring has the inputs of one stage or more, and the number of outputs of each "
                f"but the last; got those of {len(self.inputs)} and {len(self.outputs)} stages"
            )
        if len(set(self.names)) != len(self.names):
            raise PipelineError(f"each input of the batch has a name of its own; got {self.names}")
        for stage, sources in enumerate(self.inputs):
            for place, source in enumerate(sources):
                problem = self._problem(stage, source)
                if problem is not None:
                    raise PipelineError(f"input {place} of stage {stage} is {source}: {problem}")

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.inputs)

    def _problem(self, stage: int, source: Source) -> str | None:
        if source.stage is None:
            count, what = len(self.names), "named inputs"
            if source.position >= 0 and not self.names:
                return None
        elif not 0 <= source.stage < stage:
            return f"it can take from the batch and from stages before {stage}"
        else:
            count, what = self.outputs[source.stage], "outputs"
        if 0 <= source.position < count:
            return None
        return f"there are {count} {what}, counted from 0"


class Feeds:
    """Producers and consumers of every stage; without a wiring, a chain of unknown tensor counts.

    Args:
        stages: how many stages there are.
        wiring: the data flow; None: each stage takes all outputs of the one before, and the first
            all that the batch gives.
    """

    def __init__(self, stages: int, wiring: Wiring | None = None) -> None:
        self.wiring = wiring
        self._stages = stages
        self._sources: list[tuple[int, ...]] = []
        self._targets: list[list[int]] = [[] for _ in wiring.inputs] if wiring else []
        self._positions: dict[tuple[int, int], tuple[int, ...]] = {}
        for stage, inputs in enumerate(wiring.inputs if wiring else ()):
            taken = sorted({(s.stage, s.position) for s in inputs if s.stage is not None})
            self._sources.append(tuple(dict.fromkeys(source for source, _ in taken)))
            for source in self._sources[-1]:
                self._targets[source].append(stage)
                self._positions[source, stage] = tuple(p for s, p in taken if s == source)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """All pairs of stages between which tensors travel, source first."""
        for source in range(self._stages):
            yield from ((source, target) for target in self.targets(source))

    def sources(self, stage: int) -> tuple[int, ...]:
        """The stages that ``stage`` takes tensors from, in order."""
        if self.wiring is None:
            return (stage - 1,) if stage else ()
        return self._sources[stage]

    def targets(self, stage: int) -> tuple[int, ...]:
        """The stages that take tensors from ``stage``, in order."""
        if self.wiring is None:
            return (stage + 1,) if stage + 1 < self._stages else ()
        return tuple(self._targets[stage])

    def positions(self, source: int, target: int) -> tuple[int, ...] | None:
        """Which outputs of ``source`` go to ``target``, and their gradients back, each once, in
        order; None for all.
        """
        return None if self.wiring is None else self._positions[source, target]

    def select(self, outputs: Sequence[T], source: int, target: int) -> Sequence[T]:
        """Of one value for each output of ``source``, the values of those that ``target`` takes."""
        positions = self.positions(source, target)
        return outputs if positions is None else [outputs[position] for position in positions]

    def places(self, source: int, target: int) -> list[list[int]] | None:
        """For each output of ``source`` that goes to ``target``, its places among the inputs of
        that; None where they are as they come.
        """
        if self.wiring is None:
            return None
        sources = [(each.stage, each.position) for each in self.wiring.inputs[target]]
        return [
            [place for place, each in enumerate(sources) if each == (source, position)]
            for position in self._positions[source, target]
        ]

    def shared_places(self, stage: int) -> tuple[int, ...]:
        """Which arguments of ``stage`` others may take as well; none in a chain."""
        if self.wiring is None:
            return ()
        every = Counter(source for sources in self.wiring.inputs for source in sources)
        own = self.wiring.inputs[stage]
        return tuple(place for place, source in enumerate(own) if every[source] > 1)

    def from_batch(self, stages: Iterable[int]) -> frozenset[int] | None:
        """Which of the batch's inputs these stages take; None for all."""
        if self.wiring is None:
            return None if 0 in stages else frozenset()
        inputs = (source for stage in stages for source in self.wiring.inputs[stage])
        return frozenset(source.position for source in inputs if source.stage is None)

    @property
    def first_from_batch(self) -> int:
        """The first stage that takes any of the batch's inputs; 0 if none does."""
        none = frozenset[int]()
        takers = (stage for stage in range(self._stages) if self.from_batch([stage]) != none)
        return next(takers, 0)

    def check_outputs(self, stage: int, count: int) -> None:
        """Refuse a stage with another number of outputs than the wiring says.

        Raises:
            PipelineError: says both numbers.
        """
        if self.wiring is None or stage == self.wiring.stages - 1:
            return
        said = self.wiring.outputs[stage]
        if count != said:
            raise PipelineError(f"stage {stage} puts out {count} tensors; the wiring says {said}")
