"""Calls of graphs that Inductor compiled."""

from __future__ import annotations

import torch
from torch import nn

import autosplit


def test_a_profiler_sees_the_name_of_each_graph_and_results_stay_equal() -> None:
    module = autosplit.split(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend="inductor")
    x = torch.randn(2, 4)
    plain = module(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        profiled = module(x)
    assert torch.equal(plain, profiled)
    assert any("CompiledFxGraph" in event.name for event in profile.events())
