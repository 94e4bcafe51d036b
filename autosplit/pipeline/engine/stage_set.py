"""The stages of a rank for microbatches of one kind, and the sizes of all messages between stages.

    sizes of a microbatch's inputs ──rule of stage 0──► outputs of stage 0
                                   ──rule of stage 1──► outputs of stage 1 ...

All ranks have the rules of all stages. So before the step, each rank computes the sizes of all
messages of a microbatch, which gradients are sent, and whether the graphs of a stage are missing.
Ranks need not ask each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from autosplit.capture.size_rule import Leaf, SizeRule
from autosplit.pipeline.engine.boundaries import Boundaries, Boundary, Dependence
from autosplit.pipeline.engine.stage_arguments import bind_arguments
from autosplit.pipeline.engine.stage_protocols import TrainableStage
from autosplit.pipeline.schedule.routes import StageDataflow
from autosplit.runtime.call_cache import CallCache

Outputs = Mapping[int, Boundary]
"""By stage, the metadata of its outputs; stages whose outputs are unknown are missing."""


class MicrobatchSizes(NamedTuple):
    """The sizes of a microbatch.

    Attributes:
        inputs: the sizes of each input, with objects flattened into their tensors and numbers.
        targets: the sizes of each target, with objects flattened.
    """

    inputs: tuple[Leaf, ...]
    targets: tuple[Leaf, ...]

    @property
    def elements(self) -> int:
        """The number of elements of all inputs that are tensors."""
        return sum(torch.Size(leaf).numel() for leaf in self.inputs if not isinstance(leaf, str))

    def fits_within(self, larger: MicrobatchSizes) -> bool:
        """Whether each size is at most the size in ``larger``."""
        pairs = zip((*self.inputs, *self.targets), (*larger.inputs, *larger.targets), strict=False)
        return all(
            isinstance(leaf, str) or isinstance(limit, str) or all(map(int.__le__, leaf, limit))
            for leaf, limit in pairs
        )


class StageRule(NamedTuple):
    """The facts about one capture of a stage that all ranks know.

    Attributes:
        sizes: the sizes of the outputs, for the inputs' sizes for which the capture is valid.
        dependence: see ``Dependence``; None for a stage without graphs.
    """

    sizes: SizeRule
    dependence: Dependence | None


class StageSet:
    """This rank's stages for microbatches whose tensors have the same numbers of dimensions and
    dtypes.

    Args:
        count: the number of stages.
        dataflow: the dataflow between stages.

    Attributes:
        stages: this rank's stages.
        boundaries: the tensors between stages for the first microbatch.
        first_sizes: the sizes of the first microbatch; None before stages are built.
        rules: by stage, one rule for each capture. None for a stage without rules: its outputs are
            known for the first microbatch only.
    """

    def __init__(self, count: int, dataflow: StageDataflow) -> None:
        self.count, self.dataflow = count, dataflow
        self.stages: dict[int, TrainableStage] = {}
        self.boundaries = Boundaries()
        self.rules: list[list[StageRule] | None] = [[] for _ in range(count)]
        self.first_sizes: MicrobatchSizes | None = None
        self._by_sizes = CallCache[MicrobatchSizes, Boundaries]()

    @property
    def has_rules(self) -> bool:
        """Whether all stages have rules."""
        return None not in self.rules

    def boundaries_of(self, sizes: MicrobatchSizes) -> Boundaries | None:
        """The tensors between stages for a microbatch; None if the graphs of a stage are missing.

        Outputs of a stage without rules, and of stages that read these outputs, are left out.
        """
        if sizes == self.first_sizes:
            return self.boundaries
        if (boundaries := self._by_sizes.get(sizes)) is not None:
            return boundaries
        outputs: dict[int, Boundary] = {}
        dependence: list[Dependence | None] = []
        for stage, rules in enumerate(self.rules):
            arguments = self.argument_sizes(stage, sizes, outputs)
            if arguments is None or rules is None:
                continue
            facts = self.facts_of(stage, arguments, rules)
            if facts is None:
                return None
            outputs[stage] = facts[0]
            dependence.append(facts[1])
        boundaries = self.boundaries.of_other_sizes(outputs)
        if self.has_rules:
            # A forward that branches on sizes may read other tensors than in the first microbatch.
            boundaries.resolve_gradients(dependence, self.dataflow)
        return self._by_sizes.remember(sizes, boundaries)

    def argument_sizes(
        self, stage: int, sizes: MicrobatchSizes, outputs: Outputs
    ) -> tuple[Leaf, ...] | None:
        """The sizes of a stage's arguments; None if the outputs of an earlier stage are unknown."""
        sources = self.dataflow.sources(stage)
        if any(source not in outputs for source in sources):
            return None

        def sent_by(source: int) -> list[Leaf]:
            metas = self.dataflow.select(outputs[source], source, stage)
            return [tuple(meta.shape) for meta in metas]

        receives = [partial(sent_by, source) for source in sources]
        leaves = bind_arguments(stage, self.dataflow, receives, lambda: [*sizes.inputs])()
        return (*leaves, *(sizes.targets if stage == self.count - 1 else ()))

    def facts_of(
        self, stage: int, arguments: Sequence[Leaf], rules: Sequence[StageRule]
    ) -> tuple[Boundary, Dependence | None] | None:
        """A stage's outputs and their dependence by the rule that fits the stage's arguments; None
        if no rule fits.
        """
        for rule in reversed(rules):
            if (shapes := rule.sizes.output_sizes(arguments)) is not None:
                metas = self.boundaries.outputs[stage]
                pairs = zip(metas, shapes, strict=True)
                outputs = tuple(replace(meta, shape=torch.Size(shape)) for meta, shape in pairs)
                return outputs, rule.dependence
        return None
