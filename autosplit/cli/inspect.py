"""``autosplit inspect`` reports how a model is split."""

from __future__ import annotations

import pathlib
from typing import Any

import click
from torch import Tensor, nn

from autosplit.cli.options import (
    FOLDER,
    backend,
    json_option,
    memory_option,
    setting,
    typed_errors,
)
from autosplit.compare.example import example_of, failures_of
from autosplit.dump import split_figures
from autosplit.errors import AutosplitError
from autosplit.module import SplitModule
from autosplit.splitting import split
from autosplit.text.files import write_json
from autosplit.torch_internals.pytree import tree_flatten, tree_unflatten


def _split(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], factory: str, **options: Any
) -> SplitModule:
    """Split the model, and capture it for these inputs.

    Args:
        model: the model.
        args: the model's positional inputs.
        kwargs: the model's keyword inputs.
        factory: ``MODULE:NAME`` of the factory that made the model, for error texts.
        options: see ``split``.

    Raises:
        PipelineError: the model raises an error for its inputs, also without ``split``.
        AutosplitError: as for ``split``.
    """
    try:
        module = split(model, args, kwargs, **options)
        if not module.functions:  # split graph by graph, as a call finds them
            module(*args, **kwargs)
        return module
    except AutosplitError:
        raise
    except Exception:
        with failures_of(f"the model of {factory}, called without autosplit,"):
            model(*args, **kwargs)
        raise


def _with_grad(leaf: Any) -> Any:
    floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.detach().requires_grad_() if floating else leaf


@click.command()
@click.argument("factory")
@setting
@backend
@click.option(
    "--no-input-grads", is_flag=True, help="Inputs need no gradient, as in a first stage."
)
@memory_option
@click.option("--dump", "folder", type=FOLDER, help="Write the graphs to this folder.")
@click.option("--fold-views", is_flag=True, help="There, write views inside the products.")
@json_option
@typed_errors
def inspect(
    factory: str,
    overrides: dict[str, object],
    backend: str,
    no_input_grads: bool,
    memory: str | int,
    folder: pathlib.Path | None,
    fold_views: bool,
    json_file: pathlib.Path | None,
) -> None:
    """Report how FACTORY's model is split. FACTORY (MODULE:NAME) returns (model, args) or
    (model, args, kwargs).
    """
    model, args, kwargs, _ = example_of(factory, overrides)
    if not no_input_grads:
        leaves, spec = tree_flatten((args, kwargs))
        args, kwargs = tree_unflatten([*map(_with_grad, leaves)], spec)
    module = _split(model, args, kwargs, factory, backend=backend, memory=memory)
    click.echo(module.report())
    if json_file:
        write_json(json_file, {"captures": [*map(split_figures, module.functions)]})
    if folder:
        module.dump(folder, fold_views=fold_views)
        click.echo(f"\nwritten: {folder}")
