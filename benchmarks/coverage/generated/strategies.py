"""Hypothesis strategies for plans. Simple comes first: examples shrink towards it."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from .functions import BINARY, UNARY
from .layers import LAYERS
from .plan import Plan, Step

OUTPUTS = ("value", "view", "mean", "detached", "index", "nested", "none")
REACH = 3  # how far back a step looks


def steps() -> st.SearchStrategy[Step]:
    near = st.integers(0, REACH)
    layer = st.builds(
        Step,
        st.sampled_from(sorted(LAYERS)),
        st.tuples(near),
        st.integers(0, 1),
        frozen=st.sampled_from([False, False, False, True]),
        evaluating=st.sampled_from([False, False, False, True]),
    )
    unary = st.builds(Step, st.sampled_from(sorted(UNARY)), st.tuples(near))
    binary = st.builds(Step, st.sampled_from(sorted(BINARY)), st.tuples(near, near))
    return st.one_of(layer, unary, binary)


def plans(longest: int = 8) -> st.SearchStrategy[Plan]:
    """Plans of one to ``longest`` steps."""
    output = st.tuples(st.sampled_from(OUTPUTS), st.integers(0, longest))
    return st.builds(
        Plan,
        st.lists(steps(), min_size=1, max_size=longest).map(tuple),
        st.lists(output, max_size=2).map(lambda more: (("value", 0), *more)),
        st.sampled_from(["tuple", "single", "dict"]),
        tied=st.booleans(),
        needs_grad=st.sampled_from([(True, False), (True, True), (False, False), (False, True)]),
        strided=st.booleans(),
        training=st.sampled_from([True, False]),
        dtype=st.sampled_from([torch.float32, torch.float64]),
    ).filter(lambda plan: not plan.draws_for_nobody)
