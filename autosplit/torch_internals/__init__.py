"""Private API of torch, by subject; the installed version of torch, and the oldest supported one.

What differs between them in how torch.distributed.pipelining drives stages, and what sees to it
(defects of capture: ``autosplit.capture.workarounds``). Nothing asks for the version:

| torch | what | seen to by |
|---|---|---|
| 2.11 | shapes are found in another way, and once, also if training becomes evaluation | \
``pipelining/agreement.py``, in all versions alike |
| 2.11 | connects a rank with itself | ``pipelining_stage.py`` leaves these messages out |
| 2.11, 2.12 | ``step()`` takes no ``loss_kwargs`` | |
| 2.14 | stages keep copies of buffers while shapes are found | ``pipelining_stage.py`` keeps none |
| 2.15 | a reduction of gradients is begun and waited for apart, or put off to a later step | \
``pipelining/stage.py``, ``pipelining/step.py`` |
| 2.15 | pairs of ranks may have groups of their own | ``pipelining_stage.py`` |
| 2.15 | a context around forwards | ``pipelining_stage.py`` refuses it |
| 2.15 | files of a schedule's actions list where sends are waited for | ``distributed.py`` |
"""

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
