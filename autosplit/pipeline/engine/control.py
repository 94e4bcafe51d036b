"""Plain data and sums between ranks, over a group of their own, as text that runs no code.

Peers may be on other hosts, and to unpickle is to run what they send. Here a text can only name
dataclasses, named tuples, enumerations and errors that autosplit has defined and imported, and
fills in their fields without calling anything of theirs.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autosplit.errors import AutosplitError, PipelineError

from .first_error import KeyValueStore

_OWN = "autosplit"
_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "Size": torch.Size,
}


def written(value: object) -> str:
    """``value`` as text.

    Args:
        value: None, numbers, strings, dtypes, tensors on the CPU, containers, and dataclasses,
            named tuples, members of enumerations and errors of autosplit; of an error, type and
            message go.

    Raises:
        PipelineError: something else is in it.
    """
    return json.dumps(_form(value))


def read(text: str | bytes) -> Any:
    """What was ``written``.

    Raises:
        PipelineError: it was not, or by another version of autosplit.
    """
    try:
        return _value(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise PipelineError(
            f"another rank sent what is no data of this version of autosplit: {error}. Run the "
            "same version on every rank"
        ) from error


def _form(value: object) -> Any:
    """JSON's values stand for themselves, all else is an object with one key."""
    if isinstance(value, Enum):
        return _own(value, value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Tensor):
        data = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        sizes = [*value.shape]
        return {"tensor": [_form(value.dtype), sizes, base64.b64encode(data).decode()]}
    if type(value) is list:
        return [_form(each) for each in value]
    if isinstance(value, dict):
        return {"dict": [[_form(key), _form(each)] for key, each in value.items()]}
    if type(value).__name__ in _CONTAINERS and isinstance(value, tuple | set | frozenset):
        return {type(value).__name__: [_form(each) for each in value]}
    if isinstance(value, AutosplitError):
        return _own(value, str(value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _own(value, [*value])
    if is_dataclass(value):
        return _own(value, {field.name: getattr(value, field.name) for field in fields(value)})
    raise PipelineError(
        f"expected plain data to send to another rank, got a {type(value).__name__}: {value!r}"
    )


def _own(value: object, content: object) -> Any:
    kind = type(value)
    if kind.__module__.partition(".")[0] != _OWN:
        raise PipelineError(
            f"expected data of autosplit's own to send to another rank, got a {kind.__module__}."
            f"{kind.__qualname__}"
        )
    return {"own": [[kind.__module__, kind.__qualname__], _form(content)]}


def _value(form: Any) -> Any:
    if isinstance(form, list):
        return [_value(each) for each in form]
    if not isinstance(form, dict):
        return form
    ((kind, content),) = form.items()
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](_value(each) for each in content)
    if kind == "dict":
        return {_value(key): _value(each) for key, each in content}
    if kind == "dtype":
        found = getattr(torch, content)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{content!r} is no dtype")
        return found
    if kind == "tensor":
        return _tensor(*content)
    if kind != "own":
        raise ValueError(f"{kind!r} is no kind of data")
    (module, name), inner = content
    return _made(_class(module, name), _value(inner))


def _tensor(dtype: Any, sizes: list[int], text: str) -> Tensor:
    data = bytearray(base64.b64decode(text))
    # ``frombuffer`` refuses one that is empty.
    flat = (
        torch.frombuffer(data, dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    return flat.view(_value(dtype)).view(sizes)


def _class(module: str, name: str) -> type[Any]:
    """A class of this package that is imported already."""
    if module.partition(".")[0] != _OWN:
        raise ValueError(f"{module}.{name} is none of autosplit's classes")
    found = getattr(sys.modules[module], name)
    if not isinstance(found, type) or found.__module__ != module:
        raise ValueError(f"{module}.{name} is no class")
    return found


def _made(kind: type[Any], content: Any) -> Any:
    """One of a class, of its value, message, items or fields, without calling anything of it."""
    if issubclass(kind, Enum):
        return kind(content)
    if issubclass(kind, AutosplitError) and isinstance(content, str):
        made: Any = kind.__new__(kind)
        made.args = (content,)
        return made
    if isinstance(content, list) and len(getattr(kind, "_fields", ())) == len(content):
        return tuple.__new__(kind, content)
    if not is_dataclass(kind) or {field.name for field in fields(kind)} != content.keys():
        raise ValueError(f"{kind.__name__} is no data of {content!r}")
    made = object.__new__(kind)
    for name, each in content.items():
        object.__setattr__(made, name, each)
    return made


_CPU = torch.device("cpu")


def tell_in(
    value: object, source: int, group: dist.ProcessGroup | None, device: torch.device = _CPU
) -> Any:
    """``value`` of rank ``source`` on all ranks of a group; None for the default group.

    Args:
        value: see ``plain.written``; only that of ``source`` counts.
        source: its rank in the default process group.
        group: over which to tell.
        device: of the messages.

    Raises:
        RuntimeError: a rank did not take part.
    """
    data = _packed(value if dist.get_rank() == source else None, device)
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, source, group=group)
    if dist.get_rank() != source:
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, source, group=group)
    return _unpacked(data)


def gather_in(
    value: object, group: dist.ProcessGroup | None, device: torch.device = _CPU
) -> list[Any]:
    """``value`` of every rank of a group, by rank, on all of them.

    Arguments and errors are those of ``tell_in``.
    """
    data = _packed(value, device)
    count = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(count)]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device), group=group)
    longest = max(map(int, sizes))
    rows = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(count)]
    dist.all_gather(rows, torch.nn.functional.pad(data, (0, longest - len(data))), group=group)
    return [_unpacked(row[: int(size)]) for row, size in zip(rows, sizes, strict=True)]


def _packed(value: object, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(written(value).encode()), dtype=torch.uint8).to(device)


def _unpacked(data: Tensor) -> Any:
    return read(data.cpu().numpy().tobytes())


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

    Attributes:
        rank: this rank's number here.
        ranks: how many there are.
        members: see above.
        losing: see above.
    """

    def __init__(
        self, members: Sequence[int], own: int, group: dist.ProcessGroup | None, losing: Losing
    ) -> None:
        self.members = tuple(members)
        self.rank = self.members.index(own)
        self.ranks = len(self.members)
        self._group = group
        self.losing = losing

    @property
    def group(self) -> dist.ProcessGroup:
        """What connects the ranks."""
        if self._group is None:
            raise PipelineError("this trainer was closed: build a new one")
        return self._group

    @property
    def store(self) -> KeyValueStore:
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
        """
        if self.ranks > 1:
            origin = self.members[source]
            with self.losing(OTHERS if source == self.rank else f"rank {origin}"):
                value = tell_in(value, origin, self.group)
        return value or ""

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank, by rank; see ``written`` for what it may be.

        Raises:
            LostPeerError: some rank did not take part.
        """
        if self.ranks == 1:
            return [value]
        with self.losing(OTHERS):
            rows = gather_in(value, self.group)
        # The members of a group are in the order of their numbers in the default one.
        return [rows[sorted(self.members).index(each)] for each in self.members]
