"""CUDA graphs of virtual workers: forward and backward, captured once and replayed on a stream of their own.

A virtual worker's batch is small: on a GPU its step is hundreds of kernels that take less time than their
launch, one worker after the other. A replay launches all of them at once, and the replays of several workers
run side by side. Everything else (strategies, optimizers, exchanges) stays on the usual stream:

    usual stream   … copies the batch │ other workers' batches … │ waits │ gathers, exchanges, updates …
    worker's own       └─> waits │ replays forward and backward ────┘

Gradients are those without graphs, up to the algorithms that cuDNN chooses. Random draws on the GPU, such as
dropout, follow the seed of each step. What a graph cannot repeat, such as draws on the CPU, would be wrong
without a word. So the first graph of a run is compared with the plain gradient of another batch and seed;
where they differ, no graphs are used. Batches of another shape are computed plainly, and so are weights that
were moved to other memory, and modules that were set to another mode.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Gradient = Callable[[nn.Module, Any], Tensor]
"""A function of the model and a batch: adds the loss's gradient to `grad`, and returns the loss, detached."""

WARM_UP = 3  # plain gradients before a capture, in which cuDNN chooses its algorithms
SAME = 0.1  # as a fraction of the norm: gradients that differ by less are the same but for rounding
log = logging.getLogger("offbeat")


class GradientSource(Protocol):
    """The gradients of one worker."""

    in_background: bool  # between `start` and `finish` others can compute

    def start(self, batch: Any) -> None:
        """Start to compute the gradient of a batch."""

    def finish(self) -> Tensor:
        """Put the gradient into `grad` of each parameter; return the detached loss."""


class PlainGradient:
    """Gradients that are computed at once."""

    in_background = False

    def __init__(self, gradient: Gradient, model: nn.Module) -> None:
        self._gradient = gradient
        self._model = model
        self._loss: Tensor

    def start(self, batch: Any) -> None:
        self._loss = self._gradient(self._model, batch)

    def finish(self) -> Tensor:
        return self._loss


class Trust:
    """Permission to use graphs in a run: unknown until the first one was compared with a plain gradient."""

    def __init__(self) -> None:
        self.granted: bool | None = None


class GraphedGradient:
    """Gradients that are replayed from a graph, where the graph fits."""

    in_background = True

    def __init__(self, gradient: Gradient, model: nn.Module, trust: Trust) -> None:
        self._plain = PlainGradient(gradient, model)
        self._gradient = gradient
        self._model = model
        self._trust = trust
        self._graph: _Graph | None = None
        self._replays = False

    def start(self, batch: Any) -> None:
        if self._graph is None and self._trust.granted is not False:
            self._capture(batch)
        self._replays = self._graph is not None and self._graph.fits(batch)
        if self._graph is not None and self._replays:
            self._graph.start(batch)
        else:
            self._plain.start(batch)

    def finish(self) -> Tensor:
        return self._graph.finish() if self._graph is not None and self._replays else self._plain.finish()

    def _capture(self, batch: Any) -> None:
        with _undone(self._model):
            try:
                graph = _Graph(self._gradient, self._model, batch)
            except RuntimeError as failed:  # an operation that cannot be captured
                self._refuse(str(failed).splitlines()[0])
                return
            if self._trust.granted is None:
                self._trust.granted = graph.equals_plain(batch)
                if not self._trust.granted:
                    self._refuse("a replay differs from the gradient itself, for example by draws on the CPU")
                    return
        self._graph = graph

    def _refuse(self, reason: str) -> None:
        self._trust.granted = False
        log.warning("gradients are computed one worker after the other, without CUDA graphs: %s", reason)


class _Graph:
    """A captured forward and backward, its inputs and its results."""

    def __init__(self, gradient: Gradient, model: nn.Module, batch: Any) -> None:
        self._gradient, self._model = gradient, model
        self._params = [p for p in model.parameters() if p.requires_grad]
        self._tensors = [*model.parameters(), *model.buffers()]
        self._modules = list(model.modules())
        self._stream = torch.cuda.Stream()
        self._batch = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)
        self._conditions = self._current_conditions(batch)
        self._generator = torch.cuda.default_generators[torch.cuda.current_device()]
        self._own_state = self._generator.clone_state()  # or the seed of the next replay would be this one's
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP):
                self._clear()
                gradient(model, self._batch)
        torch.cuda.current_stream().wait_stream(self._stream)
        self._clear()
        self._graph = torch.cuda.CUDAGraph()
        with self._own_draws(), torch.cuda.graph(self._graph, stream=self._stream):
            self._loss = gradient(model, self._batch)
        self._grads = [param.grad for param in self._params]

    def fits(self, batch: Any) -> bool:
        """Return whether a batch has the captured shapes, and the model is where it was, in the same mode."""
        return bool(self._current_conditions(batch) == self._conditions)

    def start(self, batch: Any) -> None:
        """Replay the graph with a batch, behind everything that the usual stream has to do."""
        for own, leaf in zip(pytree.tree_leaves(self._batch), pytree.tree_leaves(batch), strict=True):
            if isinstance(own, Tensor):
                own.copy_(leaf)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), self._own_draws():
            self._graph.replay()

    def finish(self) -> Tensor:
        """Let the usual stream wait for the replay, and hand out its gradient; return the loss."""
        torch.cuda.current_stream().wait_stream(self._stream)
        for param, grad in zip(self._params, self._grads, strict=True):
            param.grad = grad
        return self._loss.clone()

    def equals_plain(self, batch: Any) -> bool:
        """Return whether a replay gives the plain gradient, for a batch and a seed that were not captured."""
        other = pytree.tree_map(lambda leaf: _halved(leaf) if isinstance(leaf, Tensor) else leaf, batch)
        torch.manual_seed(torch.initial_seed() + 1)
        self._clear()
        with torch.random.fork_rng([torch.cuda.current_device()]), _undone(self._model):
            self._gradient(self._model, other)
            plain = [param.grad for param in self._params]
        self.start(other)
        self.finish()
        grads = [param.grad for param in self._params]
        self._clear()
        if [grad is None for grad in plain] != [grad is None for grad in grads]:
            return False
        pairs = [(a, b) for a, b in zip(plain, grads, strict=True) if a is not None and b is not None]
        apart = torch.stack([(a - b).norm() for a, b in pairs]).norm()
        return bool(apart <= SAME * torch.stack([a.norm() for a, _ in pairs]).norm())

    def _clear(self) -> None:
        for param in self._params:
            param.grad = None

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        """Draw by a state of this graph's own, which begins as the usual one, and then advances that one.

        A replay writes the seed where its kernels read it: graphs that run side by side must not share it.
        """
        generator = self._generator
        usual = generator.graphsafe_get_state()
        self._own_state.set_state(generator.get_state())
        generator.graphsafe_set_state(self._own_state)
        try:
            yield
        finally:
            generator.graphsafe_set_state(usual)
            if not torch.cuda.is_current_stream_capturing():
                generator.set_state(self._own_state.get_state())

    def _current_conditions(self, batch: Any) -> Any:
        leaves = [
            (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf
            for leaf in pytree.tree_leaves(batch)
        ]
        return leaves, [t.data_ptr() for t in self._tensors], [m.training for m in self._modules]


def _halved(tensor: Tensor) -> Tensor:
    """Return a batch of the same shape with other contents: its first half, twice."""
    rows = torch.arange(len(tensor), device=tensor.device)
    return tensor[rows % max(1, -(-len(tensor) // 2))]


@contextmanager
def _undone(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers and gradients, and the state of all generators."""
    kept = [buffer.clone() for buffer in model.buffers()]
    grads = [param.grad for param in model.parameters()]
    with torch.random.fork_rng([torch.cuda.current_device()]):
        yield
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), kept, strict=True):
            buffer.copy_(value)
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.grad = grad
