"""Stages that ``fully_shard`` has sharded. The schedule's actions gather and free their parameters,
and reduce their gradients.

UNSHARD        starts the all-gather of parameters that a forward leaves gathered
F, I, W, B     the first of the stage waits for it; parameters with ``reshard_after_forward`` are
               gathered for the call of each block, two calls ahead, if ranks agree on the
               blocks; gradients are accumulated unreduced
RESHARD        frees what is gathered
REDUCE_GRAD    starts one reduce-scatter for each parameter group, into ``.grad`` of the shards
end of a step  waits for the reduce-scatters
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from autosplit.errors import PipelineError, ShardedError
from autosplit.gathering import GatherOrder
from autosplit.mesh.costs import Link, measure_all_reduce
from autosplit.mesh.dimensions import EXPERT_SHARD, PIPELINE, REPLICATE, SHARD, RankLayout
from autosplit.pipeline.schedule.gathers import add_gathers
from autosplit.pipeline.schedule.schedule import SHARDING, Action, ActionKind, Schedule
from autosplit.pipeline.simulation.collectives import StageCollectives
from autosplit.ranks.groups import Groups
from autosplit.sharded import ShardedModule
from autosplit.stage import Stage
from autosplit.torch_internals.distributed import fsdp_part
from autosplit.trainer.copy_checks import is_expert
from autosplit.trainer.gather_agreement import GatherAgreement
from autosplit.trainer.gradient_buckets import Wait
from autosplit.trainer.replicated_parameters import broadcast_from

if TYPE_CHECKING:
    from autosplit.torch_internals.fsdp import ParameterGroup

_SHARD_PEERS = "the ranks that have the other shards of its parameters"


class ShardedStages:
    """This rank's stages with parameters that are sharded over several ranks.

    The dimensions of the mesh along which parameters are sharded:

        mesh                 parameters            experts
        "dp_shard"           "dp_shard"
        "dp_shard", "cp"     "dp_shard" and "cp"
        "efsdp", "ep"        "efsdp" and "ep"      "efsdp"

    Gradients of the last modules are reduced first. All communication runs over process groups of
    the trainer, whose waits end when a rank fails. Replicas of a shard start with the values of the
    first replica. Collective: all ranks must construct it together.

    Args:
        modules: this rank's stages by index.
        groups: the trainer's process groups.
        synchronize: a function that waits until the device has finished.
        whole: the ``id`` of each trained parameter that is not sharded.

    Attributes:
        parameters: all sharded parameters.
        indices: the indices of the sharded stages of all ranks.
        frees_after_actions: whether any rank gathers parameters for each microbatch.
        gathered_shardings: maps the ``id`` of a sharded parameter to (parameter, its sharding while
            it is gathered, or None if this rank then has the whole parameter).

    Raises:
        ShardedError: a stage is sharded over other ranks than those along "dp_shard", or in an
            unsupported way.
        PipelineError: the mesh has "dp_shard" and a trained parameter is not sharded.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        groups: Groups,
        synchronize: Callable[[], None],
        whole: Collection[int] = (),
    ) -> None:
        self._groups, self._synchronize = groups, synchronize
        self._order = GatherOrder()
        self._stages = {
            index: ShardedModule(module)
            for index, module in modules.items()
            if fsdp_part(module) is not None
        }
        parameter_groups = [group for stage in self._stages.values() for group in stage.groups]
        self.parameters = [p for group in parameter_groups for p in group.sharded_parameters]
        self.gathered_shardings = {
            id(parameter): sharding
            for group in parameter_groups
            for parameter, sharding in group.gathered_shardings
        }
        for index, stage in self._stages.items():
            for group in stage.groups:
                _check_shard_ranks(index, group, groups)
        if groups.layout.shards > 1:
            shard = EXPERT_SHARD if groups.layout.experts else SHARD
            _check_all_sharded(modules, {*self.gathered_shardings, *whole}, shard)
        self._shard_group: dist.ProcessGroup | None = None
        self._reducing_groups: list[dist.ProcessGroup] = []
        # For each stage whose reduction has started: whether each parameter has a gradient here.
        self._had_gradient: dict[int, list[bool]] = {}
        self._restore = contextlib.ExitStack()
        frees = any(group.reshards_after_forward for group in parameter_groups)
        rows = groups.everybody.gather(([*self._stages], frees))
        self.indices = frozenset(index for indices, _ in rows for index in indices)
        self.frees_after_actions = any(frees for _, frees in rows)
        self._agreement: GatherAgreement | None = None
        if self.indices:
            try:
                self._connect()
            except BaseException:
                self._restore.close()
                raise

    def _connect(self) -> None:
        """Make FSDP use process groups of the trainer, and copy the first replica's values to all
        replicas.
        """
        layout = self._groups.layout
        shard_groups = {
            experts: self._groups.new_group_of_sets(layout.shard_groups(experts=experts))
            for experts in ((False, True) if layout.experts else (False,))
        }
        self._shard_group = shard_groups[False]
        if self.frees_after_actions:
            peers = self._groups.control_of_sets(layout.shard_groups())
            self._agreement = GatherAgreement(peers)
        for stage in self._stages.values():
            self.connect(stage)
        first, replicas = self._groups.root_and_group(layout.copies)
        self._reducing_groups = [group for group in (self._shard_group, replicas) if group]
        for group in [group for stage in self._stages.values() for group in stage.groups]:
            experts = _has_experts(group)
            # A rank's experts get the tokens of all ranks along "ep", so their gradient is a sum
            # over all shares of the batch.
            divisor = layout.shares if experts else None
            self._restore.enter_context(
                group.communicating(shard_groups[experts], replicas, divisor)
            )
            broadcast_from(group.sharded_parameters, first, replicas, self._groups)

    def connect(self, sharding: ShardedModule) -> None:
        """Connect a sharded module to the trainer. Its failed waits then raise LostPeerError, and
        its blocks are gathered ahead.
        """
        sharding.waiting = partial(self._groups.as_lost_peer, _SHARD_PEERS)
        if sharding.gathering is not None:
            sharding.gathering.order = self._order
            if self._agreement is not None:
                self._agreement.connect(sharding.gathering)

    def agreeing(
        self, action: Action, stage: Stage, compute: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return a function that runs an action of a stage, and agrees with other ranks on the
        parameters that it gathers.
        """
        gathering = stage.sharding.gathering
        if self._agreement is None or gathering is None:
            return compute
        return self._agreement.compare_around(action, gathering, compute)

    def restore_process_groups(self) -> None:
        """Restore the process groups that the modules had before the trainer."""
        self._restore.close()

    def __contains__(self, stage: int) -> bool:
        """Whether a stage of this rank is sharded."""
        return stage in self._stages

    def gather_first(self) -> None:
        """Start the all-gathers of a step's first blocks, if they are known from the last step."""
        for stage in self._stages.values():
            if stage.gathering is not None:
                stage.gathering.gather_ahead()

    def start_gather(self, stage: int) -> None:
        """Start the all-gather of a stage's parameters that stay gathered after a forward."""
        self._stages[stage].start_unshard()

    def finish_gather(self, stage: int) -> None:
        """Wait for the all-gather that ``start_gather`` started.

        Raises:
            LostPeerError: a rank that has a shard did not take part.
        """
        self._stages[stage].unshard()

    def free(self, stage: int) -> None:
        """Free a stage's gathered parameters."""
        self._stages[stage].reshard()

    def start_reduction(self, stage: int) -> None:
        """Start the reduce-scatters of a stage's gradients, which are in ``.grad`` of its gathered
        parameters. Do nothing if the step has started them.

        Raises:
            LostPeerError: a rank that has a shard did not take part.
        """
        if stage in self._had_gradient:
            return
        sharded = self._stages[stage]
        self._had_gradient[stage] = [had for g in sharded.groups for had in g.add_missing()]
        sharded.accumulate()
        sharded.start_reduce()

    def check_reduction(self) -> None:
        """Check that FSDP will reduce all gradients, because the optimizer gets reduced gradients
        only.

        Raises:
            PipelineError: names a parameter group whose reduction is switched off.
        """
        for index, sharded in self._stages.items():
            for group in sharded.groups:
                if not (group.reduces and group.reduces_replicas):
                    raise PipelineError(
                        f"the reduction of gradients is switched off for stage {index}'s "
                        f"{group.name} (set_requires_gradient_sync or set_requires_all_reduce): "
                        "leave it on, as a trainer reduces once a step, after all microbatches. To "
                        "accumulate over several steps, call forward_backward()"
                    )

    def free_all(self) -> None:
        """Free the gathered parameters of all sharded stages, between steps."""
        for sharded in self._stages.values():
            sharded.reshard()
        self._order.begin_order()

    @contextlib.contextmanager
    def gathered_without_hooks(self, stage: int) -> Iterator[None]:
        """Context in which a stage's module can be called. At its end, it frees the parameters of
        groups that reshard after a forward.

        FSDP's hooks are removed: they would gather the parameters of a block only on ranks that
        call the block.
        """
        sharded = self._stages.get(stage)
        if sharded is None:
            yield
            return
        sharded.unshard(whole=True)
        try:
            with sharded.plain():
                yield
        finally:
            for group in sharded.groups:
                if group.reshards_after_forward:
                    group.reshard()

    @contextlib.contextmanager
    def all_gathered(self) -> Iterator[None]:
        """Context in which the parameters of all stages of this rank are gathered."""
        try:
            for sharded in self._stages.values():
                sharded.unshard(whole=True)
            yield
        finally:
            for sharded in self._stages.values():
                sharded.reshard()

    def levels(self, schedule: Schedule) -> list[int]:
        """Return the most bytes of gathered parameters and unreduced gradients during each action
        of this rank's row. If the schedule does not list UNSHARD, RESHARD and REDUCE_GRAD, their
        bytes count in the preceding action.
        """
        rank = self._groups.rank
        row = add_gathers(schedule, self.indices).ranks[rank]
        levels = self._row_levels(row)
        if len(row) == len(schedule.ranks[rank]):
            return levels
        merged: list[int] = []
        for action, level in zip(row, levels, strict=True):
            if action.kind not in SHARDING:
                merged.append(level)
            elif merged:
                merged[-1] = max(merged[-1], level)
        return merged

    def _row_levels(self, row: Sequence[Action]) -> list[int]:
        """Return the levels of a row that lists UNSHARD, RESHARD and REDUCE_GRAD.

        While a parameter group is gathered or reduced, its flat buffer counts as well.
        """
        freed = sorted(
            group.gathered_bytes
            for stage in self._stages.values()
            for group in stage.groups
            if group.reshards_after_forward
        )
        levels, blocks = [], sum(freed[-2:])
        gathered: dict[int, int] = {}
        unreduced: dict[int, int] = {}
        for action in row:
            index, kind, flat = action.stage, action.kind, 0
            if index in self._stages:
                groups = self._stages[index].groups
                kept = [g.gathered_bytes for g in groups if not g.reshards_after_forward]
                gradients = [group.unreduced_bytes for group in groups]
                if index not in gathered and (kind.is_compute or kind is ActionKind.UNSHARD):
                    gathered[index] = sum(kept) + max(kept, default=0)
                if kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
                    unreduced[index] = sum(gradients)
                if kind is ActionKind.REDUCE_GRAD:
                    flat = max(gradients)
            levels.append(blocks + sum(gathered.values()) + sum(unreduced.values()) + flat)
            if kind.is_compute and index in gathered:
                gathered[index] = sum(kept)
            elif kind is ActionKind.RESHARD:
                gathered.pop(index, None)
            elif kind is ActionKind.REDUCE_GRAD:
                unreduced.pop(index, None)
        return levels

    def measure_gathers(self) -> dict[int, StageCollectives]:
        """Measure all-reduces, and return the collectives of each stage; collective."""
        if self._shard_group is None:
            return {}
        with self._groups.as_lost_peer(_SHARD_PEERS):
            latency, bandwidth = measure_all_reduce(self._shard_group)
        link = Link(latency, 2 * bandwidth)
        return {
            index: StageCollectives(
                link.duration(sum(g.gathered_bytes for g in stage.groups), len(stage.groups)),
                link.duration(sum(g.unreduced_bytes for g in stage.groups), len(stage.groups)),
                len(stage.groups),
                any(group.reshards_after_forward for group in stage.groups),
            )
            for index, stage in self._stages.items()
        }

    def refuse_factory(self, factory: object) -> None:
        """Refuse the user's own stage factory if a stage of this rank is sharded.

        Raises:
            PipelineError: names a sharded stage.
        """
        for stage in self._stages:
            name = getattr(factory, "__name__", type(factory).__name__)
            raise PipelineError(
                f"stage {stage} is sharded by fully_shard, and stage_factory={name} would build "
                "it: only autosplit.Stage gathers sharded parameters. Leave stage_factory out"
            )

    def start(self) -> Wait:
        """Start the reductions that the schedule has not started."""
        for stage in self._stages:
            self.start_reduction(stage)

        def wait_for_gradients() -> None:
            """Wait until ``.grad`` of the sharded parameters is complete."""
            for stage in self._stages.values():
                stage.finish_reduce()
            self._drop_missing()
            self._synchronize()

        return wait_for_gradients

    def _drop_missing(self) -> None:
        """Set ``.grad`` to None for parameters that have a gradient on no rank."""
        flags = [had for stage in self._stages for had in self._had_gradient.pop(stage)]
        mask = torch.tensor(flags, dtype=torch.int32, device=self.parameters[0].device)
        with self._groups.as_lost_peer(_SHARD_PEERS):
            for process_group in self._reducing_groups:
                dist.all_reduce(mask, dist.ReduceOp.MAX, group=process_group)
        for parameter, had_gradient in zip(self.parameters, mask.tolist(), strict=True):
            if not had_gradient:
                parameter.grad = None

    def forget(self) -> None:
        """Drop accumulated gradients that were not reduced."""
        self._had_gradient.clear()
        for stage in self._stages.values():
            stage.forget({*map(id, self.parameters)})


def _has_experts(group: ParameterGroup) -> bool:
    return any(is_expert(sharding) for _, sharding in group.gathered_shardings)


def _check_shard_ranks(stage: int, group: ParameterGroup, groups: Groups) -> None:
    """Check that a parameter group is sharded over the ranks along "dp_shard" of the trainer's
    mesh.

    Raises:
        ShardedError: the group is sharded over other ranks; the text says how to call
            ``fully_shard``.
    """
    layout, rank = groups.layout, groups.everybody.rank
    experts = _has_experts(group)
    advice = _fully_shard_advice(layout, experts=experts)
    if experts and not all(is_expert(sharding) for _, sharding in group.gathered_shardings):
        raise ShardedError(
            f"stage {stage}'s parameters of {group.name} mix experts and other parameters, which "
            "are sharded over different ranks: call fully_shard first for the module of the "
            f"experts, then for the rest; for the experts, {advice}"
        )
    shards, replicas = map(sorted, group.ranks)
    own_shards = sorted(next(r for r in layout.shard_groups(experts=experts) if rank in r))
    own_replicas = sorted(next(ranks for ranks in layout.copies if rank in ranks))
    actual = f"stage {stage}'s parameters of {group.name} are sharded over the ranks {shards}"
    actual += f", each with copies on {replicas}" if len(replicas) > 1 else ""
    if layout.shards == 1 and len(shards) > 1:
        shard = EXPERT_SHARD if layout.experts else SHARD
        raise ShardedError(
            f"{actual}, and PipelineTrainer has no mesh with {shard!r}: pass "
            f"mesh=init_device_mesh(..., mesh_dim_names=({PIPELINE!r}, {shard!r})), and {advice}"
        )
    if (shards, replicas) != (own_shards, own_replicas):
        expected = f"{own_shards}"
        expected += f", each with copies on {own_replicas}" if len(own_replicas) > 1 else ""
        raise ShardedError(
            f"{actual}; along the trainer's mesh these ranks are {expected}, so the two meshes "
            "differ: "
            f"{advice}"
        )


def _fully_shard_advice(layout: RankLayout, *, experts: bool) -> str:
    """Return advice on how to call ``fully_shard`` for experts, or for other parameters, on a
    layout.
    """
    shard = EXPERT_SHARD if layout.experts else SHARD
    is_flat = bool(layout.inner) and not experts
    dimensions = [*([REPLICATE] if layout.replicas > 1 else []), "fsdp" if is_flat else shard]
    names = ", ".join(map(repr, dimensions))
    advice = f"call fully_shard(module, mesh=mesh[{names}]), with the mesh that is passed to"
    advice += " PipelineTrainer"
    if is_flat:
        advice += f", after mesh[{shard!r}, {layout.inner!r}]._flatten('fsdp')"
    return advice


def _check_all_sharded(
    modules: Mapping[int, nn.Module], sharded: Collection[int], shard: str
) -> None:
    """Check that each trained parameter is sharded.

    The trainer shards stages along "dp_shard" that the user has not sharded as a whole, and no
    experts.

    Raises:
        PipelineError: names a parameter that is not sharded.
    """
    for stage, module in modules.items():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in sharded:
                raise PipelineError(
                    f"the mesh has {shard!r}, and parameter {name!r} of stage {stage} is not "
                    f"sharded: call fully_shard(module, mesh=mesh[{shard!r}]) for the whole stage, "
                    "without ignored_params, in the function that builds stages"
                )
