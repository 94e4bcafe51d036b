"""What takes longest to import, for the process that `tests.interpreters` starts others from.

Nothing of autosplit. It is not frozen: a capture in a process that froze its objects counts them.
"""

from __future__ import annotations

import contextlib

import torch._dynamo
import torch._functorch.aot_autograd
import torch._inductor.decomposition
import torch.distributed.pipelining  # noqa: F401

from tests.cheap_tracing import trace_cheaply

with contextlib.suppress(ImportError):
    import transformers.models.llama.modeling_llama  # noqa: F401

trace_cheaply()
