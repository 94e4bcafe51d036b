"""An accelerator that is not there, for ``--device fake``: a device of torch's, on the CPU.

Its memory is pages that the host cannot read outside of an operator, so that a process that tries
dies; it has streams, events and generators of its own, none of which do or draw what the CPU's do.
Operators are the CPU's. A stream here is done with all that it was given, so what is not waited for
goes unnoticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

NAME = "fake"
_SOURCE = Path(__file__).parent / "accelerator.cpp"
_BUILT = Path(__file__).parent.parent.parent / "build" / "fake_accelerator"
_MODULE = "_fake_accelerator"


def register() -> None:
    """Make it a device of this process, named ``"fake"``. The first time on a machine it is
    compiled, with ``g++``, for half a minute.
    """
    if hasattr(torch, NAME):
        return
    native = _loaded(_compiled())
    rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module(native))
    generate_methods_for_privateuse1_backend()


def _compiled() -> Path:
    message = f"{torch.__version__} {_SOURCE.read_text()}"
    target = _BUILT / hashlib.sha256(message.encode()).hexdigest()[:16] / f"{_MODULE}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    root = Path(torch.__file__).parent
    headers = [root / "include", root / "include/torch/csrc/api/include"]
    built = target.with_name(f"{os.getpid()}.so")
    command = ["g++", "-O1", "-w", "-std=c++20", "-fPIC", "-shared", str(_SOURCE), "-o", str(built)]
    command += [f"-I{item}" for item in [*headers, sysconfig.get_paths()["include"]]]
    command += [f"-DTORCH_EXTENSION_NAME={_MODULE}", f"-L{root / 'lib'}"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    command += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    subprocess.run(command, check=True)
    built.replace(target)
    return target


def _loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _device_module(native: Any) -> ModuleType:
    """The device module, as ``torch.cuda`` is for CUDA, with the functions that are used."""
    generators = [native.default_generator(at) for at in range(native.device_count())]

    def index(device: Any = NAME) -> int:
        result = torch.device(NAME, device) if isinstance(device, int) else torch.device(device)
        return int(native.current_device() if result.index is None else result.index)

    def get_rng_state(device: Any = NAME) -> Tensor:
        state: Tensor = generators[index(device)].get_state()
        return state

    def set_rng_state(state: Tensor, device: Any = NAME) -> None:
        generators[index(device)].set_state(state)

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    module = ModuleType(f"torch.{NAME}")
    vars(module).update(
        Event=torch.Event,
        Stream=torch.Stream,
        _initialized=True,  # which torch.utils.checkpoint asks
        _is_in_bad_fork=lambda: False,
        current_device=native.current_device,
        device=contextlib.nullcontext,  # there is one
        current_stream=torch.accelerator.current_stream,
        default_generators=generators,
        device_count=native.device_count,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16, torch.float32],
        get_rng_state=get_rng_state,
        is_available=lambda: True,
        is_initialized=lambda: True,
        manual_seed=lambda seed: generators[index()].manual_seed(seed),
        manual_seed_all=manual_seed_all,
        set_device=lambda device: native.set_device(index(device)),
        set_rng_state=set_rng_state,
        stream=lambda stream: stream or contextlib.nullcontext(),
        synchronize=torch.accelerator.synchronize,
    )
    return module
