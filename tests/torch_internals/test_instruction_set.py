"""Inductor's test of the CPU's instruction set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import cpu_vec_isa
from torch._inductor.cpu_vec_isa import VecISA, valid_vec_isa_list, x86_isa_checker

import autosplit
from autosplit.torch_internals import instruction_set


@pytest.mark.skipif(not x86_isa_checker(), reason="other CPUs have one instruction set")
def test_only_the_best_instruction_set_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another thread; kernels are then compiled without Inductor's own test of all sets."""
    tested = list[str]()

    def build(isa: VecISA, code: str) -> bool:
        tested.append(code)
        return True

    best = str(valid_vec_isa_list()[0])

    def refuse() -> Any:
        raise AssertionError

    instruction_set.start_test.cache_clear()
    monkeypatch.setattr(VecISA, "check_build", build)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", refuse)
    model = autosplit.split(nn.Sequential(nn.Linear(3, 37), nn.Tanh()), backend="inductor")
    model(torch.ones(2, 3)).sum().backward()
    assert tested.count(VecISA._avx_code) == 1
    assert [str(isa) for isa in instruction_set._usable_sets()] == [best]


def test_another_instruction_set_may_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert instruction_set._usable_sets() is valid_vec_isa_list()
