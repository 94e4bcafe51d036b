"""Shard stages that the user has not sharded: call FSDP2's ``fully_shard`` along "dp_shard", with
these parameter groups:

    blocks     entries of lists, such as "layers.0", whose parameters no other module has
    the stage  all other parameters: embeddings, norms, heads, and what several blocks share
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autosplit.errors import PipelineError
from autosplit.mesh.dimensions import CONTEXT, REPLICATE, SHARD
from autosplit.ranks.groups import Groups
from autosplit.text.figures import nearest
from autosplit.torch_internals.distributed import flattened_mesh, fsdp_part
from autosplit.trainer.replicated_parameters import broadcast_from
from autosplit.trainer.sharded_optimizer import check_group, check_replicas_built_alike
from autosplit.trainer.stage_modules import StageSource

if TYPE_CHECKING:
    from autosplit.trainer.trainer_options import TrainerOptions

_OPTIONS = ("mp_policy", "reshard_after_forward", "groups")


def sharding_problem(options: Mapping[str, Any], mesh: DeviceMesh | None) -> str:
    """Return an error text if ``StageOptions(sharding=...)`` is wrong; empty if it is right."""
    for name in options:
        if name not in _OPTIONS:
            return (
                f"unknown option {name!r} in sharding; known: {', '.join(_OPTIONS)}"
                f"{nearest(name, _OPTIONS)}"
            )
    if options and SHARD not in (() if mesh is None else mesh.mesh_dim_names or ()):
        return f"sharding has no effect without a mesh dimension {SHARD!r}: leave it out"
    return ""


def shard_by_default(
    modules: Mapping[int, nn.Module], source: StageSource, options: TrainerOptions, groups: Groups
) -> frozenset[int]:
    """Shard a rank's stages along "dp_shard"; collective over all ranks.

    Parameters and whole stages that the user has sharded stay unchanged.

    Args:
        modules: the stages by index.
        source: the source of all stages.
        options: the trainer's options.
        groups: the trainer's process groups.

    Returns:
        The ``id`` of each parameter that stays whole: scalars, which FSDP2 does not shard.

    Raises:
        PipelineError: one group's parameters have several dtypes or sparse gradients, or a plan's
            stages were captured without the dtypes of ``mp_policy``.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard  # takes long to import

    check_replicas_built_alike(modules, groups)
    arguments = _arguments(source, options, groups)
    choose = arguments.pop("groups", None)
    whole, sharded = set[int](), set[int]()
    first, peers = groups.root_and_group(groups.layout.shard_groups())
    for index, module in modules.items():
        plain = list(_unsharded(module))
        is_new = fsdp_part(module) is None
        if isinstance(module, FSDPModule) or not any(is_new or p.requires_grad for p in plain):
            continue
        broadcast_from(plain, first, peers, groups)
        scalars: Any = {p for p in plain if p.ndim == 0}
        whole.update(map(id, scalars))
        remaining = {id(p) for p in plain if p.ndim}
        names = group_names(module, choose) if source.groups is None else source.groups
        parts = dict(module.named_modules())
        for part in [*(parts[name] for name in names if name in parts), module]:
            if isinstance(part, FSDPModule):
                continue
            group = {name: p for name, p in part.named_parameters() if id(p) in remaining}
            remaining.difference_update(map(id, group.values()))
            trained = {name: p for name, p in group.items() if p.requires_grad}
            check_group(index, part, trained, f"a mesh with {SHARD!r}")
            fully_shard(part, ignored_params=scalars, **arguments)
        sharded.update(id(p) for p in plain if p.ndim)
    if source.model is not None:
        from autosplit.planner.meta_model import move_to_meta  # cutting has imported it

        move_to_meta(source.model, sharded)
    return frozenset(whole)


def _arguments(source: StageSource, options: TrainerOptions, groups: Groups) -> dict[str, Any]:
    """Return the arguments of ``fully_shard``, and "groups" if the user chooses them."""
    arguments = {"mesh": _shard_mesh(options.mesh), **options.stages.sharding}
    policy = arguments.get("mp_policy")
    if source.wiring is not None and policy is not None:
        if not source.cut and (policy.param_dtype or policy.output_dtype):
            raise PipelineError(
                f"the stages of a plan have the dtypes of its capture, but sharding has {policy}: "
                "pass the whole model to PipelineTrainer, which then captures it in these dtypes"
            )
        # The captured graphs have the casts of the whole model.
        policy = dataclasses.replace(policy, cast_forward_inputs=False, output_dtype=None)
        arguments["mp_policy"] = policy
    if len(groups.layout.pipeline) > 1:
        # Otherwise each microbatch of a step would gather the stage again.
        arguments.setdefault("reshard_after_forward", False)
    return arguments


def group_names(
    model: nn.Module, choose: Callable[[str, nn.Module], bool] | None = None
) -> tuple[str, ...]:
    """Return the names of the modules that are parameter groups of their own, inner ones first.

    Args:
        model: a stage or a whole model.
        choose: ``choose(name, module)`` says whether a module is a group; None: the outermost
            entries of lists. Modules without parameters, and modules whose parameters other modules
            have as well, are never groups.
    """
    readers, names = _uses(model), list[str]()
    for name, part in model.named_modules():
        inside = _uses(part)
        if not name or not inside or any(readers[key] > count for key, count in inside.items()):
            continue
        if choose is not None:
            is_group = choose(name, part)
        else:
            is_entry = name.rpartition(".")[2].isdigit()
            is_group = is_entry and not any(name.startswith(f"{outer}.") for outer in names)
        if is_group:
            names.append(name)
    return tuple(reversed(names))


def _uses(module: nn.Module) -> Counter[int]:
    """Maps the ``id`` of each parameter to the number of names that it has in a module."""
    return Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))


def _shard_mesh(mesh: Any) -> DeviceMesh:
    """The submesh over which a stage is sharded. Its first dimension is "dp_replicate", if the mesh
    has that dimension.

    Raises:
        PipelineError: "dp_replicate" comes after the dimensions of the shards.
    """
    names, shard = list(mesh.mesh_dim_names), SHARD
    if REPLICATE in names and names.index(REPLICATE) > names.index(SHARD):
        raise PipelineError(
            f"the mesh has its dimensions in the order {', '.join(names)}, in which torch cannot "
            f"shard over {SHARD!r} with copies: name {REPLICATE!r} before {SHARD!r} in "
            "init_device_mesh(..., mesh_dim_names=...)"
        )
    if CONTEXT in names:
        shard = "fsdp"
        flattened_mesh(mesh, (SHARD, CONTEXT), shard)
    part: DeviceMesh = mesh[(REPLICATE, shard) if REPLICATE in names else (shard,)]
    return part


def _unsharded(module: nn.Module) -> Iterator[Tensor]:
    """The parameters that ``fully_shard`` has not sharded."""
    sharded: set[int] = set()
    if fsdp_part(module) is not None:
        from autosplit.torch_internals.fsdp import ParameterGroup

        groups = ParameterGroup.within(module)
        sharded = {id(p) for group in groups for p in group.sharded_parameters}
    return (p for p in module.parameters() if id(p) not in sharded)
