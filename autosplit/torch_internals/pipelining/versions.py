"""Which torch's pipelining is as it was written down in this folder."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, _utils, schedules
from torch.distributed.pipelining import stage as stages

from autosplit.errors import PipelineError
from autosplit.torch_internals import version

SUPPORTED = ((2, 13), (2, 14))
"""Before them stages do not agree on shapes by these methods, after them they keep other state."""

_NAMES: Mapping[str, Sequence[str]] = {
    "__init__": ("submodule", "stage_index", "num_stages", "device", "group"),
    "clear_runtime_states": (),
    "forward_one_chunk": ("fwd_chunk_id", "args", "kwargs", "save_forward_output"),
    "backward_one_chunk": ("bwd_chunk_id", "loss", "full_backward", "last_backward"),
    "backward_weight_one_chunk": ("bwd_chunk_id", "last_backward"),
    "get_fwd_recv_ops": ("fwd_chunk_id",),
    "get_fwd_send_ops": ("fwd_chunk_id",),
    "get_bwd_recv_ops": ("bwd_chunk_id",),
    "get_bwd_send_ops": ("bwd_chunk_id",),
    "get_local_bwd_output": ("mb_index",),
    "set_local_fwd_input": ("prev_stage_outputs", "mb_index"),
    "set_local_bwd_input": ("next_stage_bwd_outputs", "mb_index"),
    "scale_grads": ("grad_scale_factor",),
    "perform_reduce_grad": ("grad_scale_factor",),
    "_compute_outputs": ("args", "module", "kwargs"),
    "_compute_input_grads": ("outputs", "all_fwd_inputs", "grad_outputs"),
    "_forward_metadata_inference": ("args", "kwargs", "has_backward"),
    "_backward_metadata_inference": ("loss_fn", "target", "received_grad_meta", "loss_kwargs"),
    "_setup_forward_recv_info": ("num_microbatches", "has_backward"),
    "_setup_backward_recv_info": ("num_microbatches",),
    "_recv_meta": ("src_stage",),
    "_send_meta": ("meta", "dst_stage"),
    "_is_same_rank": ("other_stage",),
}
"""Methods of torch's stage that are called or overridden here, with parameters that they have."""

_MODULES: Sequence[tuple[Any, str]] = (
    (stages, "_RecvInfo"),
    (_utils, "_StageForwardMeta"),
    (_utils, "_make_tensor_from_meta"),
    (_utils, "extract_tensor_meta"),
    (schedules, "_PipelineSchedule"),
    (schedules, "_PipelineScheduleRuntime"),
    (schedules, "_Action"),
)


def check_names(kind: type = PipelineStage) -> None:
    """Refuse a torch whose pipelining is not as it was written down here.

    Raises:
        PipelineError: names what is missing and the supported versions.
    """
    missing = [] if version.TORCH in SUPPORTED else ["one of these versions"]
    missing += [
        f"{module.__name__}.{name}" for module, name in _MODULES if not hasattr(module, name)
    ]
    for name, parameters in _NAMES.items():
        method = getattr(kind, name, None)
        known = inspect.signature(method).parameters if callable(method) else {}
        if method is None or not known.keys() >= set(parameters):
            missing.append(f"PipelineStage.{name}({', '.join(parameters)})")
    if missing:
        raise PipelineError(
            f"torch {torch.__version__} drives pipeline stages in another way than those supported "
            f"here, torch {_supported()}: expected {missing[0]}"
            + (f" and {len(missing) - 1} more" if missing[1:] else "")
            + ". Install one of them; or keep torch's PipelineStage around autosplit.split(module) "
            "with dw_builder=autosplit.pipelining.dw_builder(module); or train with "
            "autosplit.pipeline.PipelineTrainer"
        )


def _supported() -> str:
    return " and ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
