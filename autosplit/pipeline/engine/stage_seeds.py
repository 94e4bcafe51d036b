"""Seed the random generators for a trainer's stages, so that seeds do not depend on a stage's
rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autosplit.device import GeneratorStates, seed_generators
from autosplit.pipeline.schedule.schedule import Action
from autosplit.ranks.groups import Groups

_STRIDE = 0x9E3779B97F4A7C15
"""Odd, so that 2**32 of its multiples differ in the 32 bits that the CPU's generator takes."""
_CALLS = "FIBW"
_NOT_DRAWN = -1
"""In place of a step's number, which one rank alone draws only when a stage needs it."""


def seed_at(number: int, place: int) -> int:
    """The seed at a place of the sequence of seeds that ``number`` identifies."""
    return (number + place * _STRIDE) % 2**64


def next_number() -> int:
    """The number that ``draw_number`` would draw; the generator does not advance."""
    state = torch.get_rng_state()
    number = draw_number()
    torch.set_rng_state(state)
    return number


def draw_number() -> int:
    """Draw a number, in [0, 2**63), from the CPU's generator."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


class StageSeeds:
    """Seeds the generators before each call of a stage that draws random numbers.

    The seed of a call comes from three things::

        number of the step          the next one of the CPU's generator, on the first stage's rank
        share of the batch          differs between replicas, not along "tp"
        stage, microbatch, action

    So the random numbers of a stage depend neither on its rank nor on the order of actions. A step
    restores the state of all generators. If any stage draws, each rank's CPU generator then
    advances by one number, so that the next step has other seeds.

    Args:
        groups: the trainer's process groups.
        device: the device of this rank's stages.
        stages: the number of stages.
        source: the rank of the pipeline whose generator draws the number of a step.

    Attributes:
        microbatches: the largest number of microbatches that any replica has in the step; to be set
            after ``begin_step``.
    """

    def __init__(self, groups: Groups, device: torch.device, stages: int, source: int) -> None:
        layout = groups.layout
        shares = sorted({place.share for place in layout.places})
        self._share, self._shares = shares.index(layout.place.share), len(shares)
        self._stages, self.microbatches = stages, 1
        self._is_alone = groups.everybody.ranks == 1
        self._is_source = groups.everybody.rank == layout.pipelines[0][source]
        self._device = device
        # The kinds of steps, by ``evaluates``, in which a stage draws: of any rank, of this rank.
        self._drawing, self._drawing_here = set[bool](), set[bool]()
        self._evaluates = False
        self._number = self._first = 0
        self._states: GeneratorStates | None = None

    def offer(self, *, evaluates: bool) -> tuple[int, int]:
        """Return the two numbers with which this rank takes part in agreeing on the next step; all
        ranks' numbers are reduced with AND.

        Returns:
            (number of the step, or -1 on ranks that are not the source, and if there is only one
            rank; 0 if a stage is known to draw, else -1).
        """
        draws = evaluates in self._drawing or evaluates in self._drawing_here
        shares_number = self._is_source and not self._is_alone
        return (next_number() if shares_number else _NOT_DRAWN), (0 if draws else -1)

    def begin_step(self, number: int, draws: int, *, evaluates: bool) -> None:
        """Begin a step with the number on which all ranks agreed.

        Args:
            number: the number of the step, on which all ranks agreed, see ``offer``.
            draws: nonzero if a stage of some rank draws random numbers.
            evaluates: whether the step is an evaluation.
        """
        # If the previous step drew unexpectedly, it had the same number: use other seeds.
        late = not draws and evaluates not in self._drawing
        if not draws:
            self._drawing.add(evaluates)
        self._number, self._evaluates = number, evaluates
        self._first = ((2 * late + evaluates) * self._shares + self._share) * self._stages

    def expect_draws(self) -> bool:
        """Record that some rank's stage draws in steps of this kind (training or evaluation), and
        return whether that is new. All ranks call it.
        """
        new = self._evaluates not in self._drawing
        self._drawing.add(self._evaluates)
        return new

    @property
    def drew(self) -> bool:
        """Whether stages of this rank have drawn random numbers in a step of the present kind,
        training or evaluation.
        """
        return self._evaluates in self._drawing_here

    def __enter__(self) -> None:
        """Enter the context around a step, which restores the generators at its end."""
        self._states = None
        if self._evaluates in self._drawing:
            number = draw_number()
            self._number = number if self._number == _NOT_DRAWN else self._number
            self._states = GeneratorStates.on(self._device)

    def __exit__(self, *error: object) -> None:
        if self._states is not None:
            self._states.restore()

    def seed(self, stage: int, microbatch: int) -> None:
        """Seed the generators for an F of a stage that draws."""
        self._drawing_here.add(self._evaluates)
        self._seed(stage, microbatch, "F")

    def seed_of(self, stage: int, microbatch: int, call: str = "F") -> int:
        """The seed of an action of this step, if its stage draws."""
        if self._number == _NOT_DRAWN:
            self._number = next_number()
        place = (self._first + stage) * self.microbatches + microbatch
        place = place * len(_CALLS) + max(_CALLS.find(call), 0)  # a recomputed F draws as F
        return seed_at(self._number, place)

    def _seed(self, stage: int, microbatch: int, call: str) -> None:
        if self._states is None:
            self._states = GeneratorStates.on(self._device)
        seed_generators(self._device, self.seed_of(stage, microbatch, call))

    def run(self, action: Action, compute: Callable[..., Any], *inputs: Any) -> Any:
        """Seed the generators for an action of a stage without graphs, and run it."""
        self._seed(action.stage, action.microbatch, action.kind.value)
        if self.drew:
            return compute(*inputs)
        seeded = GeneratorStates.on(self._device)
        outputs = compute(*inputs)
        if not seeded.unchanged():
            self._drawing_here.add(self._evaluates)
        return outputs
