"""The halves of the backward: backward_input | backward_weight, as the graph was divided.

The input-gradient graph I is what the input gradients need, or where no input needs one the chain
of derivatives down to the earliest parameters. Everything else may wait. Of
that, matrix products, convolutions and scatters do wait; views, pointwise work and reductions
go wherever fewer bytes cross. So the gradient of a norm's weight or of a bias is computed in I
when nobody else keeps the tensors it reduces (a vector crosses in place of [batch, sequence,
hidden] tensors), and in W when the deferred matrix products keep them anyway.
"""

from __future__ import annotations

from ..analysis.aliasing import storage_root
from ..graph import Kind, Role, SplitProgram, inputs, outputs, role_of
from .extract import copied, extract


def split_backward(program: SplitProgram) -> bool:
    """Fill in ``backward_input`` and ``backward_weight``; False where there is no backward.

    Where no input needs a gradient and there is no chain of derivatives either (see
    ``parameter_chain``), I only hands over what W needs.
    """
    regions = program.regions
    if regions is None:
        return False
    graph = program.joint.graph
    saved = {node: Role(Kind.SAVED, node.name) for node in regions.saved}
    deferred = {node: Role(Kind.DEFERRED, node.name) for node in regions.deferred}
    targets = inputs(graph, Kind.TARGET)
    late = {role.name for role, node in targets.items() if node in regions.kept}
    results = outputs(graph, Kind.PARAMETER_GRAD, Kind.WRITE)
    released = [
        (role, value)
        for role, value in results
        if value in regions.released or (role.kind is Kind.WRITE and role.name not in late)
    ]
    program.backward_input = extract(
        program.joint,
        "backward_input",
        carried=[(saved.get(node) or role_of(node), node) for node in regions.input.takes],
        compute=regions.input.runs,
        returns=[
            *outputs(graph, Kind.INPUT_GRAD),
            *released,
            *(
                (role, copied(graph, node) if storage_root(node) in targets.values() else node)
                for node, role in deferred.items()
            ),
        ],
        on_demand=regions.input.runs - regions.gradient,
    )
    program.backward_weight = extract(
        program.joint,
        "backward_weight",
        carried=[(deferred.get(node) or role_of(node), node) for node in regions.weight.takes],
        compute=regions.weight.runs,
        returns=[pair for pair in results if pair not in released],
        on_demand=regions.weight.runs - (regions.gradient - regions.urgent),
    )
    return True
