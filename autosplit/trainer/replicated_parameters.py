"""Parameters and buffers of which several ranks have copies.

Replicas of the pipeline have copies of all parameters, stages have copies of tied parameters, and
ranks along "tp" have copies of parameters that are not sharded. Copies have equal shapes and
dtypes, start with equal values, and have equal gradients at the end of a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.errors import PipelineError
from autosplit.mesh.dimensions import EXPERT, TENSOR, Place
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.ranks.groups import Groups
from autosplit.torch_internals.autograd import has_tensor_hooks
from autosplit.torch_internals.dtensor import (
    Sharding,
    local_tensor,
    sharding_of,
)
from autosplit.trainer.agreement import difference
from autosplit.trainer.copy_checks import (
    SHARDING_ADVICE,
    check_built_alike,
    check_sharding,
    check_tied_forms,
    find_holders,
    form_of,
    forms_of,
    is_expert,
    stage_tensors,
)
from autosplit.trainer.gradient_buckets import PEERS, LocalCopies
from autosplit.trainer.stage_modules import Holder

Modules: TypeAlias = "Mapping[int, nn.Module]"
"""A rank's stages by index."""

HOOK_ADVICE = (
    "Change the gradient in a hook of optimizer.register_step_pre_hook instead, on each rank that "
    "has the parameter"
)
"""Text for errors: what to do instead of a hook on a parameter."""

PER_GROUP = ("params", "param_names")
"""The keys of an optimizer's parameter group that are no options."""


class ReplicatedParameters:
    """This rank's parameters and buffers of which other ranks, or other stages, have copies.

    Copies are kept equal:

        at the start         all copies get the values of the first
        end of a step        gradients are summed over tied copies, and averaged over replicas
        after the optimizer  buffers get the values of the first replica, as with
                             DistributedDataParallel

    Collective: all ranks must construct it together.

    Args:
        modules: this rank's stages by index.
        shared: groups of (stage, parameter name); each group is one tied parameter of the model.
        schedule: its placement says which ranks have which stage.
        groups: the trainer's process groups.
        gathered_shardings: maps the ``id`` of a parameter of ``fully_shard`` to (parameter, its
            sharding while it is gathered, or None if the rank then has the whole parameter).

    Attributes:
        reduced: this rank's copies of each parameter whose gradient must be reduced, in the same
            order on all ranks that have copies.
        tied_shards: this rank's copies of tied parameters that are sharded. Their reduced gradients
            must be summed over the stages that have them.

    Raises:
        PipelineError: a shared parameter does not exist, is in two groups, or differs between its
            holders; ranks have built a stage differently; or the mesh has "tp" or "ep" and no
            parameter is sharded along it.
        ShardedError: a DTensor is on other ranks than those along "tp" or "ep" in the trainer's
            mesh.
    """

    def __init__(
        self,
        modules: Modules,
        shared: Sequence[Sequence[Holder]],
        schedule: Schedule,
        groups: Groups,
        gathered_shardings: Mapping[int, Sharding | None],
    ) -> None:
        self._modules, self._groups = modules, groups
        self._gathered_shardings = gathered_shardings
        self._shards = {
            name: tensor
            for name, tensor in stage_tensors(modules)
            if id(tensor) in gathered_shardings
        }
        self._layout = groups.layout
        self._tied, self._shared = find_holders(shared, modules, schedule.stages), shared
        whole = self._check_layouts(shared)
        pipeline_ranks: list[tuple[int, ...]] = [(r,) for r in range(len(self._layout.columns))]
        tied_ranks = [
            (tuple(dict.fromkeys([schedule.placement[stage] for stage, _ in holders])), holders)
            for holders in shared
        ]
        # From here on all ranks must make the same collective calls in the same order.
        if self._layout.tensor_ranks > 1:
            for ranks in pipeline_ranks:
                broadcast_from(whole, *self._copy_group(ranks, "tensor"), groups)
        along: dict[str, Sequence[str]] = {"whole": ("replicate", "shard", "inner")}
        along |= {"expert": ("replicate",)} if self._layout.experts else {}
        along |= {"shard": ()} if self._layout.sharded else {}
        self._copy_groups = {
            (ranks, kind): self._copy_group(ranks, *fields)
            for ranks in dict.fromkeys([*pipeline_ranks, *(ranks for ranks, _ in tied_ranks)])
            for kind, fields in along.items()
        }
        self._duplicates: set[int] = set()
        self.tied_shards: list[LocalCopies] = []
        self.reduced = self._equalize_all(tied_ranks)

    # --- at the start -----------------------------------------------------------------------------

    def _copy_group(
        self, pipeline_ranks: Sequence[int], *along: str
    ) -> tuple[int, dist.ProcessGroup | None]:
        """Make the process group of the ranks that have copies of the same tensors as this rank.

        Collective over all ranks.

        Args:
            pipeline_ranks: the ranks within a pipeline that have copies; the first is the source of
                values.
            along: the fields of ``Place`` along which pipelines have copies, such as "replicate".

        Returns:
            (first rank that has a copy, by its number in the default process group; process group,
            or None if only this rank has a copy).
        """
        sets: dict[Place, list[int]] = defaultdict(list)
        equal_fields = dict.fromkeys(along, 0)
        for pipeline_rank in pipeline_ranks:
            column = self._layout.columns[pipeline_rank]
            for rank, place in zip(column, self._layout.places, strict=True):
                sets[place._replace(**equal_fields)].append(rank)
        return self._groups.root_and_group([*sets.values()])

    def _equalize_all(
        self, tied_ranks: Sequence[tuple[tuple[int, ...], Sequence[Holder]]]
    ) -> list[LocalCopies]:
        """Overwrite all copies of each tensor with the first copy's values; collective over all
        ranks.

        Args:
            tied_ranks: for each tied parameter, (ranks of the pipeline that have it, the first
                holder's rank first; its holders).

        Returns:
            The copies whose gradients must be reduced.
        """
        members: list[LocalCopies] = []
        handled = {*self._gathered_shardings}
        for ranks, holders in tied_ranks:
            copies = [*dict.fromkeys([self._tied[at] for at in holders if at in self._tied])]
            if copies:
                handled.update(map(id, copies))
                self._duplicates.update(map(id, copies[self._groups.rank == ranks[0] :]))
                is_shard = self._kind(copies[0]) == "shard"
                kept = self.tied_shards if is_shard else members
                kept += self._equalize(copies, ranks, is_tied=True)
        for tensor in _tensors(self._modules):
            if id(tensor) not in handled:
                members += self._equalize([tensor], (self._groups.rank,))
        return members

    def _equalize(
        self, copies: Sequence[Tensor], ranks: tuple[int, ...], *, is_tied: bool = False
    ) -> list[LocalCopies]:
        """Overwrite all copies of one tensor with the first copy's values; collective over the
        ranks that have copies.

        Returns:
            A list of the copies if their gradient must be reduced; else an empty list.
        """
        first, *duplicates = copies
        source, process_group = self._copy_groups[ranks, self._kind(first)]
        broadcast_from([first], source, process_group, self._groups)
        with torch.no_grad():
            for copy in duplicates:
                local_tensor(copy).copy_(local_tensor(first))
        # The gradient of an expert is a sum over the tokens of all ranks along "ep" already. It
        # needs only the division by the number of shares, which makes it the mean.
        is_shared = duplicates or process_group or self._layout.shares > 1
        if not (first.requires_grad and is_shared):
            return []
        return [LocalCopies(copies, process_group, is_tied)]

    def _kind(self, tensor: Tensor) -> str:
        """Return the kind of ranks that have copies of a tensor, "whole", "expert" or "shard", for
        ``_copy_groups``.
        """
        if id(tensor) in self._gathered_shardings:
            return "shard"
        return "expert" if is_expert(sharding_of(tensor)) else "whole"

    def _sharding(self, tensor: Tensor) -> Sharding | None:
        """Return a tensor's sharding; for a parameter of ``fully_shard``, its sharding while it is
        gathered.
        """
        return self._gathered_shardings.get(id(tensor), sharding_of(tensor))

    def _check_layouts(self, shared: Sequence[Sequence[Holder]]) -> list[Tensor]:
        """Check that stages have equal names, shapes, dtypes and shardings on other ranks;
        collective.

        Returns:
            The parameters that are not sharded along "tp".
        """
        layout, everybody = self._layout, self._groups.everybody
        dimension = EXPERT if layout.experts else TENSOR
        sets = layout.sets("inner" if layout.experts else "tensor")
        own_set = next(ranks for ranks in sets if self._groups.members[self._groups.rank] in ranks)
        whole: dict[int, Tensor] = {}
        parts = 0
        for name, tensor in stage_tensors(self._modules):
            sharding = self._sharding(tensor)
            if sharding is not None:
                parts += 1
                check_sharding(name, sharding, dimension, own_set)
                for process_group in sharding.mesh.get_all_groups():
                    self._groups.add_external_group(process_group)
            elif isinstance(tensor, nn.Parameter):
                whole[id(tensor)] = tensor
        forms = forms_of(self._modules)
        tied = {holder: form_of(parameter) for holder, parameter in self._tied.items()}
        rows = dict(zip(everybody.members, everybody.gather((forms, tied, parts)), strict=True))
        if len(own_set) > 1 and not any(parts for _, _, parts in rows.values()):
            raise PipelineError(
                f"the mesh has {len(own_set)} ranks along {dimension!r}, and no parameter of any "
                f"stage is sharded over them: {SHARDING_ADVICE[dimension]}, or pass a mesh "
                f"without {dimension!r}"
            )
        forms_by_rank = {rank: forms for rank, (forms, _, _) in rows.items()}
        check_built_alike(forms_by_rank, layout.peers, "replicas of the same stages")
        if layout.tensor_ranks > 1:
            check_built_alike(forms_by_rank, sets, "parts of the same stages")
        check_tied_forms(
            shared, {at: form for _, tied, _ in rows.values() for at, form in tied.items()}
        )
        return [*whole.values()]

    def check_optimizers(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Check that all optimizers have the same options for a tied parameter.

        With different options, the copies of a tied parameter would become different. Collective
        over all ranks.

        Args:
            optimizer: this rank's optimizer; None if the rank has no parameters.

        Raises:
            PipelineError: names a tied parameter, and the option that differs.
        """
        options_of: dict[int, Mapping[str, str]] = {}
        for group in [] if optimizer is None else optimizer.param_groups:
            options = {key: repr(value) for key, value in group.items() if key not in PER_GROUP}
            options["the set of options"] = f"{[*options]}"
            options_of |= {id(parameter): options for parameter in group["params"]}
        local = {at: options_of[id(p)] for at, p in self._tied.items() if id(p) in options_of}
        gathered: dict[Holder, Mapping[str, str]] = {}
        for row in self._groups.everybody.gather(local):
            gathered |= row
        for holders in self._shared:
            rows = {at: gathered[at] for at in map(tuple, holders) if at in gathered}
            if (differing := difference(rows)) is not None:
                option, ((first_stage, first_name), first), ((stage, name), value) = differing
                raise PipelineError(
                    f"{first_name!r} of stage {first_stage} and {name!r} of stage {stage} are one "
                    f"tied parameter, but their optimizers have different options: {option} is "
                    f"{first} and {value}. Build both optimizers with the same options"
                )

    # --- in a step --------------------------------------------------------------------------------

    def is_counted(self, parameter: Tensor) -> bool:
        """Whether this rank counts its part of a parameter in sums over the whole model.

        Each element of the model counts once. If several ranks have copies, only the first rank's
        copy counts.
        """
        sharding = self._sharding(parameter)
        is_fsdp = id(parameter) in self._gathered_shardings
        is_split_along = {
            "replicate": False,
            "tensor": sharding is not None and sharding.is_sharded_along(TENSOR),
            "inner": is_expert(sharding) or is_fsdp,
            "shard": is_fsdp,
        }
        place = self._layout.place
        is_first = all(
            is_split or not getattr(place, name) for name, is_split in is_split_along.items()
        )
        return is_first and id(parameter) not in self._duplicates

    def check_hooks(self) -> None:
        """Refuse hooks on tied and on sharded parameters.

        In the whole model, autograd would call the hook with the gradient summed over all stages.
        In a pipeline, no single stage has the sum. FSDP sets the gradient of a shard itself, and
        calls no hook of ``register_hook``.

        Raises:
            PipelineError: names a parameter that has a hook.
        """
        for (stage, name), parameter in self._tied.items():
            if has_tensor_hooks([parameter]):
                raise PipelineError(
                    f"parameter {name!r} of stage {stage} has a hook of register_hook, and is tied "
                    "to parameters of other stages: no stage has the summed gradient that the hook "
                    f"expects. {HOOK_ADVICE}"
                )
        for name, shard in self._shards.items():
            if has_tensor_hooks([shard]):
                raise PipelineError(
                    f"{name} has a hook of register_hook, and is sharded: FSDP, which reduces its "
                    f"gradient, would not call the hook. {HOOK_ADVICE}"
                )

    def broadcast_buffers(self) -> None:
        """Copy the first replica's buffers to all replicas; collective over the replicas.

        Raises:
            LostPeerError: a rank that has a replica did not take part.
        """
        for tensor in _tensors(self._modules):
            if not isinstance(tensor, nn.Parameter):
                self._equalize([tensor], (self._groups.rank,))


@torch.no_grad()
def broadcast_from(
    tensors: Iterable[Tensor],
    source: int,
    process_group: dist.ProcessGroup | None,
    groups: Groups,
) -> None:
    """Overwrite tensors with the values that one rank has; collective over a process group.

    Args:
        tensors: the tensors, with equal shapes and dtypes on all ranks; of a DTensor, this rank's
            part is overwritten.
        source: the rank with the values, by its number in the default process group.
        process_group: the process group of the ranks; None: nothing is done.
        groups: the trainer's process groups.

    Raises:
        LostPeerError: a rank did not take part.
    """
    for tensor in map(local_tensor, tensors) if process_group is not None else ():
        if tensor.numel():
            values = tensor.detach().clone(memory_format=torch.contiguous_format)
            with groups.as_lost_peer(PEERS):
                # As bytes, because some backends lack some dtypes.
                dist.broadcast(values.view(-1).view(torch.uint8), src=source, group=process_group)
            tensor.copy_(values)


def _tensors(modules: Modules) -> list[Tensor]:
    """Return parameters and buffers, each once."""
    return list({id(tensor): tensor for _, tensor in stage_tensors(modules)}.values())
