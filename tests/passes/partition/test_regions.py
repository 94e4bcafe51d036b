"""regions: divisions of graphs small enough to cut by hand, and all others against brute force."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from autosplit.passes import PassError, Role
from autosplit.passes.analysis.operator_cost import is_cheap
from autosplit.passes.graph import Kind
from tests.passes.sized import Sized, held, least_held


def large_between(kind: str = "cheap") -> tuple[Sized, fx.Node, fx.Node]:
    """A value of 1, and one of 100 that is made of it and that the backward reads."""
    b = Sized()
    small, g = b.input(1), b.tangent()
    big = getattr(b, kind)(100, small)
    b.result(Kind.OUTPUT, big)
    b.result(Kind.INPUT_GRAD, b.costly(1, big, g))
    return b, small, big


def test_what_forward_ran_is_done_again_where_that_frees_memory() -> None:
    b, small, big = large_between()
    assert b.cut(recompute=False).saved == [big]
    cut = b.cut(recompute=True)
    assert cut.saved == [small]
    assert big in cut.backward.runs & cut.input.runs


def test_doing_again_has_its_price() -> None:
    """Writing 100 bytes and the call itself take the time of moving over 100 bytes."""
    b, _, big = large_between()
    assert b.cut(recompute=True, rate=1.0).saved == [big]


@pytest.mark.parametrize("kind", ["costly", "random"])
def test_costly_and_random_operators_run_once(kind: str) -> None:
    b, _, big = large_between(kind)
    assert b.cut(recompute=True).saved == [big]


def test_view_is_redone_and_its_base_carried() -> None:
    b = Sized()
    base, g = b.input(10), b.tangent()
    view = b.view(base)
    b.result(Kind.OUTPUT, b.costly(1, base))
    b.result(Kind.PARAMETER_GRAD, b.costly(1, view, g))
    b.result(Kind.INPUT_GRAD, b.costly(1, view, g))
    cut = b.cut()
    assert (cut.saved, cut.deferred) == ([base], [base, g])
    assert view in cut.input.runs & cut.weight.runs


def test_two_views_cost_their_storage_once() -> None:
    """Carrying the base (10) beats carrying two results of 6 each."""
    b = Sized()
    base, g = b.input(10), b.tangent()
    first, second = b.cheap(6, b.view(base)), b.cheap(6, b.view(base))
    b.result(Kind.INPUT_GRAD, b.costly(1, first, second, g))
    assert b.cut().saved == [base]


def test_parameters_are_free() -> None:
    b = Sized()
    weight, g = b.input(1000, Kind.PARAMETER), b.tangent()
    b.result(Kind.INPUT_GRAD, b.costly(1, b.cheap(1, weight), g))
    cut = b.cut()
    assert cut.saved == []
    assert cut.backward.takes == [weight]


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
    assert (free.deferred, free.released) == ([], {weight})
    dear = b.cut(release=True, charge=1000.0)
    assert (dear.deferred, dear.released) == ([x, g], set())


@pytest.mark.parametrize("charge", [0.0, 0.01, 0.1, 0.3, 1.0, 3.0, 10.0])
def test_what_is_done_again_early_takes_nothing_along_that_waits(charge: float) -> None:
    """A reduction would save 50 in I, where it needs a sum again that reads what waits."""
    b = Sized()
    x, y, g = b.input(10), b.input(50), b.tangent(10)
    late = b.costly(40, x, g)
    summed = b.cheap(40, late)
    b.result(Kind.PARAMETER_GRAD, b.costly(40, summed))
    b.result(Kind.PARAMETER_GRAD, b.cheap(1, summed, y))
    cut = b.cut(recompute=True, release=True, charge=charge)
    assert late not in cut.input.runs & cut.weight.runs


def test_value_that_cannot_be_carried() -> None:
    b = Sized()
    x, g = b.input(1), b.tangent()
    number = b.costly(1, x)
    number.meta["val"] = 3
    b.result(Kind.OUTPUT, number)
    b.result(Kind.INPUT_GRAD, b.costly(1, number, g))
    with pytest.raises(PassError, match="neither be carried nor recomputed"):
        b.cut()


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


@settings(max_examples=60, deadline=None)
@given(
    st.booleans().flatmap(lambda given: graphs(operators=6, input_grad=given)),
    st.booleans(),
    st.sampled_from([0.0, 0.01, 1.0]),
    st.sampled_from([0.0, 0.01, 0.1, 1.0, 10.0]),
)
def test_costly_operators_run_once_whatever_is_early(
    b: Sized, release: bool, rate: float, charge: float
) -> None:
    cut = b.cut(recompute=True, release=release, rate=rate, charge=charge)
    assert all(is_cheap(n) or n.op != "call_function" for n in cut.input.runs & cut.weight.runs)
