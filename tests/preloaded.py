"""What takes longest to import, for the process that `tests.interpreters` starts others from.

Nothing of autosplit. It is not frozen: a capture in a process that froze its objects counts them.
"""

from __future__ import annotations

import contextlib

import sympy.tensor.tensor  # noqa: F401
import torch._functorch.aot_autograd
import torch._inductor.decomposition
import torch._inductor.fx_passes
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.experimental
import torch.distributed.tensor.parallel
import torch.export._trace  # noqa: F401
from torch._dynamo.backends.registry import list_backends

from tests.cheap_tracing import seed_cheaply, trace_cheaply

with contextlib.suppress(ImportError):
    import transformers.models.llama.modeling_llama  # noqa: F401

list_backends()  # which Dynamo imports with the first capture
trace_cheaply()
seed_cheaply()
