"""A thousand queues and changes of them, judged by the rules and by the model, which know nothing
of each other.
"""

from __future__ import annotations

import pytest

from tests.pipeline.validation.programs import judge

from .mutations import case
from .player import play


@pytest.mark.parametrize("one_connection", [False, True])
def test_no_disagreement(one_connection: bool) -> None:
    results = {True: 0, False: 0}  # over one connection, the model takes making for a launch
    for seed in range(1000):
        program, communicators = case(seed, eager=one_connection)
        verdict = play(program, communicators, one_connection=one_connection)
        assert judge(program, communicators, one_connection) == verdict.ends, (seed, verdict)
        results[verdict.ends] += 1
    assert min(results.values()) > 250
