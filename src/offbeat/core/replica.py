"""Replica: one worker's model, laid out in flat buffers that can travel.

Weights and gradients lie in flat buffers, one per dtype and device, whole parameters in the order in which
backward completes them, cut into *blocks* small enough to send while backward is still running.

The weights are moved into their buffer (each parameter becomes a view of it), so averaging a model needs
no copy. Gradients are gathered into buffers of their own (core/gradients.py) only for strategies whose layout
asks for it; then `p.grad` becomes a view as well, as in DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.core.blocks import Block, Layout, make_blocks
from offbeat.core.buffers import BufferSync
from offbeat.core.hidden_gradients import HiddenGradients
from offbeat.core.inputs import StepInputs
from offbeat.core.members import ALONE, Members, part_of
from offbeat.core.moments import Moment, StepMoment
from offbeat.core.optimizer import OptimizerView
from offbeat.core.pending import Pending
from offbeat.core.port import Op, Port
from offbeat.errors import OffbeatError, SettingError


class Replica:
    """One worker's model and optimizer, as a strategy sees them."""

    def __init__(
        self,
        model: nn.Module,
        buffers: str = "average",
        optimizer: Optimizer | Sequence[Optimizer] = (),
        layout: Layout | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        self.model = model
        trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        if not trainable:
            raise SettingError("the model has no trainable parameter")
        for name, param in trainable:
            if not param.is_floating_point():
                raise SettingError(f"parameter {name} is {param.dtype}, but only real floats can be trained")
        layout = layout or Layout.default(model)
        self.blocks = make_blocks(trainable, layout.first_bytes, layout.block_bytes, layout.isolate)
        self.weights = self._lay_out_weights()
        self._placed: list[nn.Parameter] = []  # that are not empty, and where each of them lies
        self._addresses: list[int] = []
        self.buffers = BufferSync(model, buffers)
        self.inputs = StepInputs(steps_per_epoch)
        self.members: Members = ALONE
        self._optimizer = OptimizerView(*([optimizer] if isinstance(optimizer, Optimizer) else optimizer))

    @property
    def optimizer(self) -> OptimizerView:
        """The user's optimizer, or all of them together."""
        if not self._optimizer.optimizers:
            raise OffbeatError("this replica was made without an optimizer")
        return self._optimizer

    # --- layout

    def flat_groups(self) -> dict[tuple[torch.dtype, torch.device], list[Block]]:
        """Return the blocks of each flat buffer, in the order of `weights`."""
        groups: dict[tuple[torch.dtype, torch.device], list[Block]] = {}
        for block in self.blocks:
            groups.setdefault((block.params[0].dtype, block.params[0].device), []).append(block)
        return groups

    def _lay_out_weights(self) -> list[Tensor]:
        flats = []
        for (dtype, device), blocks in self.flat_groups().items():
            flat = torch.zeros(sum(b.numel for b in blocks), dtype=dtype, device=device)
            for block, part in zip(blocks, flat.split([b.numel for b in blocks]), strict=True):
                block.weight = part
                for param, view in zip(block.params, block.views(part), strict=True):
                    view.copy_(param.detach())
                    param.data = _with_own_storage(view, part_of(param).room)
            flats.append(flat)
        return flats

    def keep_layout(self) -> None:
        """Take parameters back into their flat buffer that the loop has moved, by `param.data = …`.

        Outside of it they would train apart from other workers. Raise an error if they cannot return.
        """
        if not self._placed:
            for block in self.blocks:
                first, size = block.weight.data_ptr(), block.weight.element_size()
                full = [(p, o) for p, o in zip(block.params, block.offsets, strict=True) if p.numel()]
                self._placed += [param for param, _ in full]
                self._addresses += [first + offset * size for _, offset in full]
        if [param.data_ptr() for param in self._placed] == self._addresses:
            return
        for block in self.blocks:
            for name, param, view in zip(block.names, block.params, block.views(block.weight), strict=True):
                if param.data_ptr() == view.data_ptr() or not view.numel():
                    continue
                if (param.shape, param.dtype, param.device) != (view.shape, view.dtype, view.device):
                    raise OffbeatError(
                        f"parameter {name} was moved to other memory after attach (by model.to(), .half() or "
                        "an assignment to .data); do that before attach, or close() and attach again"
                    )
                with torch.no_grad():
                    view.copy_(param)
                param.data = _with_own_storage(view, part_of(param).room)

    def release(self) -> None:
        """Give every parameter its own memory again."""
        for block in self.blocks:
            for param in block.params:
                param.data = param.data.clone()

    # --- moments of the user's loop

    def about_to_update(self) -> Pending[bool]:
        """Await the moment just before the user's optimizer steps: gradients are unscaled and clipped.

        `False`: the optimizer was skipped, and gradients may already be the next step's.
        """
        return Moment(StepMoment.BEFORE_UPDATE)

    def update(
        self,
        blocks: Collection[Block] | None = None,
        before: Callable[[], None] | None = None,
        averages: bool = False,
    ) -> Pending[bool]:
        """Await the step of the user's own optimizer; `True` if it stepped, `False` if it was skipped.

        With `blocks`, the optimizer steps only these: until then the loop (and what it does to gradients,
        such as clipping) sees no gradient of the others. `before` is called when the optimizer is about to
        step, and may look at the gradients, which some optimizers change. A strategy that sends blocks in
        backward, and that `averages` weights after the update, says so: a skipped step then ends after the
        next backward.
        """
        if blocks is None:
            return Moment(StepMoment.AFTER_UPDATE, before=before, averages=averages)
        others = [param for block in self.blocks if block not in blocks for param in block.params]
        return Moment(StepMoment.AFTER_UPDATE, HiddenGradients(others), before)

    # --- weights of all workers

    async def average(self, port: Port, fraction: float | None = None) -> None:
        """Replace weights and buffers by their mean over all workers.

        `fraction` is this worker's weight in a weighted mean; the fractions of all workers add up to 1.
        """
        self.keep_layout()
        self.buffers.start(port)
        if fraction is not None:
            for flat in self.weights:
                flat.mul_(fraction)
        op = Op.MEAN if fraction is None else Op.SUM
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


def _with_own_storage(view: Tensor, room: int) -> Tensor:
    """Return a tensor in the same memory whose storage is no longer than the view, or `room` elements.

    What is saved of a tensor is its whole storage: of a view, that would be the whole flat buffer. And where
    two tensors have one storage, safetensors takes them for one parameter that is used twice.
    """
    last = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    start = int(view.storage_offset())
    stop = start + max(last + 1 if view.numel() else 0, room)
    storage = view.untyped_storage()[start * view.itemsize : stop * view.itemsize]
    return view.new_empty(0).set_(storage, 0, view.shape, view.stride())
