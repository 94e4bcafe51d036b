"""Seeds of the random generators that a trainer's stages draw from, whichever rank runs a stage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autosplit.device import GeneratorStates, seed_generators
from autosplit.pipeline.schedule.schedule import Action, Schedule
from autosplit.ranks.groups import Groups

_STRIDE = 0x9E3779B97F4A7C15
"""Odd, so that 2**32 of its multiples differ in the 32 bits that the CPU's generator takes."""
_CALLS = "FIBW"


def seed_at(number: int, place: int) -> int:
    """The seed at a place of the sequence that ``number`` stands for."""
    return (number + place * _STRIDE) % 2**64


def next_number() -> int:
    """The number that ``draw_number`` would draw."""
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
        share of the batch          replicas draw apart, ranks along "tp" alike
        stage, microbatch, action

    Neither the rank that runs a stage nor the order of actions changes what it draws. After a step,
    generators stand where they stood before. If any stage draws, each rank's CPU generator has then
    moved on by one number, as a model that draws moves it in one process.

    Args:
        groups: the trainer's process groups.
        device: where this rank's stages run.
        schedule: gives the numbers of stages and microbatches.
        source: the rank of the pipeline whose generator counts.
    """

    def __init__(
        self, groups: Groups, device: torch.device, schedule: Schedule, source: int
    ) -> None:
        layout = groups.layout
        shares = sorted({place.share for place in layout.places})
        self._share, self._shares = shares.index(layout.place.share), len(shares)
        self._stages, self._microbatches = schedule.stages, schedule.microbatches
        self._is_source = groups.everybody.rank == layout.pipelines[0][source]
        self._device = device
        self._drawing = {True: False, False: False}  # by evaluates: of any rank
        self._drew = {True: False, False: False}  # of this rank
        self._evaluates = False
        self._number = self._first = 0
        self._states: GeneratorStates | None = None

    def offer(self, *, evaluates: bool) -> tuple[int, int]:
        """The number of the step to come, and -1 if no stage is known to draw, else 0; for ranks to
        reduce with AND, or to take from the rank of the first stage.
        """
        draws = self._drawing[evaluates] or self._drew[evaluates]
        return (next_number() if self._is_source else -1), (0 if draws else -1)

    def begin(self, number: int, draws: int, *, evaluates: bool) -> None:
        """Take the numbers of the step to come, equal on all ranks."""
        # If the step before drew unexpectedly, it had the same number: take other seeds.
        late = not draws and not self._drawing[evaluates]
        self._drawing[evaluates] |= not draws
        self._number, self._evaluates = number, evaluates
        self._first = ((2 * late + evaluates) * self._shares + self._share) * self._stages

    def expect_draws(self) -> bool:
        """Note on all ranks that some stage draws in such a step. Returns whether that is new."""
        new = not self._drawing[self._evaluates]
        self._drawing[self._evaluates] = True
        return new

    @property
    def drew(self) -> bool:
        """Whether stages of this rank have drawn in such a step."""
        return self._drew[self._evaluates]

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Run the step inside; afterwards generators stand where they stood."""
        self._states = None
        if self._drawing[self._evaluates]:
            draw_number()
            self._states = GeneratorStates.on(self._device)
        try:
            yield
        finally:
            if self._states is not None:
                self._states.restore()

    def seed(self, stage: int, microbatch: int, call: str = "F") -> None:
        """Seed the generators for an action of a stage that draws."""
        self._drew[self._evaluates] = True
        self._seed(stage, microbatch, call)

    def _seed(self, stage: int, microbatch: int, call: str) -> None:
        if self._states is None:
            self._states = GeneratorStates.on(self._device)
        place = (self._first + stage) * self._microbatches + microbatch
        place = place * len(_CALLS) + max(_CALLS.find(call), 0)  # F, if it is run again
        seed_generators(self._device, seed_at(self._number, place))

    def run(self, action: Action, compute: Callable[..., Any], *inputs: Any) -> Any:
        """Seed the generators for an action of a stage whose graphs are not known, and compute."""
        self._seed(action.stage, action.microbatch, action.kind.value)
        if self.drew:
            return compute(*inputs)
        seeded = GeneratorStates.on(self._device)
        outputs = compute(*inputs)
        self._drew[self._evaluates] = not seeded.unchanged()
        return outputs
