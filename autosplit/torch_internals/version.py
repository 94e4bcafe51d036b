"""The installed version of torch, and the oldest supported one."""

from __future__ import annotations

import torch

OLDEST = (2, 11)
"""Before it, Dynamo does not export a capture together with its guards."""

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""The torch at hand: major and minor version."""

if TORCH < OLDEST:
    raise ImportError(
        f"autosplit needs torch {OLDEST[0]}.{OLDEST[1]} or later and found {torch.__version__}; "
        f"run pip install 'torch>={OLDEST[0]}.{OLDEST[1]}'"
    )
