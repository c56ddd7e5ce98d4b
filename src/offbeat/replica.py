"""Replica: one worker's model, laid out so that it can travel.

Weights and gradients lie in flat buffers, one for each dtype and device, whole parameters in the order in
which backward completes them, cut into *blocks* small enough to send while backward goes on.

The weights are moved into their buffer (each parameter becomes a view of it), so averaging a model needs
no copy. Gradients are gathered into theirs only for strategies that ask for blocks; then `p.grad` becomes
a view as well, as in DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.codecs import Matrix
from offbeat.errors import OffbeatError, SettingError
from offbeat.port import Moment, Op, Pending, Port, When
from offbeat.statistics import Statistics
from offbeat.stepping import Rates, State, Stepper

BLOCKS = 12  # about, that a model is cut into
SMALLEST_BLOCK_BYTES = 256 << 10
LARGEST_BLOCK_BYTES = 8 << 20
FIRST_BLOCK_BYTES = 1 << 20  # at most, so that sending starts early in backward
ALIGNMENT_BYTES = 64  # what torch's own allocations have, and vectorised kernels like


class Block:
    """Some parameters that travel together: a slice of the flat weights, and one of the flat gradients.

    `marked` is the gradient followed by one mark a parameter, 1 where this worker has a gradient for it.
    Averaged along with the gradient, the marks tell which parameters got one anywhere.
    """

    def __init__(self, index: int, names: list[str], params: list[nn.Parameter]) -> None:
        self.index = index
        self.names = names
        self.params = params
        self.offsets: list[int] = []
        # Memory formats such as channels_last are kept; strides with gaps in them are not.
        self.strides = [torch.empty_like(param, device="meta").stride() for param in params]
        self.numel = 0
        align = ALIGNMENT_BYTES // params[0].element_size()
        for param in params:
            self.offsets.append(self.numel)
            self.numel += -(-param.numel() // align) * align
        self.weight = torch.empty(0)  # laid out by the replica
        self.marked = torch.empty(0)
        self.marks = torch.empty(0)
        self.grad_views: list[Tensor] = []
        self.absent: list[nn.Parameter] = []  # got no gradient on this worker in this step

    @property
    def grad(self) -> Tensor:
        return self.marked[: self.numel]

    def mark(self) -> None:
        """Say in the marks which parameters have a gradient here."""
        self.marks.fill_(1)
        for param in self.absent:
            self.marks[self._position(param)] = 0

    def hand_out(self) -> None:
        """The gradient and its marks have been averaged: give the absent ones what the others found."""
        if not self.absent:
            return
        for param in self.absent:
            position = self._position(param)
            found = self.marks[position].item() > 0
            param.grad = self.grad_views[position] if found else None
        self.absent.clear()

    def take_absent(self) -> list[int]:
        """The positions of the absent ones; who takes them will hand out later what the others found."""
        positions = [self._position(param) for param in self.absent]
        self.absent.clear()
        return positions

    def matrices(self) -> list[Matrix]:
        """Each parameter as a matrix of its outermost dimension by all others, as it lies in memory."""
        found = []
        for param, stride, offset in zip(self.params, self.strides, self.offsets, strict=True):
            if param.numel():
                rows = max(zip(stride, param.shape, strict=True), default=(1, 1))[1]
                found.append(Matrix(offset, rows, param.numel() // rows))
        return found

    def clear_gaps(self, flat: Tensor) -> None:
        """Put zeros where `flat` belongs to no parameter: between two, for the sake of alignment."""
        starts = [*self.offsets[1:], self.numel]
        for param, offset, start in zip(self.params, self.offsets, starts, strict=True):
            if offset + param.numel() < start:
                flat[offset + param.numel() : start] = 0

    def name_of(self, param: nn.Parameter) -> str:
        return self.names[self._position(param)]

    def _position(self, param: nn.Parameter) -> int:
        return next(i for i, p in enumerate(self.params) if p is param)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parts of `flat` that belong to each parameter, in its shape and memory format."""
        return [
            flat.as_strided(param.shape, stride, int(flat.storage_offset()) + offset)
            for param, stride, offset in zip(self.params, self.strides, self.offsets, strict=True)
        ]


def grain_of(nbytes: int) -> tuple[int, int]:
    """How large the first block and the others of a model should be, in bytes, to hide behind backward.

    The last block is complete when backward ends, and nothing hides it: of n blocks, 1/n of what sending
    takes is waited for. But each operation costs some time of its own, so blocks must not be too small.
    """
    block_bytes = min(max(nbytes // BLOCKS, SMALLEST_BLOCK_BYTES), LARGEST_BLOCK_BYTES)
    return min(block_bytes, FIRST_BLOCK_BYTES), block_bytes


def cut(
    named: Iterable[tuple[str, nn.Parameter]],
    first_bytes: int,
    block_bytes: int,
    apart: Collection[nn.Parameter] = frozenset(),
) -> list[Block]:
    """Blocks of at least the given sizes, of whole parameters, in backward order (the reverse of forward).

    Parameters in `apart` share no block with others.
    """
    open_blocks: dict[tuple[torch.dtype, torch.device, bool], list[tuple[str, nn.Parameter]]] = {}
    filled: dict[tuple[torch.dtype, torch.device, bool], int] = {}
    closed: list[list[tuple[str, nn.Parameter]]] = []
    for name, param in reversed(list(named)):
        kind = (param.dtype, param.device, param in apart)
        open_blocks.setdefault(kind, []).append((name, param))
        filled[kind] = filled.get(kind, 0) + param.numel() * param.element_size()
        if filled[kind] >= (first_bytes if not closed else block_bytes):
            closed.append(open_blocks.pop(kind))
            del filled[kind]
    closed.extend(open_blocks.values())
    return [Block(i, [n for n, _ in part], [p for _, p in part]) for i, part in enumerate(closed)]


def trainable_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


class Replica:
    """One worker's weights, gradients and statistics."""

    def __init__(
        self,
        model: nn.Module,
        buffers: str = "average",
        optimizer: Optimizer | None = None,
        grain: tuple[int, int] | None = None,
        apart: Collection[nn.Parameter] = frozenset(),
    ) -> None:
        self.model = model
        self.stepper = None if optimizer is None else Stepper(optimizer)
        trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        if not trainable:
            raise SettingError("the model has no trainable parameter")
        for name, param in trainable:
            if not param.is_floating_point():
                raise SettingError(f"parameter {name} is {param.dtype}; only real floating-point ones train")
        self.blocks = cut(trainable, *(grain or grain_of(trainable_bytes(model))), apart)
        self.weights = self._lay_out_weights()
        self.grads: list[Tensor] = []
        self.statistics = Statistics(model, buffers)
        self.coming = 0  # samples of the backward to come
        self.samples = 0  # samples of all that came since the last `take_samples`
        self._losses = 0  # that came since the last `take_loss`
        self._loss: Tensor | float = 0.0  # their sum, where they were computed: reading it would stall a GPU

    # --- layout

    def kinds(self) -> dict[tuple[torch.dtype, torch.device], list[Block]]:
        """The blocks of each flat buffer, in the order of `weights`."""
        kinds: dict[tuple[torch.dtype, torch.device], list[Block]] = {}
        for block in self.blocks:
            kinds.setdefault((block.params[0].dtype, block.params[0].device), []).append(block)
        return kinds

    def _lay_out_weights(self) -> list[Tensor]:
        flats = []
        for (dtype, device), blocks in self.kinds().items():
            flat = torch.zeros(sum(b.numel for b in blocks), dtype=dtype, device=device)
            for block, part in zip(blocks, flat.split([b.numel for b in blocks]), strict=True):
                block.weight = part
                for param, view in zip(block.params, block.views(part), strict=True):
                    view.copy_(param.detach())
                    param.data = view
            flats.append(flat)
        return flats

    def lay_out_gradients(self) -> None:
        for (dtype, device), blocks in self.kinds().items():
            sizes = [b.numel + len(b.params) for b in blocks]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
            for block, part in zip(blocks, flat.split(sizes), strict=True):
                block.marked = part
                block.marks = part[block.numel :]
                block.grad_views = block.views(part)
            self.grads.append(flat)

    def check_layout(self) -> None:
        """Weights that were moved away (model.to, .half) would train on unnoticed, without the others."""
        for block in self.blocks:
            if block.params[0].data_ptr() != block.weight.data_ptr():
                raise OffbeatError(
                    f"parameter {block.names[0]} was moved to other memory after attach (by model.to(), "
                    ".half() or an assignment to .data); do that before attach, or close() and attach again"
                )

    def check_unscaled(self) -> None:
        """Under a GradScaler, a fused optimizer sees to scale and overflow inside of its own step."""
        if self.stepper is not None and hasattr(self.stepper.optimizer, "found_inf"):
            raise OffbeatError(
                "this strategy needs gradients as they are just before the optimizer steps, but a fused "
                "optimizer leaves it to its own step to unscale them; build the optimizer with fused=False"
            )

    def release(self) -> None:
        """Give every parameter memory of its own again."""
        for block in self.blocks:
            for param in block.params:
                param.data = param.data.clone()

    # --- what strategies use

    def about_to_update(self) -> Pending[bool]:
        """The moment just before the user's optimizer steps: gradients are unscaled and clipped by now.

        `False`: the optimizer was skipped, and gradients may be the next step's already.
        """
        return Moment(When.BEFORE_UPDATE)

    def update(self, blocks: Collection[Block] | None = None) -> Pending[bool]:
        """The moment at which the user's own optimizer steps; `True` if it did, `False` if it was skipped.

        With `blocks`, it steps those only: until then the loop (and what it does to gradients, such as
        clipping) sees no gradient of the others.
        """
        return Moment(When.AFTER_UPDATE, self._withhold(blocks) if blocks is not None else None)

    @property
    def optimizer(self) -> Optimizer:
        """The user's."""
        return self._stepper().optimizer

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the user's optimizer: settings, and whom they are for."""
        return self.optimizer.param_groups

    @property
    def overflowed(self) -> bool:
        """The user's optimizer, just called, skipped its step by itself: a fused one, under a GradScaler."""
        return self._stepper().overflowed

    @property
    def rates(self) -> Rates:
        """The learning rates of the user's optimizer, as they are now."""
        return self._stepper().rates

    @property
    def elementwise(self) -> bool:
        """Whether the user's optimizer could step pieces of a parameter apart."""
        return self._stepper().elementwise

    def state_of(self, param: nn.Parameter) -> dict[str, Any]:
        """What the user's optimizer keeps for this parameter."""
        state: dict[str, Any] = self._stepper().optimizer.state.get(param, {})
        return state

    def step(
        self,
        blocks: Collection[Block],
        grads: list[Tensor],
        rates: Rates,
        without: Collection[nn.Parameter] = frozenset(),
    ) -> None:
        """Step these blocks now, by the user's own optimizer, with these gradients (flat) and rates.

        Parameters in `without` have no gradient: weight decay and momentum leave them alone.
        """
        self._with_gradients(self._stepper().step, blocks, grads, rates, without)

    def copy_gradients(self, into: list[Tensor]) -> None:
        """Copy gradients to their places in flat tensors that are laid out as `weights`; none counts as 0."""
        targets, sources = [], []
        for flat, blocks in zip(into, self.kinds().values(), strict=True):
            for block, part in zip(blocks, flat.split([b.numel for b in blocks]), strict=True):
                for param, view in zip(block.params, block.views(part), strict=True):
                    if param.grad is None:
                        view.zero_()
                    else:
                        targets.append(view)
                        sources.append(param.grad)
        if targets:
            torch._foreach_copy_(targets, sources)

    @property
    def marks(self) -> list[float]:
        """For each parameter, in the order of `weights`, 1 if it has a gradient now, else 0."""
        blocks = [block for kind in self.kinds().values() for block in kind]
        return [float(param.grad is not None) for block in blocks for param in block.params]

    def stage(self, params: Sequence[list[Tensor]], rates: Rates, state: State) -> None:
        """Step tensors of a strategy's own, a list for each of `groups`, with a state of their own."""
        self._stepper().stage(params, rates, state)

    def predict(
        self,
        blocks: Collection[Block],
        grads: list[Tensor],
        rates: Rates,
        without: Collection[nn.Parameter] = frozenset(),
    ) -> None:
        """As `step`, but leaving no trace in the optimizer's state: the weights alone change."""
        self._with_gradients(self._stepper().predict, blocks, grads, rates, without)

    def _with_gradients(
        self,
        step: Callable[[list[nn.Parameter], Rates], None],
        blocks: Collection[Block],
        grads: list[Tensor],
        rates: Rates,
        without: Collection[nn.Parameter],
    ) -> None:
        params = [param for block in blocks for param in block.params]
        before = [param.grad for param in params]
        for block, flat in zip(blocks, grads, strict=True):
            for param, view in zip(block.params, block.views(flat), strict=True):
                param.grad = None if param in without else view
        step(params, rates)
        for param, grad in zip(params, before, strict=True):
            param.grad = grad

    def _withhold(self, blocks: Collection[Block]) -> Callable[[], None]:
        """Hide the gradients of all other blocks; what gives them back."""
        hidden = [param for block in self.blocks if block not in blocks for param in block.params]
        grads = [param.grad for param in hidden]
        for param in hidden:
            param.grad = None

        def give_back() -> None:
            for param, grad in zip(hidden, grads, strict=True):
                if param.grad is None:  # else it is the next step's already: the optimizer was skipped
                    param.grad = grad

        return give_back

    def _stepper(self) -> Stepper:
        if self.stepper is None:
            raise OffbeatError("this replica has no optimizer to step with")
        return self.stepper

    def count_samples(self) -> None:
        """Their backward has ended: the samples told of before it count from now on."""
        self.samples, self.coming = self.samples + self.coming, 0

    def take_samples(self) -> int:
        """The samples seen since this was last asked."""
        if not self.samples:
            raise SettingError(
                "weighting by samples needs to know how many there were: call sync.samples(len(batch)) "
                "in the loop, before backward()"
            )
        samples, self.samples = self.samples, 0
        return samples

    def tell_loss(self, loss: Tensor | float) -> None:
        self._loss = self._loss + (loss.detach() if isinstance(loss, Tensor) else loss)
        self._losses += 1

    def take_loss(self) -> float:
        """The mean of the losses told since this was last asked."""
        if not self._losses:
            raise SettingError("this strategy looks at the loss: call sync.loss(loss) in the loop, each step")
        loss, self._loss, self._losses = self._loss / self._losses, 0.0, 0
        return float(loss)

    async def average(self, port: Port, share: float | None = None) -> None:
        """Replace weights and statistics by their mean over all workers.

        `share` is what this worker counts for, where workers do not count alike; all shares add up to 1.
        """
        self.check_layout()
        self.statistics.start(port)
        if share is not None:
            for flat in self.weights:
                flat.mul_(share)
        op = Op.MEAN if share is None else Op.SUM
        for pending in [port.reduce(flat, op) for flat in self.weights]:
            await pending
        await self.statistics.finish()

    async def share(self, port: Port, root: int = 0) -> None:
        """Give every worker the whole state of worker `root`: parameters, frozen ones too, and buffers."""
        state = [*self.model.parameters(), *self.model.buffers()]
        others = [t for t in state if not t.requires_grad and t.numel()]
        copies = [t.contiguous() for t in others]
        for pending in [port.broadcast(t, root) for t in [*self.weights, *copies]]:
            await pending
        for tensor, copy in zip(others, copies, strict=True):
            tensor.copy_(copy)
