"""``autosplit inspect``: how a model is split."""

from __future__ import annotations

import pathlib
from typing import Any, TypeAlias

import click
import torch
from torch import Tensor, nn

from autosplit.cli.options import backend, folder_to_write, memory_option, setting, typed_errors
from autosplit.compare.workload import Workload, example_of, failures_of, prepared
from autosplit.errors import AutosplitError, PipelineError
from autosplit.module import SplitModule
from autosplit.pipeline.schedule.schedule import check_size
from autosplit.splitting import split
from autosplit.torch_internals.pytree import tree_flatten, tree_unflatten

Example: TypeAlias = "tuple[nn.Module, tuple[Any, ...], dict[str, Any]]"
"""A module with positional and keyword inputs."""


def example_inputs(
    made: Any, factory: str, stages: int, stage: int, *, input_grads: bool
) -> Example:
    """A module with positional and keyword inputs.

    Args:
        made: a Workload, or as for ``example_of``.
        factory: its name, for messages.
        stages: for a Workload, how many stages.
        stage: for a Workload, which one.
        input_grads: whether floating-point inputs need a gradient, as in every stage of a
            pipeline but the first.

    Raises:
        PipelineError: ``made`` is something else, or there is no such stage.
    """
    if isinstance(made, Workload):
        module, args = _stage(made, factory, stages, stage)
        kwargs: dict[str, Any] = {}
    elif (stages, stage) != (1, 0):
        raise PipelineError(
            f"{factory} returned no Workload, which alone knows stages; got stages={stages} and "
            f"stage={stage}"
        )
    else:
        module, args, kwargs = example_of(made, factory)
    leaves, spec = tree_flatten((args, kwargs))
    leaves = [_with_grad(leaf) if input_grads else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(leaves, spec)
    return module, args, kwargs


def split_example(given: Example, factory: str, *, backend: str, memory: str | int) -> SplitModule:
    """The module split, and captured for its inputs.

    Args:
        given: what ``example_inputs`` found.
        factory: its name, for messages.
        backend: see ``split``.
        memory: see ``split``.

    Raises:
        PipelineError: the model fails on its inputs, split or not.
        AutosplitError: as for ``split``.
    """
    model, args, kwargs = given
    try:
        module = split(model, args, kwargs, backend=backend, memory=memory)
        if not module.functions:  # split graph by graph, as a call finds them
            module(*args, **kwargs)
        return module
    except AutosplitError:
        raise
    except Exception:
        with failures_of(f"the model of {factory}, called without autosplit,"):
            model(*args, **kwargs)
        raise


def _stage(
    workload: Workload, factory: str, stages: int, stage: int
) -> tuple[nn.Module, tuple[Any, ...]]:
    if not 0 <= stage < stages:
        raise PipelineError(f"no stage {stage} of {stages}; stages count from 0")
    check_size(stages, 1)
    with failures_of(f"{factory}, of its batch or stages 0 to {stage},"), torch.no_grad():
        value, _ = workload.batch_fn(0, workload.microbatch_size)
        for index in range(stage):
            module = workload.stage_fn(index, stages)
            value = module(*value) if isinstance(value, tuple) else module(value)
        built = workload.stage_fn(stage, stages)
    return built, value if isinstance(value, tuple) else (value,)


def _with_grad(leaf: Any) -> Any:
    floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.detach().requires_grad_() if floating else leaf


@click.command()
@click.argument("factory")
@setting
@backend
@click.option("--stages", default=1, show_default=True, help="For a Workload: stages.")
@click.option("--stage", default=0, show_default=True, help="For a Workload: which one.")
@click.option(
    "--no-input-grads", is_flag=True, help="Inputs need no gradient, as in a first stage."
)
@click.option(
    "--memory",
    default="balanced",
    show_default=True,
    callback=memory_option,
    help="fast, balanced, lean, or the bytes that one microbatch may hold between I and W.",
)
@folder_to_write("--dump", "folder", help="Write the graphs to this folder.")
@typed_errors
def inspect(
    factory: str,
    overrides: dict[str, str],
    backend: str,
    stages: int,
    stage: int,
    no_input_grads: bool,
    memory: str | int,
    folder: pathlib.Path | None,
) -> None:
    """Report how FACTORY's model is split. FACTORY (MODULE:NAME) returns a Workload or
    (model, args) or (model, args, kwargs).
    """
    made = prepared(factory, overrides)()
    given = example_inputs(made, factory, stages, stage, input_grads=not no_input_grads)
    module = split_example(given, factory, backend=backend, memory=memory)
    click.echo(module.report())
    if folder:
        module.dump(folder)
        click.echo(f"\nwritten: {folder}")
