"""The reproducers, one subject a file."""

from __future__ import annotations

from ..case import Case
from . import (
    checkpointing,
    clipping,
    compiled,
    data_parallel,
    few_microbatches,
    functions,
    placement,
    receive_buffers,
    requests,
    scaling,
    several_outputs,
    shapes,
    sharing,
    skips,
    transformers_models,
    unused_inputs,
)

_SUBJECTS = (
    compiled,
    data_parallel,
    checkpointing,
    functions,
    several_outputs,
    sharing,
    unused_inputs,
    receive_buffers,
    skips,
    shapes,
    transformers_models,
    clipping,
    placement,
    few_microbatches,
    scaling,
    requests,
)

CASES: dict[str, Case] = {each.name: each for subject in _SUBJECTS for each in subject.CASES}
