"""Local model: a rank's part of a sharded model, with plain parameters.

A sharded parameter is a DTensor; its local tensor is the part that this rank holds. The local model has the
same modules (shallow copies) and buffers, but the local tensors as its parameters, so strategies, blocks and
codecs see a plain model. The memory is the same: the replica moves the local parameters into flat buffers,
and `bind` makes the DTensors, and FSDP2's own views of them, parts of these buffers.

FSDP2 pads parts to equal size. Every part has the room of the largest one in the flat buffers, so that
all members of a replica have the same blocks, even if some of their parts are empty.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from offbeat.core.members import Part
from offbeat.core.port import Op
from offbeat.errors import OffbeatError, SettingError
from offbeat.worlds.processes.groups import fsdp_modules
from offbeat.worlds.processes.port import ProcessPort


class LocalModel:
    """The plain model of a rank's local parts, bound to the memory of the sharded model."""

    def __init__(self, model: nn.Module, members: ProcessPort) -> None:
        self.model = model
        self._fsdp = {p.sharded_param: p for p in _fsdp_params(model)}
        for name, param in model.named_parameters():
            _check(name, param, self._fsdp.get(param))
        self._local: dict[Any, nn.Parameter] = {p: _local_parameter(p) for p in model.parameters()}
        self._measure_parts(members)
        self.pairs = [(p, local) for p, local in self._local.items() if local is not p]
        self._gradients: dict[Any, DTensor] = {}  # as `return_gradients` gave them to the loop last
        self._fsdp_modules = list(fsdp_modules(model))
        self.names = {param: name for name, param in model.named_parameters()}
        self.module = self._copy_modules(model)

    def of(self, param: Any) -> Any:
        """Return the local parameter of a parameter; any other object is returned as it is."""
        return self._local.get(param, param)

    def _measure_parts(self, members: ProcessPort) -> None:
        """Attach a `Part` to each local parameter; all members call this together."""
        device = next(iter(self._local.values())).device
        numels, rooms = (
            torch.tensor([count(param) for param in self._local], dtype=torch.float64, device=device)
            for count in (lambda param: self._local[param].numel(), self._padded_numel)
        )
        for pending in (members.all_reduce(numels, Op.SUM), members.all_reduce(rooms, Op.MAX)):
            pending.wait()
            pending.result()
        for (param, local), numel, room in zip(
            self._local.items(), numels.tolist(), rooms.tolist(), strict=True
        ):
            local.part = Part(int(room), int(numel), param.numel() / max(1, numel))  # type: ignore[attr-defined]

    def _padded_numel(self, param: nn.Parameter) -> int:
        fsdp = self._fsdp.get(param)
        return self._local[param].numel() if fsdp is None else fsdp.padded_sharded_param_size.numel()

    def _copy_modules(self, model: nn.Module) -> nn.Module:
        copies: dict[nn.Module, nn.Module] = {}
        for module in model.modules():
            copied = copies[module] = object.__new__(type(module))
            parameters = {name: self.of(param) for name, param in module._parameters.items()}
            vars(copied).update(vars(module), _parameters=parameters)
        for module, copied in copies.items():
            children = {name: copies.get(child, child) for name, child in module._modules.items()}  # type: ignore
            vars(copied)["_modules"] = children
        return copies[model]

    # --- memory

    def bind(self) -> None:
        """Make the sharded parameters views of their local parameters' memory, after that was moved."""
        for param, local in self.pairs:
            if not local.requires_grad:
                continue  # not moved
            fsdp = self._fsdp.get(param)
            room = local.numel() if fsdp is None else fsdp.padded_sharded_param_size.numel()
            memory = _tensor_at(local.detach(), room)
            param._local_tensor = memory[: local.numel()].as_strided(local.shape, local.stride())
            if fsdp is not None:
                fsdp._sharded_param_data = memory
        self.check_bound()

    def check_bound(self) -> None:
        """Raise an error if a parameter has left its memory: it would train apart from other replicas."""
        for param, local in self.pairs:
            fsdp = self._fsdp.get(param)
            views = [param._local_tensor] if fsdp is None else [param._local_tensor, fsdp._sharded_param_data]
            if local.requires_grad and any(_address(view) != _address(local) for view in views):
                raise OffbeatError(
                    f"parameter {self.names[param]} was moved to other memory after attach (by model.to(), "
                    ".half() or load_state_dict(assign=True)); do that before attach, or close() and attach "
                    "again"
                )

    def release(self) -> None:
        """Give every sharded parameter memory of its own again; the replica has released its parameters."""
        self.reshard()
        for param, local in self.pairs:
            fsdp = self._fsdp.get(param)
            if fsdp is not None and local.requires_grad:  # with room for FSDP2's padding
                own = local.new_zeros(fsdp.padded_sharded_param_size).view(-1)
                own[: local.numel()].copy_(local.detach().view(-1))
                local.data = own[: local.numel()].view_as(local)
        self.bind()

    def reshard(self) -> None:
        """Make FSDP2 gather parameters anew before it uses them: their local parts have been written to."""
        for module in self._fsdp_modules:
            module.reshard()

    # --- gradients

    def take_gradient(self, param: Any) -> None:
        """Make the local part of the loop's gradient the local parameter's gradient."""
        local = self._local[param]
        if local is param:
            return
        if param.grad is None:
            local.grad = None
            return
        grad = local_gradient(param)
        changes = param.grad._version  # by the loop: torch counts them in the DTensor alone
        if changes != getattr(param.grad, "changes_taken", 0):
            param.grad.changes_taken = changes
            torch.autograd.graph.increment_version(grad)
        local.grad = grad

    def take_gradients(self) -> None:
        """Make the local parts of all gradients of the loop those of the local parameters."""
        for param, _ in self.pairs:
            self.take_gradient(param)

    def return_gradients(self) -> None:
        """Give the loop the gradients that the local parameters have now."""
        for param, local in self.pairs:
            if local.grad is None:
                param.grad = None
            elif param.grad is None or _address(param.grad._local_tensor) != _address(local.grad):
                param.grad = self._distributed_gradient(param, local.grad)

    def _distributed_gradient(self, param: Any, grad: Tensor) -> DTensor:
        """Return the DTensor of a local gradient; of a block's memory, the same object at each step."""
        known = self._gradients.get(param)
        if known is None or _address(known._local_tensor) != _address(grad):
            known = self._gradients[param] = distributed(grad, param)
        return known


def local_gradient(param: Any) -> Tensor:
    """Return the local part of a sharded parameter's gradient, laid out as the parameter is."""
    grad = param.grad
    if grad.placements != param.placements:
        param.grad = grad = grad.redistribute(placements=param.placements)
    local = grad._local_tensor
    if hasattr(local, "trigger_wait"):  # the result of a collective that torch waits for at its first use
        local = local.wait()
        param.grad = distributed(local, param)
    return local  # type: ignore[no-any-return]


def distributed(local: Tensor, like: Any) -> DTensor:
    """Return the DTensor of which `local` is this rank's part, laid out as the parameter `like`."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _local_parameter(param: Any) -> nn.Parameter:
    if not isinstance(param, DTensor):
        return param  # type: ignore[no-any-return]
    return nn.Parameter(param._local_tensor.detach(), requires_grad=param.requires_grad)


def _fsdp_params(model: nn.Module) -> list[Any]:
    """Return FSDP2's own records of the parameters that it shards."""
    states = [module._get_fsdp_state() for module in fsdp_modules(model)]
    groups = [
        group
        for state in states
        for group in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        if group is not None
    ]
    return [param for group in groups for param in group.fsdp_params]


def _check(name: str, param: Any, fsdp: Any) -> None:
    if fsdp is not None and fsdp.offload_to_cpu:
        raise SettingError(
            f"parameter {name} is offloaded to the CPU, which moves its memory at each step; shard the model "
            "without an offload policy"
        )
    if isinstance(param, DTensor):
        if any(isinstance(placement, Partial) for placement in param.placements):
            raise SettingError(
                f"parameter {name} has a Partial placement: its value is a sum over ranks, which cannot be "
                "exchanged part by part; redistribute it to Shard or Replicate"
            )
        if type(param._local_tensor) is not Tensor:
            raise SettingError(
                f"parameter {name} has local parts of the type {type(param._local_tensor).__name__}; only "
                "plain tensors can be exchanged"
            )


def _tensor_at(view: Tensor, numel: int) -> Tensor:
    """Return `numel` elements of the memory where `view` begins, as a tensor that begins its own storage.

    A DTensor of a local tensor that begins within a storage cannot be copied by `copy.deepcopy`.
    """
    flat = view.as_strided((numel,), (1,))
    return torch.from_dlpack(flat) if numel else flat


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size()
