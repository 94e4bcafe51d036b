"""What ranks need of autosplit, for the process that `tests.interpreters` starts them from."""

from __future__ import annotations

import autosplit.capture.joint_graph
import autosplit.checkpoint
import autosplit.pipelining
import autosplit.planner
import autosplit.train.run  # noqa: F401
import tests.pipeline.workers
import tests.ranks  # noqa: F401
