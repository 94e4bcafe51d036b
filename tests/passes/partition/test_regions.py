"""regions: divisions of graphs small enough to cut by hand, and all others against brute force."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.passes import PassError, Role
from autosplit.passes.graph import Kind
from tests.passes.sized import Sized, held, least_held


def test_two_views_cost_their_storage_once() -> None:
    """Carrying the base (10) beats carrying two results of 6 each."""
    b = Sized()
    base, g = b.input(10), b.tangent()
    first, second = b.cheap(6, b.view(base)), b.cheap(6, b.view(base))
    b.result(Kind.INPUT_GRAD, b.costly(1, first, second, g))
    assert b.cut().saved == [base]


def test_buffer_that_forward_overwrites_is_not_free() -> None:
    b = Sized()
    buffer, g = b.input(1000, Kind.BUFFER), b.tangent()
    narrow = b.cheap(1, buffer)
    b.result(Kind.UPDATE, b.cheap(1000, buffer))
    buffer.meta["role"] = Role(Kind.BUFFER, "r0")  # the first result is its update
    b.result(Kind.INPUT_GRAD, b.costly(1, narrow, g))
    assert b.cut().saved == [narrow]


def test_weight_gradient_is_released_where_it_may_be_early() -> None:
    b = Sized()
    x, g = b.input(50), b.tangent(50)
    b.result(Kind.INPUT_GRAD, b.costly(50, x, g))
    weight = b.costly(40, x, g)
    b.result(Kind.PARAMETER_GRAD, weight)
    free = b.cut(release=True, charge=0.0)
    assert (free.deferred, free.early_weight_grads) == ([], {weight})
    dear = b.cut(release=True, charge=1000.0)
    assert (dear.deferred, dear.early_weight_grads) == ([x, g], set())


@pytest.mark.parametrize("charge", [0.0, 0.01, 0.1, 0.3, 1.0, 3.0, 10.0])
def test_an_early_recomputation_needs_no_deferred_value(charge: float) -> None:
    """A reduction would save 50 in I, where it needs a sum again that reads what waits."""
    b = Sized()
    x, y, g = b.input(10), b.input(50), b.tangent(10)
    late = b.costly(40, x, g)
    summed = b.cheap(40, late)
    b.result(Kind.PARAMETER_GRAD, b.costly(40, summed))
    b.result(Kind.PARAMETER_GRAD, b.cheap(1, summed, y))
    cut = b.cut(recompute=True, release=True, charge=charge)
    assert late not in cut.input.runs & cut.weight.runs


def test_an_infinite_cut_names_the_ends_of_its_path() -> None:
    """The backward reads a number that is computed from another number."""
    b = Sized()
    x, g = b.input(1), b.tangent()
    count = b.costly(1, x)
    share = b.cheap(1, count)
    for node, line, code in ((count, 7, "n = count(x)"), (share, 9, "share = n / 2")):
        node.meta["val"] = 3
        node.meta["stack_trace"] = f'File "model.py", line {line}, in forward\n    {code}'
    b.result(Kind.OUTPUT, count)
    b.result(Kind.INPUT_GRAD, b.costly(1, share, g))
    with pytest.raises(PassError, match="neither be carried nor recomputed") as caught:
        b.cut()
    count_text = "meshgrid_default = aten.meshgrid.default (3, at model.py:7 n = count(x))"
    share_text = "cat_default = aten.cat.default (3, at model.py:9 share = n / 2)"
    assert f": {count_text}, from which it computes {share_text}. " in str(caught.value)


@st.composite
def graphs(draw: st.DrawFn, *, operators: int = 3, input_grad: bool = True) -> Sized:
    """Some operators over two inputs, as many over a gradient."""
    b = Sized()
    sizes = st.integers(1, 20)
    forward = [b.input(draw(sizes)), b.input(draw(sizes))]
    kinds = st.sampled_from(["cheap", "costly"])
    for _ in range(draw(st.integers(1, operators))):
        operands = draw(st.lists(st.sampled_from(forward), min_size=1, max_size=2, unique=True))
        forward.append(getattr(b, draw(kinds))(draw(sizes), *operands))
    b.result(Kind.OUTPUT, draw(st.sampled_from(forward)))
    gradient = [b.tangent(draw(sizes))]
    for _ in range(draw(st.integers(2, operators))):
        operands = [draw(st.sampled_from(gradient)), draw(st.sampled_from(forward + gradient))]
        gradient.append(getattr(b, draw(kinds))(draw(sizes), *dict.fromkeys(operands)))
    if input_grad:
        b.result(Kind.INPUT_GRAD, draw(st.sampled_from(gradient[1:])))
    for node in draw(st.lists(st.sampled_from(gradient[1:]), min_size=1, max_size=2, unique=True)):
        b.result(Kind.PARAMETER_GRAD, node)
    return b


@settings(max_examples=60, deadline=None)
@given(graphs(), st.booleans())
def test_no_division_holds_less(b: Sized, recompute: bool) -> None:
    graph = b.module().graph
    assert held(b.cut(recompute=recompute)) == least_held(graph, recompute=recompute)
