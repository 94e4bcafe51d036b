"""Tensors that are attributes of parameters, such as a weight's main_grad, as buffers of a graph.

AOTAutograd traces with substitutes for the parameters, and the substitutes lack such attributes. So
each attribute becomes a buffer of the exported module. The buffer's tensor is set as the attribute
of the parameter's substitute.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from torch import Tensor, fx, nn
from torch._dynamo.functional_export import InputProcessor

from autosplit.torch_internals.dynamo import input_sources

_ATTRIBUTE = re.compile(r"_parameters\['\w+'\]\.(\w+)$")
_NAMES = "parameter_attributes"


def named_attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of each tensor that is an attribute of a parameter, such as
    layer.weight.main_grad.
    """
    for name, parameter in module.named_parameters():
        for attribute, value in vars(parameter).items():
            if isinstance(value, Tensor):
                yield f"{name}.{attribute}", value


def register_attributes(module: nn.Module, exported: Any) -> None:
    """Make buffers of the attributes of parameters that an exported graph reads.

    Args:
        module: the module of the parameters.
        exported: the module's export; changed in place.
    """
    read = {m[1] for source in input_sources(exported) if (m := _ATTRIBUTE.search(source))}
    attributes = [
        (name, value)
        for name, value in (named_attributes(module) if read else ())
        if name.rpartition(".")[2] in read
    ]
    if not attributes:
        return
    names = {f"_parameter_attribute_{at}": name for at, (name, _) in enumerate(attributes)}
    exported._buffers = exported._buffers | dict(zip(names, dict(attributes).values(), strict=True))
    exported.meta[_NAMES] = names
    codegen = exported.graph._codegen
    halves = codegen.dynamo_bytecode_flatten, codegen.dynamo_bytecode_unflatten
    processor = _WithAttributes(**vars(halves[0].input_processor))
    for half in halves:
        half.input_processor = processor


def attribute_names(exported: fx.GraphModule) -> dict[str, str]:
    """Map the name of each buffer that ``register_attributes`` added to the attribute's name, such
    as layer.weight.main_grad.
    """
    names: dict[str, str] = exported.meta.get(_NAMES, {})
    return names


class _WithAttributes(InputProcessor):
    """Input processor that first sets the registered attributes on the exported parameters, where
    the code that collects the graph's inputs reads them.
    """

    def __call__(self, inputs: Any) -> Any:
        root: Any = self.root
        for buffer, name in attribute_names(root).items():
            parameter, _, attribute = name.rpartition(".")
            traced = attrgetter(parameter)(root)
            if not hasattr(traced, attribute):
                setattr(traced, attribute, root._buffers[buffer])
        return super().__call__(inputs)
