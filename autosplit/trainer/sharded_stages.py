"""Stages that ``fully_shard`` has sharded: gathered for a step, reduced, and freed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from torch import nn

from autosplit.errors import PipelineError, ShardedError
from autosplit.mesh.dimensions import EXPERT_SHARD, PIPELINE, REPLICATE, SHARD
from autosplit.ranks.groups import Groups
from autosplit.torch_internals.distributed import fsdp_part
from autosplit.trainer.replicated_parameters import Wait, broadcast_from, is_expert

if TYPE_CHECKING:
    from autosplit.sharded import ShardedModule
    from autosplit.torch_internals.fsdp import ParameterGroup

_SHARDS = "the ranks that have the other shards of its parameters"


class ShardedStages:
    """This rank's stages whose parameters are sharded over the ranks along "dp_shard", beside "cp"
    along both; beside "ep" along that and "efsdp", but experts along the latter.

    Their gradients are reduced into those of the sharded parameters by a reduce-scatter for each
    parameter group, last modules first. All that they communicate goes over groups of the trainer,
    whose waits end when a rank fails. Replicas of the shards start with the values of the first.
    Creating one is collective over all ranks.

    Args:
        modules: this rank's stages by index.
        groups: the trainer's process groups.
        synchronize: waits until the device has done what it was given.

    Attributes:
        parameters: all sharded ones.
        lying: by ``id``, the same, each with how it lies over ranks when it is
            gathered: None where this rank has the whole then.

    Raises:
        ShardedError: a stage is sharded over other ranks than those along "dp_shard", or in a way
            that cannot be taken apart.
        PipelineError: the mesh has "dp_shard" and parameters that are trained are not sharded.
    """

    def __init__(
        self, modules: Mapping[int, nn.Module], groups: Groups, synchronize: Callable[[], None]
    ) -> None:
        self._groups, self._synchronize = groups, synchronize
        self._stages = {
            index: _sharded(module)
            for index, module in modules.items()
            if fsdp_part(module) is not None
        }
        groups_of = [group for stage in self._stages.values() for group in stage.groups]
        self.parameters = [each for group in groups_of for each in group.parameters]
        self.lying = {id(p): lies for group in groups_of for p, lies in group.gathered_shardings}
        for index, stage in self._stages.items():
            for group in stage.groups:
                _check_lies(index, group, groups)
        if groups.layout.shards > 1:
            _check_all_sharded(modules, self.lying)
        self._restore = contextlib.ExitStack()
        if any(groups.everybody.gather(bool(self._stages))):
            try:
                self._connect()
            except BaseException:
                self._restore.close()
                raise

    def _connect(self) -> None:
        """Communicate over groups of the trainer, and take over the first replica's values."""
        layout = self._groups.layout
        links = {
            experts: self._groups.new_group_of_sets(layout.shard_groups(experts=experts))
            for experts in ((False, True) if layout.experts else (False,))
        }
        first, copying = self._groups.root_and_group(layout.copies)
        every = [group for stage in self._stages.values() for group in stage.groups]
        for group in every:
            experts = _has_experts(group)
            # Those of one rank have the tokens of all along "ep".
            parts = layout.shares if experts else None
            self._restore.enter_context(group.communicating(links[experts], copying, parts))
            broadcast_from(group.parameters, first, copying, self._groups)

    def close(self) -> None:
        """Let the modules communicate as before."""
        self._restore.close()

    def gather_all(self) -> None:
        """Gather all parameters.

        Raises:
            LostPeerError: a rank that has a shard did not take part.
        """
        for sharded in self._stages.values():
            self._gather(sharded)

    def _gather(self, sharded: ShardedModule) -> None:
        if not sharded.is_unsharded:
            with self._groups.as_lost_peer(_SHARDS):
                sharded.unshard(whole=True)

    def check(self) -> None:
        """Refuse stages whose gradients a step would not reduce, so that no optimizer would move
        them.

        Raises:
            PipelineError: names one.
        """
        for index, sharded in self._stages.items():
            for group in sharded.groups:
                if not (group.reduces and group.reduces_copies):
                    raise PipelineError(
                        f"gradients of stage {index}'s {group.name} are not to be reduced "
                        "(set_requires_gradient_sync, set_requires_all_reduce): a trainer reduces "
                        "them once a step, behind all microbatches. Leave that on; "
                        "forward_backward() adds to the gradients of the steps before"
                    )

    def free_all(self) -> None:
        """Free all gathered parameters."""
        for sharded in self._stages.values():
            sharded.reshard()

    @contextlib.contextmanager
    def gathered(self, stage: int) -> Iterator[None]:
        """Gathered inside, and free afterwards."""
        sharded = self._stages.get(stage)
        if sharded is not None:
            self._gather(sharded)
        try:
            yield
        finally:
            if sharded is not None:
                sharded.reshard()

    def refuse_factory(self, factory: object) -> None:
        """Refuse stages that a factory of the user's makes, where some are sharded.

        Raises:
            PipelineError: names one.
        """
        for stage in self._stages:
            name = getattr(factory, "__name__", type(factory).__name__)
            raise PipelineError(
                f"stage {stage} is sharded, and stage_factory={name} is to make it: only "
                "autosplit.Stage gathers parameters for its graphs. Leave stage_factory out"
            )

    def start(self) -> Wait:
        """Start to reduce their gradients."""
        for stage in self._stages.values():
            with self._groups.as_lost_peer(_SHARDS):
                stage.accumulate()
                stage.start_reduce()

        def wait() -> None:
            for stage in self._stages.values():
                with self._groups.as_lost_peer(_SHARDS):
                    stage.finish_reduce()
            self._synchronize()

        return wait

    def forget(self) -> None:
        """Drop the gradients that have come and were not reduced."""
        for stage in self._stages.values():
            stage.forget([*map(id, self.parameters)])


def _sharded(module: nn.Module) -> ShardedModule:
    # Importing the trainer need not import FSDP.
    from autosplit.sharded import ShardedModule

    return ShardedModule(module)


def _has_experts(group: ParameterGroup) -> bool:
    return any(is_expert(lies) for _, lies in group.gathered_shardings)


def _check_lies(stage: int, group: ParameterGroup, groups: Groups) -> None:
    layout, own = groups.layout, groups.everybody.rank
    experts = _has_experts(group)
    shard = EXPERT_SHARD if layout.experts else SHARD
    flat = bool(layout.inner) and not experts
    names = [*([REPLICATE] if layout.replicas > 1 else []), "fsdp" if flat else shard]
    call = f"call fully_shard(module, mesh=mesh[{', '.join(map(repr, names))}]), with the mesh that"
    call += " PipelineTrainer gets"
    if flat:
        call += f", of which mesh[{shard!r}, {layout.inner!r}]._flatten('fsdp') was called"
    if experts and not all(is_expert(lies) for _, lies in group.gathered_shardings):
        raise ShardedError(
            f"stage {stage}'s parameters of {group.name} are experts and others, which other ranks "
            f"share: {call}, for the module of the experts before"
        )
    shards, copies = map(sorted, group.ranks)
    here = sorted(next(r for r in layout.shard_groups(experts=experts) if own in r))
    replicas = sorted(next(ranks for ranks in layout.copies if own in ranks))
    what = f"stage {stage}'s parameters of {group.name} are sharded over the ranks {shards}"
    what += f", each with copies on {copies}" if len(copies) > 1 else ""
    if layout.shards == 1 and len(shards) > 1:
        raise ShardedError(
            f"{what}, and PipelineTrainer has no mesh with {shard!r}: give it "
            f"mesh=init_device_mesh(..., mesh_dim_names=({PIPELINE!r}, {shard!r})), and {call}"
        )
    if (shards, copies) != (here, replicas):
        wanted = f"{here}" + (f", each with copies on {replicas}" if len(replicas) > 1 else "")
        raise ShardedError(f"{what}; along the trainer's mesh these are {wanted}: {call}")


def _check_all_sharded(modules: Mapping[int, nn.Module], sharded: Collection[int]) -> None:
    """Not sharded here by itself: which modules are a group, and in which precision, is for whoever
    knows the model to say.
    """
    for stage, module in modules.items():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in sharded:
                raise PipelineError(
                    f"the mesh has {SHARD!r}, and parameter {name!r} of stage {stage} is not "
                    f"sharded: let the function that builds stages call fully_shard(module, "
                    f"mesh=mesh[{SHARD!r}]) for the whole stage (behind its blocks, if these are "
                    "to be groups of their own), or take a mesh with 'dp_replicate' instead"
                )
