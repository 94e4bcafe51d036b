"""The command line; each command has a file."""

from __future__ import annotations

import importlib
from typing import cast

import click

_COMMANDS = ("check", "compare", "inspect", "plan", "replay", "simulate")


class _Commands(click.Group):
    """Commands by name. Each is imported when it is called, because most import all of
    autosplit.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"{__name__}.{cmd_name}")
        return cast("click.Command", getattr(module, cmd_name))


@click.group(cls=_Commands)
@click.version_option(package_name="autosplit")
def main() -> None:
    """Split backward passes into input and weight gradients, and drive the halves."""
