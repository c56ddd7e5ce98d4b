"""Replica: one worker's model, laid out so that it can travel.

Weights and gradients lie in flat buffers, one for each dtype and device, whole parameters in the order in
which backward completes them, cut into *blocks* small enough to send while backward goes on.

The weights are moved into their buffer (each parameter becomes a view of it), so averaging a model needs
no copy. Gradients are gathered into theirs only for strategies that ask for blocks; then `p.grad` becomes
a view as well, as in DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.core.blocks import Block, block_sizes, make_blocks, trainable_bytes
from offbeat.core.buffers import BufferSync
from offbeat.core.optimizer import LearningRates, OptimizerState, OptimizerView
from offbeat.core.pending import Pending
from offbeat.core.port import Moment, Op, Port, StepMoment
from offbeat.errors import OffbeatError, SettingError


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
        self.stepper = None if optimizer is None else OptimizerView(optimizer)
        trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        if not trainable:
            raise SettingError("the model has no trainable parameter")
        for name, param in trainable:
            if not param.is_floating_point():
                raise SettingError(f"parameter {name} is {param.dtype}; only real floating-point ones train")
        self.blocks = make_blocks(trainable, *(grain or block_sizes(trainable_bytes(model))), apart)
        self.weights = self._lay_out_weights()
        self.grads: list[Tensor] = []
        self.buffers = BufferSync(model, buffers)
        self.coming = 0  # samples of the backward to come
        self.samples = 0  # samples of all that came since the last `take_samples`
        self._losses = 0  # that came since the last `take_loss`
        self._loss: Tensor | float = 0.0  # their sum, where they were computed: reading it would stall a GPU

    # --- layout

    def flat_groups(self) -> dict[tuple[torch.dtype, torch.device], list[Block]]:
        """The blocks of each flat buffer, in the order of `weights`."""
        kinds: dict[tuple[torch.dtype, torch.device], list[Block]] = {}
        for block in self.blocks:
            kinds.setdefault((block.params[0].dtype, block.params[0].device), []).append(block)
        return kinds

    def _lay_out_weights(self) -> list[Tensor]:
        flats = []
        for (dtype, device), blocks in self.flat_groups().items():
            flat = torch.zeros(sum(b.numel for b in blocks), dtype=dtype, device=device)
            for block, part in zip(blocks, flat.split([b.numel for b in blocks]), strict=True):
                block.weight = part
                for param, view in zip(block.params, block.views(part), strict=True):
                    view.copy_(param.detach())
                    param.data = view
            flats.append(flat)
        return flats

    def lay_out_gradients(self) -> None:
        for (dtype, device), blocks in self.flat_groups().items():
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
        return Moment(StepMoment.BEFORE_UPDATE)

    def update(self, blocks: Collection[Block] | None = None) -> Pending[bool]:
        """The moment at which the user's own optimizer steps; `True` if it did, `False` if it was skipped.

        With `blocks`, it steps those only: until then the loop (and what it does to gradients, such as
        clipping) sees no gradient of the others.
        """
        return Moment(StepMoment.AFTER_UPDATE, self._withhold(blocks) if blocks is not None else None)

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
    def rates(self) -> LearningRates:
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
        rates: LearningRates,
        without: Collection[nn.Parameter] = frozenset(),
    ) -> None:
        """Step these blocks now, by the user's own optimizer, with these gradients (flat) and rates.

        Parameters in `without` have no gradient: weight decay and momentum leave them alone.
        """
        self._with_gradients(self._stepper().step, blocks, grads, rates, without)

    def copy_gradients(self, into: list[Tensor]) -> None:
        """Copy gradients to their places in flat tensors that are laid out as `weights`; none counts as 0."""
        targets, sources = [], []
        for flat, blocks in zip(into, self.flat_groups().values(), strict=True):
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
        blocks = [block for kind in self.flat_groups().values() for block in kind]
        return [float(param.grad is not None) for block in blocks for param in block.params]

    def step_tensors(
        self, params: Sequence[list[Tensor]], rates: LearningRates, state: OptimizerState
    ) -> None:
        """Step tensors of a strategy's own, a list for each of `groups`, with a state of their own."""
        self._stepper().step_tensors(params, rates, state)

    def predict(
        self,
        blocks: Collection[Block],
        grads: list[Tensor],
        rates: LearningRates,
        without: Collection[nn.Parameter] = frozenset(),
    ) -> None:
        """As `step`, but leaving no trace in the optimizer's state: the weights alone change."""
        self._with_gradients(self._stepper().predict, blocks, grads, rates, without)

    def _with_gradients(
        self,
        step: Callable[[list[nn.Parameter], LearningRates], None],
        blocks: Collection[Block],
        grads: list[Tensor],
        rates: LearningRates,
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

    def _stepper(self) -> OptimizerView:
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
        self.buffers.start(port)
        if share is not None:
            for flat in self.weights:
                flat.mul_(share)
        op = Op.MEAN if share is None else Op.SUM
        for pending in [port.all_reduce(flat, op) for flat in self.weights]:
            await pending
        await self.buffers.finish()

    async def broadcast(self, port: Port, root: int = 0) -> None:
        """Give every worker the whole state of worker `root`: parameters, frozen ones too, and buffers."""
        state = [*self.model.parameters(), *self.model.buffers()]
        others = [t for t in state if not t.requires_grad and t.numel()]
        copies = [t.contiguous() for t in others]
        for pending in [port.broadcast(t, root) for t in [*self.weights, *copies]]:
            await pending
        for tensor, copy in zip(others, copies, strict=True):
            tensor.copy_(copy)
