"""Plain data and sums between ranks, over a group of their own, as bytes that run no code.

Peers may be on other hosts, and to unpickle is to run what they send. Here torch's weights-only
reading makes numbers, texts, tensors and containers, and of classes only the dataclasses, named
tuples, enumerations and errors that autosplit has defined and imported.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import is_dataclass
from enum import Enum
from io import BytesIO
from pickle import PicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from autosplit.errors import AutosplitError, PipelineError
from autosplit.text.figures import few

_TEXT = b"text "  # what most steps send; torch's files begin with other bytes
_READING = threading.Lock()  # which classes torch may make is its own global state


def written(value: object) -> bytes:
    """``value`` as bytes.

    Args:
        value: None, numbers, strings, dtypes, tensors on the CPU, containers, and dataclasses,
            named tuples, members of enumerations and errors of autosplit.

    Raises:
        PipelineError: something else is in it.
    """
    if isinstance(value, str):
        return _TEXT + value.encode()
    file = BytesIO()
    try:
        torch.save(value, file)
        _classes(file)
    except (ValueError, AttributeError, TypeError, PicklingError) as error:
        raise PipelineError(
            f"expected plain data, and data of autosplit's own, to send to another rank; {error}: "
            f"{value!r}"
        ) from error
    return file.getvalue()


def read(data: bytes) -> Any:
    """What was ``written``.

    Raises:
        PipelineError: it was not, or by another version of autosplit.
    """
    try:
        if data.startswith(_TEXT):
            return data.removeprefix(_TEXT).decode()
        file = BytesIO(data)
        with _READING, safe_globals(_classes(file)):
            return torch.load(file, "cpu", weights_only=True)
    except Exception as error:  # whatever torch makes of bytes that are none of its own
        raise PipelineError(
            f"another rank sent what is no data of this version of autosplit: {error}. Run the "
            "same version on every rank"
        ) from error


def _classes(file: BytesIO) -> list[Any]:
    """The classes that a file names beside torch's own plain data; all are of this package, hold
    nothing but data, and are imported already.
    """
    file.seek(0)
    found = [_class(name) for name in get_unsafe_globals_in_checkpoint(file)]
    file.seek(0)
    return found


def _class(path: str) -> type[Any]:
    if path == "builtins.frozenset":
        return frozenset
    module, _, name = path.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    if (
        isinstance(found, type)
        and path.startswith("autosplit.")
        and found.__module__ == module
        and (
            is_dataclass(found)
            or hasattr(found, "_fields")
            or issubclass(found, Enum | AutosplitError)
        )
    ):
        return found
    raise ValueError(f"{path} is none of autosplit's classes of data")


_CPU = torch.device("cpu")


def tell_in(value: object, source: int, group: dist.ProcessGroup, doing: str = "") -> Any:
    """``value`` of rank ``source`` on all ranks of a group.

    Args:
        value: see ``written``; only that of ``source`` counts.
        source: its rank in the default process group.
        group: over which to tell.
        doing: the call that this is part of, in words.

    Raises:
        RuntimeError: a rank did not take part.
        PipelineError: a rank is in another call.
    """
    data = _packed(value if dist.get_rank() == source else None, doing, _CPU)
    size = torch.tensor([len(data)], device=_CPU)
    dist.broadcast(size, source, group=group)
    if dist.get_rank() != source:
        data = torch.empty(int(size), dtype=torch.uint8, device=_CPU)
    dist.broadcast(data, source, group=group)
    theirs, heard = _unpacked(data)
    _check_calls({source: theirs, dist.get_rank(): doing})
    return heard


def gather_in(
    value: object,
    group: dist.ProcessGroup | None,
    device: torch.device = _CPU,
    doing: str = "",
) -> list[Any]:
    """``value`` of every rank of a group, by rank, on all of them; None for the default group.

    Arguments and errors are those of ``tell_in``; messages lie on ``device``.
    """
    data = _packed(value, doing, device)
    count = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(count)]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device), group=group)
    longest = max(map(int, sizes))
    rows = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(count)]
    dist.all_gather(rows, torch.nn.functional.pad(data, (0, longest - len(data))), group=group)
    heard = [_unpacked(row[: int(size)]) for row, size in zip(rows, sizes, strict=True)]
    members = dist.get_process_group_ranks(group)
    _check_calls({rank: call for rank, (call, _) in zip(members, heard, strict=True)})
    return [each for _, each in heard]


def _packed(value: object, doing: str, device: torch.device) -> Tensor:
    data = doing.encode() + b"\0" + written(value)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _unpacked(data: Tensor) -> tuple[str, Any]:
    call, _, value = data.cpu().numpy().tobytes().partition(b"\0")
    return call.decode(errors="replace"), read(value)


def _check_calls(calls: Mapping[int, str]) -> None:
    """What ranks in different calls tell each other would be taken for something else."""
    if len({*calls.values()}) > 1:
        ranks: dict[str, list[str]] = {}
        for rank, call in sorted(calls.items()):
            ranks.setdefault(call, []).append(f"rank {rank}")
        told = "; ".join(f"{few(at, 8)} in {call}" for call, at in ranks.items())
        raise PipelineError(
            f"ranks are in different calls of one trainer: {told}. Every rank makes the same calls "
            "in the same order: let none stand under a condition such as `if rank == 0`"
        )


OTHERS = "the other ranks"

Losing = Callable[[str], AbstractContextManager[None]]
"""Waits for what it is told, see ``Groups.losing``."""


class Control:
    """Plain data and sums over some ranks, on the host.

    Args:
        members: the ranks, as the default process group numbers them, in the order in which they
            are numbered here.
        own: this rank's number in the default process group.
        group: connects them over Gloo; None for a single one.
        losing: waits for them.
        doing: the call that this rank is in, in words.

    Attributes:
        rank: this rank's number here.
        ranks: how many there are.
        members: see above.
        losing: see above.
    """

    def __init__(
        self,
        members: Sequence[int],
        own: int,
        group: dist.ProcessGroup | None,
        losing: Losing,
        doing: Callable[[], str] = str,
    ) -> None:
        self.members = tuple(members)
        self.rank = self.members.index(own)
        self.ranks = len(self.members)
        self._group, self._doing = group, doing
        self.losing = losing

    @property
    def group(self) -> dist.ProcessGroup:
        """What connects the ranks."""
        if self._group is None:
            raise PipelineError("this trainer was closed: build a new one")
        return self._group

    @property
    def store(self) -> Store:
        """A key-value store that the ranks share and nobody else writes to."""
        return self.group.get_group_store()

    def let_go(self) -> None:
        """Let go of the group."""
        self._group = None

    def meet(self) -> None:
        """Wait until every rank is here.

        Raises:
            LostPeerError: some rank did not come.
        """
        if self.ranks > 1:
            self.sum(torch.zeros(1, device="cpu"))

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` (CPU) over all ranks, in place; it comes back only if all took part.

        Raises:
            LostPeerError: some rank did not.
        """
        return tensor if self.ranks == 1 else self.start_sum(tensor)()

    def start_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to sum ``tensor`` (CPU) over all ranks, in place; what it gives waits for the sum,
        and raises LostPeerError where some rank did not take part.

        Raises:
            LostPeerError: a rank is known to be gone.
        """
        with self.losing(OTHERS):
            work = dist.all_reduce(tensor, group=self.group, async_op=True)

        def wait() -> Tensor:
            if work is not None:
                with self.losing(OTHERS):
                    work.wait()
            return tensor

        return wait

    def announce(self, value: str | None, source: int) -> str:
        """``value`` of rank ``source``, on every rank.

        Raises:
            LostPeerError: some rank did not take part.
            PipelineError: a rank is in another call.
        """
        if self.ranks > 1:
            origin = self.members[source]
            with self.losing(OTHERS if source == self.rank else f"rank {origin}"):
                value = tell_in(value, origin, self.group, self._doing())
        return value or ""

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank, by rank; see ``written`` for what it may be.

        Raises:
            LostPeerError: some rank did not take part.
            PipelineError: a rank is in another call.
        """
        if self.ranks == 1:
            return [value]
        with self.losing(OTHERS):
            rows = gather_in(value, self.group, doing=self._doing())
        # The members of a group are in the order of their numbers in the default one.
        return [rows[sorted(self.members).index(each)] for each in self.members]
