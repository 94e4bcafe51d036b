"""Imports of ranks, for the process that `tests.interpreters` starts them from; and how little they
measure, also where an example or a page launches them.
"""

from __future__ import annotations

import autosplit.mesh.costs
import autosplit.planner.costs  # noqa: F401
import examples.language_model  # noqa: F401
from tests.kept_ranks import measure_cheaply, search_cheaply

measure_cheaply()
search_cheaply()
