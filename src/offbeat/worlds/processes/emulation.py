"""Emulation of a slower network and of slower computation, for demonstrations and tests.

`Shaper` delays arriving data as a slower NIC would; benchmarks shape real links instead.

`pace` makes a small model take the time of a big one, `slow` makes this rank a straggler. Both only sleep:
after a layer's forward, and before a layer's backward by a hook on the gradient of its output. Values,
gradients and graph stay the same bit for bit, gradients become ready layer by layer as they would on a slow
machine, and whatever trains the model (DDP, a strategy, another library) trains the very same model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor, nn

from offbeat.core.ledger import Ledger
from offbeat.errors import SettingError

BACKWARD_TO_FORWARD = 2.0  # gradients of the inputs and of the weights: two products for the forward's one


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """Settings of the emulation: a slower network, slower computation, slow ranks. Default: none."""

    bandwidth: str | None = None
    pace_s: float | None = None
    slow: dict[int, float] = field(default_factory=dict)

    def notes(self) -> list[str]:
        """Describe the emulation in words, for everything that shows results."""
        notes = []
        if self.bandwidth:
            notes.append(f"emulated: every rank's network is slowed to {self.bandwidth}")
        if self.pace_s:
            notes.append(f"emulated: a step's computation takes at least {1000 * self.pace_s:g} ms")
        notes += [f"emulated: rank {r} computes {f:g} times slower" for r, f in self.slow.items()]
        return notes

    def apply(self, model: nn.Module, rank: int) -> None:
        """Slow down this rank's computation; `Shaper` slows down its network."""
        factor = self.slow.get(rank, 1.0)
        if self.pace_s:
            pace(model, self.pace_s, factor=factor)
        elif factor != 1.0:
            slow(model, factor)


class Shaper:
    """An emulated NIC of a given bandwidth, which delivers one operation after another."""

    def __init__(self, bits_per_s: float, ledger: Ledger) -> None:
        self.bytes_per_s = bits_per_s / 8
        self._ledger = ledger
        ledger.emulate_transfers()
        self._free_at = 0.0
        self._lock = Lock()

    def deliver(self, nbytes: int) -> float:
        """Return the time at which an operation that has just ended would end on the emulated NIC.

        Loopback is fast, so an operation ends about when its last rank arrives: the emulated transfer starts
        then.
        """
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self.bytes_per_s
            return self._free_at

    def delivered(self, nbytes: int) -> None:
        """Charge the emulated transfer time to the ledger."""
        self._ledger.communicated(nbytes / self.bytes_per_s)


def pace(
    model: nn.Module,
    seconds: float,
    *,
    factor: float = 1.0,
    weights: Mapping[str, float] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Pacing:
    """Make one forward and backward of `model` take `factor` × `seconds`, a third of it in the forward.

    Real computation happens inside that time, not on top of it. `weights` divides the time among the layers,
    by name: each call of a layer takes the layer's time, and a layer without a weight takes none. By default
    all layers with a matrix or a kernel weigh the same, and layers of vectors only (norms) nothing: the usual
    networks are built with about equal work in each layer, whereas weights by parameters would give
    embeddings and wide classifiers time that they do not take, and would let gradient bytes appear at the
    even rate that favours every method that overlaps.
    """
    _require(0.0 < seconds < math.inf, f"a pace of {seconds} s: give a number of seconds above 0")
    _require(0.0 < factor < math.inf, f"a pace's factor of {factor}: give a number above 0")
    layers = _layers(model)
    given = _equal_weights(layers) if weights is None else weights
    unknown = sorted(given.keys() - layers.keys())
    _require(not unknown, f"no such layer: {', '.join(unknown)}; the layers are {', '.join(layers)}")
    valid = all(0.0 <= weight < math.inf for weight in given.values()) and sum(given.values()) > 0.0
    _require(valid, "weights of layers must be 0 or more, and not all 0")
    forward_s = factor * seconds / (1.0 + BACKWARD_TO_FORWARD) / sum(given.values())
    times = {layer: given.get(name, 0.0) * forward_s for name, layer in layers.items()}
    return Pacing(model, LayerTimes(times), clock, sleep)


def slow(
    model: nn.Module,
    factor: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Pacing:
    """Make each layer's forward take `factor` × its real time; delay its backward by twice as much."""
    _require(1.0 <= factor < math.inf, f"slower by a factor of {factor}: give a number of 1 or more")
    return Pacing(model, LayerSlowdown(factor), clock, sleep)


class Schedule(Protocol):
    """Emulated cost of a layer's forward; the layer's backward costs twice as much."""

    @property
    def absolute(self) -> bool:
        """True if costs add up from the start of the pass and include the real computation."""

    def cost_s(self, layer: nn.Module, took_s: float) -> float:
        """Return the seconds to charge for a forward of `layer` whose computation took `took_s`."""


@dataclass(frozen=True)
class LayerTimes:
    """Stated times: a layer ends when the times of all layers up to it have passed since the pass began."""

    forward_s: Mapping[nn.Module, float]
    absolute: bool = True

    def cost_s(self, layer: nn.Module, took_s: float) -> float:
        return self.forward_s[layer]


@dataclass(frozen=True)
class LayerSlowdown:
    """Measured times: a delay after each layer makes the layer `factor` times as long."""

    factor: float
    absolute: bool = False

    def cost_s(self, layer: nn.Module, took_s: float) -> float:
        return (self.factor - 1.0) * took_s


class _Pass(Enum):
    NONE = auto()
    FORWARD = auto()
    BACKWARD = auto()


@dataclass
class _LayerCall:
    """One forward of one layer; its backward is charged once per pass, however many outputs it has."""

    cost_s: float
    charged: int = -1  # number of the pass in which the backward was charged last


@dataclass(eq=False)
class Pacing:
    """Hooks that pace a model until `remove()` or the end of a `with`."""

    model: nn.Module
    schedule: Schedule
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    _pass: _Pass = _Pass.NONE
    _passes: int = 0
    _due: float = 0.0  # when the work charged so far should be done
    _overslept: float = 0.0  # seconds by which the last sleep overslept
    _entered: float = 0.0
    _remove: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        hooks = [self.model.register_forward_pre_hook(self._begin_forward)]
        for layer in _layers(self.model).values():
            hooks += [layer.register_forward_pre_hook(self._enter), layer.register_forward_hook(self._leave)]
        self._remove += [hook.remove for hook in hooks]

    def remove(self) -> None:
        """Remove the hooks: the model is as it was before. May be called twice."""
        while self._remove:
            self._remove.pop()()

    def __enter__(self) -> Pacing:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _is_active(self) -> bool:
        return self.model.training and torch.is_grad_enabled()

    def _begin_forward(self, _model: nn.Module, _args: object) -> None:
        if self._is_active():
            self._begin(_Pass.FORWARD)

    def _begin(self, new: _Pass) -> None:
        self._pass, self._due, self._overslept = new, self.clock(), 0.0
        self._passes += 1

    def _enter(self, _layer: nn.Module, _args: object) -> None:
        if not self._is_active():
            return
        if self._pass is not _Pass.FORWARD:  # the layer was called directly, or recomputed in backward
            self._begin(_Pass.FORWARD)
        self._entered = self.clock()

    def _leave(self, layer: nn.Module, _args: object, output: object) -> None:
        if not self._is_active():
            return
        call = _LayerCall(self.schedule.cost_s(layer, self.clock() - self._entered))
        self._charge(call.cost_s)
        # A hook, not an identity in the graph: nn.ReLU(inplace=True) may not change the view that such an
        # identity returns. Leaves get no hook, because it would stay on them after the step.
        for tensor in _tensors(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(partial(self._before_backward, call))

    def _before_backward(self, call: _LayerCall, _gradient: Tensor) -> None:
        if self._pass is not _Pass.BACKWARD:
            self._begin(_Pass.BACKWARD)
        if call.charged != self._passes:
            call.charged = self._passes
            self._charge(BACKWARD_TO_FORWARD * call.cost_s)

    def _charge(self, cost_s: float) -> None:
        # Sleeps end some 50 to 100 µs late. No spinning: workers share cores. Time overslept is subtracted
        # from the next sleep, so the error stays that of one sleep, however many layers there are.
        now = self.clock()
        start = self._due if self.schedule.absolute else now - self._overslept
        self._due = start + cost_s
        if self._due > now:
            self.sleep(self._due - now)
        self._overslept = max(0.0, self.clock() - self._due)


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers by name: the smallest modules that compute with parameters of their own."""
    # Attention uses the weights of its output projection without calling it.
    attentions = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    inner = {part for attention in attentions for part in attention.modules()} - set(attentions)
    layers = {
        name: module
        for name, module in model.named_modules()
        if (module in attentions or not list(module.children()))
        and module not in inner
        and list(module.parameters())
    }
    _require(bool(layers), f"{type(model).__name__} has no layer with parameters, so nothing can be paced")
    return layers


def _equal_weights(layers: Mapping[str, nn.Module]) -> dict[str, float]:
    heavy = {name for name, layer in layers.items() if any(p.dim() > 1 for p in layer.parameters())}
    return dict.fromkeys(heavy or layers, 1.0)


def _tensors(output: object) -> Iterator[Tensor]:
    """Yield the tensors of an output, also of nested tuples, lists and mappings."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, list | tuple | Mapping):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(part)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SettingError(message)
