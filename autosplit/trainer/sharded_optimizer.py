"""ZeRO-1: each replica of a stage has the optimizer state of only a part of the parameters.

    F, I, W        a stage's parameters are gathered once a step, as with ``dp_shard``
    end of a step  gradients are reduce-scattered; the optimizer updates this rank's part
    next step      the updated parts are gathered, one action ahead of the stage's first

The trainer calls FSDP2's ``fully_shard(reshard_after_forward=False)`` for its stages, over the
ranks along "dp_replicate". All other code then treats the ranks along "dp_replicate" as ranks along
"dp_shard". Frozen parameters, scalars and parameters that several stages share stay whole on each
replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autosplit.errors import PipelineError
from autosplit.mesh.dimensions import CONTEXT, EXPERT, EXPERT_SHARD, REPLICATE, SHARD
from autosplit.ranks.groups import Groups
from autosplit.torch_internals.autograd import has_tensor_hooks
from autosplit.torch_internals.distributed import fsdp_part
from autosplit.trainer.copy_checks import check_built_alike, forms_of
from autosplit.trainer.replicated_parameters import HOOK_ADVICE, broadcast_from
from autosplit.trainer.stage_modules import Holder


def check_mesh(mesh: DeviceMesh | None) -> None:
    """Check that a mesh has replicas that can share an optimizer's state.

    Raises:
        PipelineError: the mesh has no replicas, or has a dimension that shards parameters already.
    """
    names = () if mesh is None else mesh.mesh_dim_names or ()
    if REPLICATE not in names:
        raise PipelineError(
            "shard_optimizer divides the optimizer's state among replicas of the pipeline, and "
            f"there are none: pass mesh=init_device_mesh(..., mesh_dim_names=('pp', {REPLICATE!r})"
            "), or leave shard_optimizer out"
        )
    for name in (SHARD, EXPERT_SHARD, EXPERT, CONTEXT):
        if name in names:
            raise PipelineError(
                f"shard_optimizer cannot be combined with the mesh dimension {name!r}: call "
                f"fully_shard in the function that builds stages, over {SHARD!r} or "
                f"{EXPERT_SHARD!r}, which shards optimizer state as well, and leave "
                "shard_optimizer out"
            )


def shard_stages(
    modules: Mapping[int, nn.Module],
    shared: Sequence[Sequence[Holder]],
    mesh: DeviceMesh,
    groups: Groups,
) -> frozenset[int]:
    """Shard this rank's stages over the replicas; collective over all ranks.

    Args:
        modules: this rank's stages by index.
        shared: groups of (stage, parameter name); each group is one tied parameter.
        mesh: the replicas of these stages.
        groups: the trainer's process groups.

    Returns:
        The ``id`` of each trained parameter that stays whole.

    Raises:
        PipelineError: a stage is sharded already, or its parameters have several dtypes or sparse
            gradients.
    """
    from torch.distributed.fsdp import fully_shard  # takes long to import

    check_replicas_built_alike(modules, groups)
    tied = {holder for holders in shared for holder in map(tuple, holders)}
    whole: set[int] = set()
    first, replicas = groups.root_and_group(groups.layout.shard_groups())
    for index, module in modules.items():
        if fsdp_part(module) is not None:
            raise PipelineError(
                f"stage {index} is sharded by fully_shard already, which shards optimizer state as "
                "well: name the mesh dimension 'dp_shard', and leave shard_optimizer out"
            )
        broadcast_from(module.parameters(), first, replicas, groups)
        named = [*module.named_parameters(remove_duplicate=False)]
        kept = {p for name, p in named if p.ndim == 0 or (index, name) in tied}
        whole.update(map(id, kept))
        kept.update(p for _, p in named if not p.requires_grad)
        sharded = {name: p for name, p in named if p not in kept}
        check_group(index, module, sharded, "shard_optimizer")
        if sharded:
            fully_shard(module, mesh=mesh, reshard_after_forward=False, ignored_params=kept)
    return frozenset(whole)


def check_replicas_built_alike(modules: Mapping[int, nn.Module], groups: Groups) -> None:
    """Check that replicas have parameters of equal names, shapes and dtypes, which can be sharded
    over the replicas; collective.
    """
    everybody = groups.everybody
    rows = dict(zip(everybody.members, everybody.gather(forms_of(modules)), strict=True))
    check_built_alike(rows, groups.layout.peers, "replicas of the same stages")


def check_group(
    stage: int, module: nn.Module, trained: dict[str, nn.Parameter], option: str
) -> None:
    """Check that one reduce-scatter can carry the gradients of a parameter group, and that no hook
    would be lost.

    Args:
        stage: the stage.
        module: the module that ``fully_shard`` is called for.
        trained: the trained parameters of the group.
        option: text for errors: the user's option that shards the parameters.

    Raises:
        PipelineError: the parameters have several dtypes or a hook of ``register_hook``, or their
            gradients are sparse.
    """
    for name, parameter in trained.items():
        if has_tensor_hooks([parameter]):
            raise PipelineError(
                f"parameter {name!r} of stage {stage} has a hook of register_hook, which would be "
                f"lost: {option} replaces parameters by their shards. {HOOK_ADVICE}"
            )
    names = {parameter.dtype: name for name, parameter in reversed(trained.items())}
    if len(names) > 1:
        dtypes = " and ".join(f"{name!r} {dtype}" for dtype, name in reversed(names.items()))
        raise PipelineError(
            f"{option} needs one dtype for the trained parameters of a group; stage {stage} "
            f"has {dtypes}: convert the parameters to one dtype, or leave {option} out"
        )
    for name, part in module.named_modules():
        if getattr(part, "sparse", False) is True:
            raise PipelineError(
                f"stage {stage}: {option} cannot reduce the sparse gradients of "
                f"{name or type(part).__name__!r}: build it with sparse=False, or leave {option} "
                "out"
            )
