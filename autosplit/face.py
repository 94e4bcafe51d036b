"""A module under another face: same state, same attributes, same names."""

from __future__ import annotations

from typing import Any, Self

from torch import nn

from .compat import share_state
from .errors import SplitError

_SHARED_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class Face(nn.Module):
    """Stands for ``model``: parameters, buffers and submodules are the very same objects under
    the same names, and an attribute that is set here is set there. What a subclass keeps for
    itself it puts into ``__dict__``.
    """

    model: nn.Module

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.__dict__["model"] = model  # not a submodule: names keep no prefix
        self._share()

    def _share(self) -> None:
        model = self.__dict__["model"]
        share_state(self, model)
        for name in _SHARED_HOOKS:
            self.__dict__[name] = model.__dict__[name]

    def train(self, mode: bool = True) -> Self:
        self.model.train(mode)
        self.training = mode
        return self

    def apply(self, fn: Any) -> Self:
        self.model.apply(fn)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.model._apply(fn, recurse)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.model._load_from_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "model" not in self.__dict__:
                raise
            return getattr(self.model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            raise SplitError(
                f"{type(self).__name__} cannot become a {value.__name__}: what takes modules over "
                "in this way (torch.distributed's fully_shard, for example) expects the weights' "
                "gradients in backward(). Apply it to the model, and split that"
            )
        if name in self.__dict__ or "model" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self.model, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self.model, name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._share()
