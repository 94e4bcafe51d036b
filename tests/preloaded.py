"""What takes longest to import, for the process that `tests.interpreters` starts others from.

Nothing of autosplit. The collector leaves it alone in all of them.
"""

from __future__ import annotations

import contextlib
import gc

import torch._dynamo
import torch._functorch.aot_autograd
import torch._inductor.decomposition
import torch.distributed.pipelining  # noqa: F401

with contextlib.suppress(ImportError):
    import transformers.models.llama.modeling_llama  # noqa: F401

gc.freeze()
