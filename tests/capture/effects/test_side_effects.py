"""Side effects of a forward on Python objects: refused, or remembered as guards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.capture.export import export
from autosplit.errors import CaptureError, PythonStateError
from tests.zoo import Made

SEEN: list[int] = []


def with_effect(effect: Callable[[Any], Any], **attributes: Any) -> nn.Module:
    """A linear layer that does something besides."""

    def forward(model: Any, x: Tensor) -> Tensor:
        effect(model)
        return model.linear(x)

    return Made(forward, linear=nn.Linear(3, 2), **attributes)


def count(model: Any) -> None:
    model.calls += 1


def append(model: Any) -> None:
    model.log.append(1)


def remember(model: Any) -> None:
    SEEN.append(1)


class Counter:
    """An object that counts, and a class that does."""

    calls = 0


class Items(list[Any]):
    """A list of the user's own class."""


class Table(dict[str, Any]):
    """A dictionary of the user's own class."""


def count_in_list(model: Any) -> None:
    model.items[0].calls += 1


def count_in_table(model: Any) -> None:
    model.table["a"].calls += 1


def count_in_set(model: Any) -> None:
    next(iter(model.members)).calls += 1


def count_in_keys(model: Any) -> None:
    next(iter(model.keys)).calls += 1


def count_on_class(model: Any) -> None:
    type(model.counter).calls += 1


def count_in_iterator(model: Any) -> None:
    next(model.iterator).calls += 1


def set_mode(model: Any) -> None:
    model.mode = "train"


def fill(model: Any) -> None:
    if "scale" not in model.cache:
        model.cache["scale"] = 2


@contextlib.contextmanager
def changed(model: Any) -> Iterator[None]:
    earlier, model.mode = model.mode, "inside"
    try:
        yield
    finally:
        model.mode = earlier


def change_and_restore(model: Any) -> None:
    with changed(model):
        pass


def traced(model: nn.Module) -> Any:
    return export(model, (torch.randn(4, 3),), {})[1]


@pytest.mark.parametrize(
    ("effect", "attributes", "named"),
    [
        (count, {"calls": 0}, "self"),
        (append, {"log": []}, "self.log"),
        (remember, {}, "SEEN"),
        (count_in_list, {"items": Items([Counter()])}, "list.__getitem__(self.items, 0).calls"),
        (count_in_table, {"table": Table(a=Counter())}, "(self.table"),
        (count_in_set, {"members": {Counter()}}, "list(self.members)[0].calls"),
        (count_in_keys, {"keys": {Counter(): 1}}, "(self.keys"),
        (count_on_class, {"counter": Counter()}, "type(self.counter).calls"),
        (count_in_iterator, {"iterator": iter((Counter(),))}, "self.iterator"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_state_that_every_call_changes_is_refused_with_the_line(
    effect: Any, attributes: dict[str, Any], named: str
) -> None:
    earlier = list(SEEN)
    with pytest.raises(PythonStateError, match=r"changes Python state, .*which a graph") as caught:
        traced(with_effect(effect, **attributes))
    assert named in str(caught.value)
    line = effect.__code__.co_firstlineno + 1
    assert str(caught.value).startswith(f"{effect.__name__} (at {__file__}:{line})")
    assert earlier == SEEN


class Unique:
    """As a process group is, which every sharded module has."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("there is one of it")


@pytest.mark.parametrize(("effect", "held"), [(append, {"log": []}), (count, {"calls": 0})])
def test_changed_state_of_an_uncopied_module_is_named(effect: Any, held: dict[str, Any]) -> None:
    name = f"self.{next(iter(held))}"
    with pytest.raises(PythonStateError, match=f"changes Python state, {name}, which a graph"):
        traced(with_effect(effect, only=Unique(), **held))


@pytest.mark.parametrize("value", ["train", "eval"])
def test_an_attribute_set_to_its_present_value_is_a_guard(value: str) -> None:
    model = with_effect(set_mode, mode=value)
    if value == "eval":
        with pytest.raises(PythonStateError):
            traced(model)
        return
    guards = traced(model)
    assert guards.hold((torch.randn(4, 3),), {})
    model.mode = "eval"  # the forward would set it back, which the graph does not
    assert not guards.hold((torch.randn(4, 3),), {})


def test_an_attribute_restored_before_the_call_ends_is_no_effect() -> None:
    model = with_effect(change_and_restore, mode="train")
    assert traced(model).hold((torch.randn(4, 3),), {})
    assert model.mode == "train"


def test_a_replaced_buffer_is_refused_with_advice() -> None:
    def replace(model: Any) -> None:
        model.total = model.total + 1

    model = with_effect(replace, total=nn.Buffer(torch.zeros(2)))
    with pytest.raises(CaptureError, match=r"replaces buffer 'total'.*self\.buffer\.copy_\(new\)"):
        traced(model)


def test_only_the_first_call_fills_a_cache() -> None:
    x = torch.randn(4, 3)
    model = with_effect(fill, cache={})
    with pytest.raises(PythonStateError):
        traced(model)
    model(x)
    assert traced(model).hold((x,), {})
