"""Use of torch's private API, a file for each subject; the installed and the oldest supported
version of torch.

The supported versions differ in how torch.distributed.pipelining drives stages. This table lists
the differences and the code that handles them. The code does not ask for the version. (For defects
of capture, see ``autosplit.capture.workarounds``.)

| torch | difference | handled by |
|---|---|---|
| 2.11 | infers shapes in another way, and only once, even if evaluation follows training | \
``pipelining/agreement.py``, in the same way for all versions |
| 2.11 | connects a rank with itself | ``pipelining_stage.py`` omits these messages |
| 2.11, 2.12 | ``step()`` has no ``loss_kwargs`` | |
| 2.14 | stages copy buffers during shape inference | ``pipelining_stage.py`` copies none |
| 2.15 | a gradient reduction starts and ends in two actions, or in a later step | \
``pipelining/stage.py``, ``pipelining/step.py`` |
| 2.15 | pairs of ranks may have their own process groups | ``pipelining_stage.py`` |
| 2.15 | a context around forwards | ``pipelining_stage.py`` refuses it |
| 2.15 | files of a schedule's actions list the waits for sends | ``distributed.py`` |
"""

from __future__ import annotations

import torch

OLDEST = (2, 11)
"""Oldest supported version: earlier Dynamo cannot export a capture together with its guards."""

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""Major and minor version of the installed torch."""

if TORCH < OLDEST:
    raise ImportError(
        f"autosplit needs torch {OLDEST[0]}.{OLDEST[1]} or later and found {torch.__version__}; "
        f"run pip install 'torch>={OLDEST[0]}.{OLDEST[1]}'"
    )
