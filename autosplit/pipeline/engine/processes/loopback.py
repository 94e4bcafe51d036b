"""What ranks of one machine say to each other stays on it: sockets that no other host reaches."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

_ADDRESS = "127.0.0.1"
_NAMES = ("lo", "lo0")


def serve_store(timeout: float) -> dist.TCPStore:  # type: ignore[name-defined]  # not in __all__
    """A store that processes of this machine reach, on ``store.port``.

    Left to itself, TCPStore listens on all interfaces, so it gets a socket that is bound already.

    Args:
        timeout: seconds for a wait.
    """
    with socket.socket() as listener:
        listener.bind((_ADDRESS, 0))
        return dist.TCPStore(  # type: ignore[attr-defined]  # documented, but not in __all__
            _ADDRESS,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=listener.detach(),
        )


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Have process groups that are made inside listen on the loopback interface.

    Gloo takes that of the machine's name otherwise, NCCL any. Whoever has named one is obeyed.
    """
    interface = next((name for _, name in socket.if_nameindex() if name in _NAMES), None)
    wanted = {"GLOO_SOCKET_IFNAME": f"{interface}", "NCCL_SOCKET_IFNAME": f"={interface}"}
    added = [name for name in wanted if interface is not None and name not in os.environ]
    os.environ.update({name: wanted[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
