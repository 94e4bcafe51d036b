"""A link between ranks, or between a rank and its host's memory."""

from __future__ import annotations

import math
from typing import NamedTuple


class Link(NamedTuple):
    """One link: seconds that a message is under way, and bytes that it carries in a second."""

    latency: float = 0.0
    bandwidth: float = math.inf
