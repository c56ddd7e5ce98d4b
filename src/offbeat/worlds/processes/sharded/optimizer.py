"""Local optimizer: the user's optimizer, seen from the local parameters of a sharded model.

A strategy steps local parameters by the user's own optimizer (core/optimizer.py), whose parameters and state
are DTensors. The local optimizer is a second object of the same class, with the local parameters in its
groups and the local parts of the same state: what one changes in place, the other sees. State that the local
optimizer creates is handed to the user's optimizer as DTensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from offbeat.worlds.processes.sharded.model import LocalModel, distributed

_SCALING = ("grad_scale", "found_inf")  # set by a GradScaler on a fused optimizer


class LocalOptimizer:
    """A user's optimizer and its local counterpart, `local`."""

    def __init__(self, optimizer: Optimizer, model: LocalModel) -> None:
        self.optimizer = optimizer
        self._model = model
        self.local: Optimizer = object.__new__(type(optimizer))
        hooks: dict[str, Any] = {key: OrderedDict() for key in vars(optimizer) if key.endswith("_hooks")}
        self._own = {"state", "param_groups", *hooks}
        vars(self.local).update(hooks)
        self._state = LocalState(optimizer, model)
        self.local.state = self._state  # type: ignore[assignment]
        self.local.param_groups = []
        self.take()

    def take(self) -> None:
        """Take over the settings of the user's groups, such as learning rates, and all attributes.

        So a `StateWatch` sees what the user's optimizer keeps there.
        """
        groups, own = self.optimizer.param_groups, self.local.param_groups
        while len(own) < len(groups):
            own.append({"params": [self._model.of(p) for p in groups[len(own)]["params"]]})
        for group, mine in zip(groups, own, strict=True):
            mine.update({key: value for key, value in group.items() if key != "params"})
        for key in _SCALING:
            vars(self.local).pop(key, None)
        vars(self.local).update(
            {key: value for key, value in vars(self.optimizer).items() if key not in self._own}
        )

    def give_back(self) -> None:
        """Hand state that the local optimizer has created or loaded to the user's optimizer."""
        if self.local.state is not self._state:  # `load_state_dict` has replaced the state, and the groups
            self.optimizer.state.clear()
            self._state.replace(self.local.state)
            self.local.state = self._state  # type: ignore[assignment]
            for group, mine in zip(self.optimizer.param_groups, self.local.param_groups, strict=True):
                group.update({key: value for key, value in mine.items() if key != "params"})
        self._state.write_back()


class LocalState(MutableMapping[Any, dict[str, Any]]):
    """The local parts of an optimizer's state. Entries are read when asked for, and then written back."""

    def __init__(self, optimizer: Optimizer, model: LocalModel) -> None:
        self._optimizer = optimizer
        self._sharded = {local: param for param, local in model.pairs}
        self._open: dict[Any, dict[str, Any]] = {}

    def __getitem__(self, local: Any) -> dict[str, Any]:
        if local not in self._open:
            entry = self._optimizer.state.get(self._param(local), {})
            self._open[local] = {key: _local_value(value) for key, value in entry.items()}
        return self._open[local]

    def get(self, local: Any, default: Any = None) -> Any:
        return self.__getitem__(local) if local in self else default  # does not create an entry

    def __contains__(self, local: object) -> bool:
        return local in self._open or self._param(local) in self._optimizer.state

    def __setitem__(self, local: Any, entry: dict[str, Any]) -> None:
        self._open[local] = entry

    def __delitem__(self, local: Any) -> None:
        self._open.pop(local, None)
        self._optimizer.state.pop(self._param(local), None)

    def __iter__(self) -> Iterator[Any]:
        known = {self._param(local): local for local in self._sharded}
        keys = [known.get(param, param) for param in self._optimizer.state]
        return iter(dict.fromkeys([*keys, *self._open]))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def replace(self, state: Any) -> None:
        """Take entries that were loaded."""
        self._open = dict(state)

    def write_back(self) -> None:
        """Write the entries that were read to the user's optimizer, new values as DTensors."""
        opened, self._open = self._open, {}
        for local, entry in opened.items():
            param = self._param(local)
            if not entry and param not in self._optimizer.state:
                continue
            known = self._optimizer.state[param]
            if param is local:
                if known is not entry:
                    known.clear()
                    known.update(entry)
                continue
            values = {key: _sharded_value(value, known.get(key), param) for key, value in entry.items()}
            known.clear()
            known.update(values)

    def _param(self, local: Any) -> Any:
        return self._sharded.get(local, local)


def _local_value(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def _sharded_value(value: Any, known: Any, param: Any) -> Any:
    """Return a value of the state as the user's optimizer has it: per element of the parameter, a DTensor."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(known, DTensor) and known._local_tensor is value:
        return known
    elementwise = isinstance(known, DTensor) or (
        known is None and value.dim() > 0 and value.shape == param._local_tensor.shape
    )
    return distributed(value, param) if elementwise else value
