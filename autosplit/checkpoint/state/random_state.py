"""States of a rank's random generators, saved and restored."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autosplit.device import generator_state, set_generator_state
from autosplit.errors import CheckpointError

States = Mapping[str, Tensor]
"""Of a rank's generators, by type of device."""


def states(device: torch.device) -> dict[str, Tensor]:
    """Where the CPU's generator stands, and that of ``device`` if it is an accelerator."""
    found = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        found[device.type] = generator_state(device)
    return found


def check_generators(found: States, device: torch.device) -> None:
    """Refuse states that generators cannot take.

    Raises:
        CheckpointError: they are of another kind.
    """
    now = states(device)
    for kind in now.keys() & found.keys():
        expected, came = now[kind], found[kind]
        if came.dtype != torch.uint8 or came.shape != expected.shape:
            raise CheckpointError(
                f"the state of the {kind} generator has {list(came.shape)} {came.dtype}, expected "
                f"{list(expected.shape)} torch.uint8: generators=False leaves them as they are"
            )
    if "cpu" in found:
        torch.Generator().set_state(found["cpu"])  # raises for what is none


def restore_generators(found: States, device: torch.device) -> None:
    """Go on from there."""
    torch.set_rng_state(found["cpu"])
    if device.type != "cpu":
        set_generator_state(device, found[device.type])


def reseed(found: Sequence[States], rank: int) -> None:
    """Seed all generators by where those of other ranks stood, and by the rank.

    Whatever was drawn before has no influence, and no rank draws what another does.
    """
    summary = hashlib.sha256(str(rank).encode())
    for each in found:
        summary.update(bytes(each["cpu"].tolist()))
    torch.manual_seed(int.from_bytes(summary.digest()[:8], "little"))
