"""Ray Train: `prepare_model` in the place of Ray's, with Offbeat in the place of DDP.

    model = offbeat.integrations.ray.prepare_model(model, offbeat.LocalSGD(period=8))

The rest of `train_loop_per_worker` stays: the model has DDP's `module`, `no_sync()` and names of weights.

There is no optimizer yet. So the strategy is attached before the first forward that records gradients, or
when `model.sync` is first asked for, to all optimizers that step the model by then: the garbage collector
knows all objects. A step before that is refused.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray.train.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from offbeat.attach import Sync, attach
from offbeat.core.strategy import Strategy
from offbeat.core.validation import unwrap
from offbeat.errors import OffbeatError

_unattached: weakref.WeakSet[OffbeatModel] = weakref.WeakSet()


def prepare_model(
    model: nn.Module, strategy: Strategy[Any], *, move_to_device: bool | torch.device = True, **options: Any
) -> OffbeatModel:
    """Prepare a model as Ray does, without DDP: on this worker's device, with the weights of worker 0.

    The options are those of `offbeat.attach`, which is called at the model's first use.
    """
    inspect.signature(attach).bind(model, None, strategy, **options)  # a wrong option is refused at once
    model = ray.train.torch.prepare_model(model, move_to_device=move_to_device, parallel_strategy=None)
    if dist.is_initialized() and not options.get("group"):
        _share_weights(model)
    return OffbeatModel(model, strategy, options)


def _share_weights(model: nn.Module) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        received = tensor.detach().contiguous()
        dist.broadcast(received, 0)
        tensor.detach().copy_(received)


class OffbeatModel(nn.Module):
    """A model in the place of DDP's wrapper: attached at its first use, to all optimizers that step it."""

    def __init__(self, module: nn.Module, strategy: Strategy[Any], options: dict[str, Any]) -> None:
        super().__init__()
        self.module = module
        self._strategy = strategy
        self._options = options
        self._sync: Sync | None = None
        _unattached.add(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._sync is None and torch.is_grad_enabled():
            self._attach()
        return self.module(*args, **kwargs)

    @property
    def sync(self) -> Sync:
        """The attachment: for `consensus()`, checkpoints and `close()`. All workers ask for it together."""
        self._attach()
        if self._sync is None:
            raise OffbeatError("no optimizer steps this model yet: ask for model.sync after building it")
        return self._sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without exchanging them, as in DDP."""
        with self.sync.no_sync():
            yield

    @property
    def require_backward_grad_sync(self) -> bool:
        """True if a backward() exchanges gradients: DDP's name of `Sync.require_sync`."""
        return self.sync.require_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, required: bool) -> None:
        self.sync.require_sync = required

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sync": None}  # a copy is not attached

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _unattached.add(self)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _attach(self) -> None:
        """Attach the strategy, if there is an optimizer now, and it was not attached before."""
        if self._sync is None and _optimizers_of(self.module):
            gc.collect()  # an optimizer that nobody uses any more
            self._sync = attach(self.module, _optimizers_of(self.module), self._strategy, **self._options)
            _unattached.discard(self)


def _optimizers_of(model: nn.Module) -> list[Optimizer]:
    """Return the optimizers that step parameters of the model, in the same order on all workers."""
    places = {param: number for number, param in enumerate(model.parameters())}
    found: dict[Optimizer, int] = {}
    for each in gc.get_objects():
        if issubclass(type(each), Optimizer) and (stepped := _stepped(each) & places.keys()):
            (bare,) = unwrap(each)
            found[bare] = min(places[param] for param in stepped)
    return sorted(found, key=found.__getitem__)


def _stepped(optimizer: Optimizer) -> set[nn.Parameter]:
    return {param for group in getattr(optimizer, "param_groups", ()) for param in group["params"]}


def _refuse_to_train_alone(optimizer: Optimizer, *_: Any) -> None:
    """Refuse a step that the other workers would not learn of."""
    stepped = _stepped(optimizer) if _unattached else set()
    if any(stepped & set(model.parameters()) for model in _unattached):
        raise OffbeatError(
            "an optimizer steps a model that its strategy is not attached to: build the optimizer before the "
            "first forward, and call what prepare_model() returned, not its module. Otherwise call "
            "ray.train.torch.prepare_model(model, parallel_strategy=None), and then offbeat.attach"
        )


register_optimizer_step_pre_hook(_refuse_to_train_alone)
