"""``KernelFiles``: the C++ kernels of Inductor's graphs, compiled in few files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch._dynamo.convert_frame import compile_lock
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import CppPythonBindingsCodeCache

from autosplit.errors import BackendError

from .instruction_set import testing_one_set
from .patches import patched

_FILE = 16_000
"""Characters of a file. The C++ compiler takes about as long for so much code as for torch's
header, which it reads for each file.
"""


class _Kernel(NamedTuple):
    """A C++ kernel that Inductor has generated.

    Attributes:
        argument_types: the C++ type of each argument.
        source: source code that defines the function ``kernel``.
    """

    argument_types: Sequence[str]
    source: str


_await_other_kernels = AsyncCompile.wait


@contextlib.contextmanager
def shared_files() -> Iterator[KernelFiles]:
    """Context in which Inductor compiles graphs whose kernels may share files."""
    files = KernelFiles()
    try:
        yield files
    finally:
        files.start_compiling()


class KernelFiles:
    """Compiles the C++ kernels of several graphs in other processes, in few files.

    Inductor compiles a file for each kernel, and waits for the files of each graph. Here kernels
    are collected over several graphs until they fill a file. Only a kernel's first call waits for
    the C++ compiler::

        Inductor   F generated | F's kernels | I generated | I's kernels | W generated | ...
        here       F generated | I generated | W generated | call of F
                                 F's kernels . I's kernels . W's kernels
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[str, dict[str, Any]]] = []  # names, and variables of the module

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Context in which Inductor generates code; the caller holds ``compile_lock``."""

        def collect(compiler: AsyncCompile, scope: dict[str, Any]) -> None:
            kernels = [name for name, value in scope.items() if isinstance(value, _Kernel)]
            self._waiting += [(name, scope) for name in kernels]
            if self._characters() >= _FILE:
                self.start_compiling()
            _await_other_kernels(compiler, scope)

        with (
            patched(AsyncCompile, "wait", collect),
            patched(AsyncCompile, "cpp_pybinding", lambda _, *kernel: _Kernel(*kernel)),
        ):
            yield

    def _characters(self) -> int:
        """Characters of the kernels that wait."""
        return sum(len(scope[name].source) for name, scope in self._waiting)

    def start_compiling(self) -> None:
        """Start to compile the kernels that wait, in one file for each ``_FILE`` characters, but at
        most one for each process.
        """
        threads = get_compile_threads()
        submit = AsyncCompile.submit if threads > 1 else None
        count = min(threads, len(self._waiting), max(1, self._characters() // _FILE))
        with compile_lock, testing_one_set():
            for at in range(count):
                _start_compiling(self._waiting[at::count], submit)
        self._waiting = []


def _start_compiling(
    kernels: Sequence[tuple[str, dict[str, Any]]], submit: Callable[..., Any] | None
) -> None:
    """Start to compile a file of kernels. Functions in their places wait for the file.

    Args:
        kernels: names of the kernels, and variables of the modules that define them.
        submit: runs a function in another process; None: compile at the first call.
    """
    modules: list[Any] = [
        type("Module", (CppPythonBindingsCodeCache,), {"entry_function": f"kernel_{at}"})
        for at in range(len(kernels))
    ]
    source = _file_of([scope[name] for name, scope in kernels])
    load_first = _load_async(modules[0], source, submit)

    def load(module: Any) -> Callable[..., Any]:
        first = load_first()
        loaded = module._load_library_inner(first.__file__, first.key)
        kernel: Callable[..., Any] = getattr(loaded, module.entry_function)
        return kernel

    for (name, scope), module in zip(kernels, modules, strict=True):
        scope[name] = _kernel_at_first_call(name, partial(load, module), scope)


def _load_async(cache: Any, source: str, submit: Callable[..., Any] | None) -> Callable[[], Any]:
    """Start to compile a file if torch's cache lacks it, and return a function that loads it.

    For a file with a header to precompile, torch runs the C++ preprocessor before it looks the file
    up. So the file is first looked up as one without such a header.
    """
    missing: list[Any] = []
    members = {"cache": {}, "_get_uncompiled_header": staticmethod(lambda device: None)}
    without_header: Any = type("WithoutHeader", (cache,), members)
    load: Callable[[], Any] = without_header.load_async(source, submit_fn=missing.append)
    return cache.load_async(source, submit_fn=submit) if missing else load


# Headers of the bindings, which cannot be included inside of a namespace.
_INCLUDES = (
    "#define PY_SSIZE_T_CLEAN",
    *(f"#include <{header}>" for header in ("Python.h", "sstream", "cstdlib", "cerrno")),
)


def _file_of(kernels: Sequence[_Kernel]) -> str:
    """C++ source of several kernels, each in a namespace with its binding, which makes the file a
    Python module named as the kernel.
    """
    lines = (line for kernel in kernels for line in kernel.source.splitlines())
    parts = [*_INCLUDES, *dict.fromkeys(line for line in lines if line.startswith("#include"))]
    for at, kernel in enumerate(kernels):
        name = f"kernel_{at}"
        arguments = ", ".join(
            f"parse_arg<{kind.replace('const ', '')}>(args, {number})"
            for number, kind in enumerate(kernel.argument_types)
        )
        binding = CppPythonBindingsCodeCache.suffix_template.format(
            arg_len=len(kernel.argument_types),
            call_entry_func=f"{name}({arguments}); Py_RETURN_NONE;",
            entry_func=name,
            extra_parse_arg="",
        )
        parts += [f"namespace {name}_file {{", f"#define kernel {name}", kernel.source]
        parts += ["#undef kernel", binding, "}"]
    return "\n".join(parts)


def _kernel_at_first_call(
    name: str, load: Callable[[], Callable[..., Any]], scope: dict[str, Any]
) -> Callable[..., Any]:
    """A function in place of a kernel, which loads the kernel and puts it into the scope.

    The function raises BackendError if the kernel cannot be compiled.
    """

    def first_call(*args: Any) -> Any:
        try:
            scope[name] = compiled = load()
        except Exception as error:
            raise BackendError(
                f"backend 'inductor' cannot compile the kernel {name} ({type(error).__name__}: "
                f"{error}); backend='eager' runs every graph that can be split"
            ) from error
        return compiled(*args)

    return first_call
