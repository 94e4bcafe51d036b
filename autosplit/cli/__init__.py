"""The command line: one file a command."""

from __future__ import annotations

import click

from .compare import compare
from .inspect import inspect
from .plan import plan
from .simulate import simulate
from .train import train


@click.group()
@click.version_option(package_name="autosplit")
def main() -> None:
    """Split backward passes into input and weight gradients, and drive the halves."""


for _command in (compare, inspect, plan, simulate, train):
    main.add_command(_command)
