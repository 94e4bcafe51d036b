"""backward -> backward_input | backward_weight, with the least deferred between them.

The input-gradient graph I is what the input gradients need. Everything else may wait. Of
that, matrix products, convolutions and scatters do wait; views, pointwise work and
reductions go wherever fewer bytes cross. The cut then finds by itself that the gradient of
a norm's weight or of a bias belongs into I when nobody else keeps the tensors it reduces (a
vector crosses in place of [batch, sequence, hidden] tensors), and into W when the
deferred matrix products keep them anyway.
"""

from __future__ import annotations

from torch import fx

from .aliasing import is_free
from .cost import is_cheap
from .extract import extract
from .graph import (
    Kind,
    Program,
    Role,
    ancestors,
    calls,
    is_state,
    outputs,
    placeholders,
    role_of,
)
from .min_cut import min_cut


def split_backward(program: Program) -> bool:
    """Fill in ``backward_input`` and ``backward_weight``; False where there is no backward.

    A stage whose inputs need no gradient (usually the first) has nothing for I to compute:
    I then only hands over what W needs.
    """
    if program.backward is None:
        return False
    graph = program.backward.graph
    input_grads = outputs(graph, Kind.INPUT_GRAD)
    parameter_grads = outputs(graph, Kind.PARAMETER_GRAD)
    needed = ancestors([value for _, value in input_grads if isinstance(value, fx.Node)])
    rest = {node for node in calls(graph) if node not in needed}
    pinned = rest if not input_grads else {node for node in rest if not is_cheap(node)}
    early = {node for node in needed if not is_free(node)} | set(placeholders(graph))
    wanted = [value for _, value in parameter_grads if isinstance(value, fx.Node)]
    boundary = min_cut(graph, early=early, late=pinned, wanted=wanted)
    state = [(role_of(node), node) for node in boundary.carried if is_state(node)]
    carried = [node for node in boundary.carried if not is_state(node)]
    deferred = [(Role(Kind.DEFERRED, node.name), node) for node in carried]
    program.backward_input = extract(
        program.backward,
        "backward_input",
        carried=[],
        compute=needed | ancestors(carried),
        returns=[*input_grads, *deferred],
    )
    program.backward_weight = extract(
        program.backward,
        "backward_weight",
        carried=[*state, *deferred],
        compute=boundary.late,
        returns=parameter_grads,
    )
    return True
