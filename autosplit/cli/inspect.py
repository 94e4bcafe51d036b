"""``autosplit inspect``: how a model is split."""

from __future__ import annotations

import pathlib

import click

from .options import backend, folder_to_write, memory_option, setting, typed_errors


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
    from autosplit.compare.factory import prepared

    from .inspection import example_inputs, split_example

    made = prepared(factory, overrides)()
    given = example_inputs(made, factory, stages, stage, input_grads=not no_input_grads)
    module = split_example(given, factory, backend=backend, memory=memory)
    click.echo(module.report())
    if folder:
        module.dump(folder)
        click.echo(f"\nwritten: {folder}")
