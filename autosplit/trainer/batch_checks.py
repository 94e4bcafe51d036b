"""Checks of the values in a batch, with errors that name the value by its path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autosplit.errors import PipelineError


def check_complete(leaves: Mapping[str, object], used: Iterable[int], names: Sequence[str]) -> None:
    """Raise PipelineError if an input that a stage of this rank uses was left out."""
    present = [leaf is not None for leaf in leaves.values()]
    for number in sorted(used):
        if number >= len(present) or not present[number]:
            wanted = repr(names[number]) if names else f"number {number}"
            raise PipelineError(
                f"a stage of this rank uses the batch's input {wanted}, which is missing; got "
                f"{sum(present)} inputs: pass the input on this rank"
            )


def check_cuttable(name: str, path: str, tensor: object, count: int) -> None:
    """Check a tensor whose samples are cut into microbatches, or that has no dimensions.

    Raises:
        PipelineError: the tensor has no samples, or the value is no tensor.
    """
    if isinstance(tensor, Mapping):
        if name == "targets":
            values = ", ".join(f"{path}[{key!r}]" for key in tensor)
            raise PipelineError(
                f"expected a tensor for the batch's {path}, got a dictionary: "
                "loss_fn(output, targets) gets a tensor, or a tuple of tensors in the order in "
                f"which they are passed: target={values if len(tensor) == 1 else f'({values})'}"
            )
        raise PipelineError(
            f"the batch's {name} have names ({', '.join(map(str, tensor))}), and this trainer "
            "takes them in order: step((x, y), target=z). To pass inputs by name, cut the "
            "model with an example that is a dictionary"
        )
    if not isinstance(tensor, Tensor):
        advice = ": torch.from_numpy(array) makes a tensor on the array's memory"
        raise PipelineError(
            f"the batch's {name} must be a tensor or a tuple of tensors; "
            f"got a {type(tensor).__name__}{advice if hasattr(tensor, '__array__') else ''}. "
            "Other objects cannot be cut: pass step(microbatches=[...])"
        )
    if tensor.dim() and not len(tensor):
        raise PipelineError(
            f"the batch's {path} has shape {list(tensor.shape)}: 0 samples along dimension 0 "
            f"cannot be cut into {count} microbatches"
        )


def check_alike(number: int, leaves: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    """Check that a microbatch of a list has the structure, the dtypes and the numbers of dimensions
    of the first; sizes and numbers may differ.

    Raises:
        PipelineError: names the difference.
    """
    forms = [{path: _form(leaf) for path, leaf in of.items()} for of in (leaves, first)]
    for path in {**forms[1], **forms[0]}:
        form, first_form = (of.get(path, "nothing") for of in forms)
        if form != first_form:
            raise PipelineError(
                f"microbatches[{number}].{path} is {form}, but microbatches[0].{path} is "
                f"{first_form}: the microbatches of a step have the same structure, dtypes and "
                "numbers of dimensions; only sizes and values of numbers may differ"
            )


def check_has_data(path: str, tensor: Tensor, device: torch.device) -> None:
    """Raise PipelineError for a sparse tensor, or for a meta tensor, which has no data to move to
    the device.
    """
    if str(tensor.layout).startswith("torch.sparse"):
        raise PipelineError(
            f"the batch's {path} is a sparse tensor ({tensor.layout}), which no stage takes: pass "
            "a dense tensor (x.to_dense()), or its indices and values as two tensors"
        )
    if tensor.is_meta and device.type != "meta":
        raise PipelineError(
            f"the batch's {path} is a tensor on the meta device, which has no data: pass a tensor "
            "with data, such as torch.zeros_like(x, device='cpu')"
        )


def _form(leaf: object) -> str:
    if not isinstance(leaf, Tensor):
        return f"a {type(leaf).__name__}"
    dtype = str(leaf.dtype).removeprefix("torch.")
    return f"a tensor of {leaf.dim()} dimensions and {dtype}"


def kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"a {type(value).__name__}"
