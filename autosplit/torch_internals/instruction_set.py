"""Inductor's test of the CPU's instruction set, in another thread."""

from __future__ import annotations

import functools
import os
import threading
from contextlib import AbstractContextManager
from typing import Any

from torch._inductor import config, cpu_vec_isa
from torch._inductor.cpu_vec_isa import VecISA

from .patches import patched


@functools.cache
def start_test() -> tuple[threading.Thread, list[VecISA]]:
    """Start to search for the first instruction set that the CPU and the C++ compiler support.

    Inductor generates its kernels for the first set that works. Inductor's own test compiles and
    loads up to three programs for each set, even after one set works, and the first compilation
    waits for it::

        Inductor   capture | six programs | F generated | I generated | ...
        here       capture | F generated | I generated | ...
                   three programs

    Returns:
        (the thread that searches, a list to which it appends the set).
    """
    usable = list[VecISA]()
    name = "autosplit-instruction-set"
    thread = threading.Thread(target=_append_first, args=(usable,), name=name, daemon=True)
    thread.start()
    return thread, usable


def _append_first(usable: list[VecISA]) -> None:
    """Append the first instruction set that works. Sets of CPUs other than x86 are not tested."""
    supported = cpu_vec_isa.x86_isa_checker()
    for isa in cpu_vec_isa.supported_vec_isa_list:
        if all(name in supported for name in str(isa).split()) and (tested := _copy(isa)):
            usable.append(tested)
            return


def _copy(isa: VecISA) -> VecISA:
    """A copy that is not equal to the original. A test changes the object meanwhile, and results
    are cached for all equal objects.
    """
    kind = type(isa)
    copy: VecISA = type(kind.__name__, (kind,), {})()
    return copy


def testing_one_set() -> AbstractContextManager[Any]:
    """Context in which Inductor's C++ code is compiled for the first instruction set that works."""
    return patched(cpu_vec_isa, "valid_vec_isa_list", _usable_sets)


_test_all_sets = cpu_vec_isa.valid_vec_isa_list


def _usable_sets() -> list[VecISA]:
    """The instruction sets that Inductor may use: only the first that works, unless the user asks
    for another.
    """
    if config.cpp.simdlen is None and "ATEN_CPU_CAPABILITY" not in os.environ:
        thread, usable = start_test()
        thread.join()  # at once in a forked process, which has no such thread
        if usable:
            return usable
    return _test_all_sets()
