"""Imports that take long, for the process that `tests.interpreters` starts others from.

Nothing of autosplit. Objects are not frozen: a capture in a process that froze some counts them.
"""

from __future__ import annotations

import contextlib

import pytest  # noqa: F401  (modules of tests, which the processes run functions of, import it)
import sympy.tensor.tensor  # noqa: F401
import torch._dynamo
import torch._inductor.decomposition
import torch._inductor.fx_passes
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.experimental
import torch.distributed.tensor.parallel
import torch.export._trace
from torch._dynamo.backends.registry import list_backends
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing

from tests.cheap_tracing import seed_cheaply, trace_cheaply

with contextlib.suppress(ImportError):
    import transformers.models.llama.modeling_llama  # noqa: F401

list_backends()  # which Dynamo imports with the first capture
trace_cheaply()
seed_cheaply()


def capture_once() -> None:
    """Fill the caches of torch that each process fills with its first capture."""
    module, x = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()), torch.ones(2, 2)
    graph = dynamo_graph_capture_for_export(module)(x)
    with tracing(TracingContext(graph.meta["fake_mode"])), contextlib.ExitStack() as stack:
        aot_export_joint_with_descriptors(stack, graph, (x,))
    torch._dynamo.reset()


if not torch.backends.cuda.is_built():  # autograd's threads for GPUs would not survive a fork
    capture_once()
