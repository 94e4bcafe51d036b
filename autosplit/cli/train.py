"""``autosplit train``: train a language model on a file of text."""

from __future__ import annotations

import pathlib
from typing import Any

import click

from .options import file_to_write, folder_to_write, setting, typed_errors

_COUNT = click.IntRange(min=1)


@click.command()
@click.argument("model")
@setting
@click.option(
    "--pp", "ranks", default=2, show_default=True, type=_COUNT, help="Stages, one a rank."
)
@click.option(
    "--data",
    required=True,
    type=click.Path(path_type=pathlib.Path),
    help="A file of text: tokens of the folder's tokenizer, else bytes.",
)
@click.option("--steps", type=_COUNT, help="At which to end; default: one pass through the text.")
@click.option("--batch", type=_COUNT, help="Windows of text in a step; default: --microbatches.")
@click.option("--microbatches", type=_COUNT, help="Default: two a rank.")
@click.option("--length", default=128, show_default=True, type=_COUNT, help="Tokens in a window.")
@click.option("--schedule", default="1f1b", show_default=True, help="See autosplit simulate.")
@click.option("--lr", "learning_rate", default=1e-3, show_default=True, help="Of AdamW.")
@click.option("--memory-limit", help="Most that a rank may hold, such as 12GiB.")
@click.option("--seed", default=0, show_default=True, help="Of dropout; each rank has its own.")
@click.option("--estimate", is_flag=True, help="Cut by FLOPs and bytes; measure nothing.")
@folder_to_write("--checkpoint", help="Folder of the run's checkpoint.")
@click.option("--every", type=_COUNT, help="Steps between checkpoints; default: one at the end.")
@click.option("--resume", is_flag=True, help="Go on from the checkpoint, if there is one.")
# torchrun takes --log for one of its own.
@file_to_write("--history", help="File of JSON lines, one a step.")
@typed_errors
def train(**options: Any) -> None:
    """Train MODEL on a file of text, cut over --pp ranks of this machine, or under torchrun over
    any. MODEL is a folder of transformers with config.json, and weights or none; such a file; or
    MODULE:NAME, which returns a model that gives logits of token ids.
    """
    try:
        from autosplit.train.language_model import TrainSettings
        from autosplit.train.run import train as run
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise click.ClickException(
            "autosplit train needs transformers: pip install 'autosplit[train]'"
        ) from error
    report = run(TrainSettings(**options))
    if report is not None:
        click.echo(report)
