"""The beginning of the next forward of a model, or of a part of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook


class NextForward:
    """A callback before the next forward of any of the model's modules; only while `expect` waits for it.

    Two networks that are trained in turn are called one by one, so a hook of the whole model would not run.
    The callback is a method, held weakly: its object holds this one.
    """

    def __init__(self, model: nn.Module, callback: Callable[[], None]) -> None:
        self._modules = set(model.modules())
        self._callback = weakref.WeakMethod(callback)
        self._handle: Any = None

    def expect(self) -> None:
        """Call back once, before the next forward."""
        if self._handle is None:
            self._handle = register_module_forward_pre_hook(self._before_forward)

    def cancel(self) -> None:
        """Do not call back any more."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if module in self._modules:
            self.cancel()
            callback = self._callback()
            if callback is not None:
                callback()
