"""Tensors that a forward sets as attributes of its modules (``self.aux_loss = ...``), as outputs.

Dynamo records such an assignment beside the graph, and an export drops it. ``returned_values`` lets
the traced forward return these tensors after its own result. They are then outputs of the graph,
with gradients. The caller of the graph sets them on the modules again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx, nn
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import TensorVariable, TupleVariable
from torch._dynamo.variables.base import AttributeMutationExisting

from autosplit.capture.guards import Guards
from autosplit.torch_internals.dynamo import source_name, traced_value
from autosplit.torch_internals.patches import patched

_VALUES = "attribute_values"


class AttributeValue(NamedTuple):
    """A tensor that a forward sets as an attribute of a module.

    Attributes:
        module: path of the module; empty for the outermost one.
        attribute: name of the attribute.
    """

    module: str
    attribute: str

    @property
    def name(self) -> str:
        """The name of the graph's output: path of the module and attribute, joined by dots."""
        return ".".join(["self", *filter(None, [self.module]), self.attribute])

    def get(self, root: nn.Module) -> Tensor:
        """The attribute's present tensor, in the modules of ``root``."""
        value: Tensor = vars(root.get_submodule(self.module))[self.attribute]
        return value

    def set(self, root: nn.Module, tensor: Tensor) -> None:
        """Set the attribute in the modules of ``root``, as the forward would."""
        vars(root.get_submodule(self.module))[self.attribute] = tensor


@contextlib.contextmanager
def returned_values() -> Iterator[list[tuple[str, str]]]:
    """Context in which Dynamo's trace of a forward returns ``(result, *values)``, if the forward
    sets computed tensors as attributes of objects that exist already.

    Yields:
        a list that the trace fills: for each value, (expression by which the forward reaches the
            object, name of the attribute).
    """
    places: list[tuple[str, str]] = []
    original: Any = InstructionTranslator._return

    def return_with_values(translator: Any, instruction: Any) -> None:
        values = dict(_computed(translator.output))
        if values and instruction.opname == "RETURN_VALUE":
            places[:] = values
            result = translator.pop()
            translator.push(TupleVariable([result, *values.values()]))
        original(translator, instruction)

    with patched(InstructionTranslator, "_return", return_with_values):
        yield places


def _computed(output: Any) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield ((expression of the object, attribute), Dynamo's variable) for each computed tensor
    that the traced forward has set as an attribute.
    """
    # An in-place operator returns the value of its argument, which may be an input of the graph.
    inputs = {id(traced_value(node)) for node in output.placeholders}
    for target, attributes in output.side_effects.store_attr_mutations.items():
        if not isinstance(target.mutation_type, AttributeMutationExisting):
            continue
        for name, value in attributes.items():
            if type(value) is not TensorVariable or value.source is not None:
                continue
            if id(traced_value(value.as_proxy().node)) not in inputs:
                yield (source_name(target.source), name), value


def attribute_values(
    module: nn.Module,
    guards: Guards,
    scope: dict[str, Any],
    places: Sequence[tuple[str, str]],
    names: Container[str] | None,
) -> dict[tuple[str, str], AttributeValue]:
    """Map each place, (expression, attribute), to its value. Values that the next forward would
    read are left out, as are attributes of objects that are not submodules, and attributes that are
    not in ``names``; None: any name.
    """
    paths = {id(part): path for path, part in module.named_modules()}
    values = {}
    for source, attribute in places:
        target = eval(source, scope)
        path = paths.get(id(target))
        is_named = names is None or attribute in names
        if is_named and path is not None and not guards.reads_constant(vars(target).get(attribute)):
            values[source, attribute] = AttributeValue(path, attribute)
    return values


def label_values(exported: fx.GraphModule, values: Iterable[AttributeValue]) -> None:
    """Record which values an exported graph returns after the forward's own result."""
    exported.meta[_VALUES] = tuple(values)


def values_of(exported: fx.GraphModule) -> tuple[AttributeValue, ...]:
    """The values that an exported graph returns after the forward's own result."""
    values: tuple[AttributeValue, ...] = exported.meta.get(_VALUES, ())
    return values
