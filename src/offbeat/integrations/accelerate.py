"""Accelerate: `prepare` in the place of `Accelerator.prepare`, with Offbeat in the place of DDP.

    model, optimizer, loader, sync = prepare(
        accelerator, model, optimizer, loader, strategy=offbeat.LocalSGD(period=8)
    )

The rest of the loop stays: `accumulate`, `backward`, `clip_grad_norm_`, `save_state` and `load_state`.
Evaluate and save models within `sync.consensus()`, on all ranks, and call `sync.close()` at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer

from offbeat.attach import Sync, attach
from offbeat.core.strategy import Strategy
from offbeat.errors import SettingError
from offbeat.integrations.calls import OptimizerCalls
from offbeat.integrations.rank_state import load_rank_state, save_rank_state

# Plain data parallelism.
REPLACED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
# What an accelerator has prepared: one after the other, if there are several models.
_prepared: WeakKeyDictionary[Accelerator, list[Sync]] = WeakKeyDictionary()


def prepare(
    accelerator: Accelerator, *objects: Any, strategy: Strategy[Any], **options: Any
) -> tuple[Any, ...]:
    """Prepare a model, its optimizers, loaders and schedulers; return them in order, and the `Sync` last.

    The options are those of `offbeat.attach`.
    """
    check_accelerator(accelerator)
    models = [each for each in objects if isinstance(each, nn.Module)]
    optimizers = [each for each in objects if isinstance(each, Optimizer)]
    if len(models) != 1 or not optimizers:
        raise SettingError(
            f"prepare() got {len(models)} models and {len(optimizers)} optimizers: one model and its "
            "optimizers are attached in one call"
        )
    (model,) = models
    others = [each for each in objects if each is not model]
    prepared_model = accelerator.prepare_model(model, evaluation_mode=True)  # on its device, without DDP
    prepared = accelerator.prepare(*others)
    prepared = iter(prepared if len(others) > 1 else [prepared])
    in_order = [prepared_model if each is model else next(prepared) for each in objects]
    sync = attach(model, [each for each in in_order if isinstance(each, Optimizer)], strategy, **options)
    keep_traffic_out(accelerator, prepared_model, sync)
    end_steps(sync, [each for each in in_order if isinstance(each, Optimizer)])
    _wrap_checkpoints(accelerator, sync)
    return (*in_order, sync)


def check_accelerator(accelerator: Accelerator) -> None:
    """Raise an error if the accelerator shards the model, or parallelizes it in another way."""
    if accelerator.distributed_type not in REPLACED:
        raise SettingError(
            f"Accelerate is configured for {accelerator.distributed_type.value}: Offbeat takes the place of "
            "DDP. Configure plain data parallelism, or call offbeat.attach with group="
        )


def keep_traffic_out(accelerator: Accelerator, model: nn.Module, sync: Sync) -> None:
    """Let `accelerator.no_sync`, and with it `accumulate`, stop the traffic of this model."""
    no_sync_of_others = accelerator.no_sync

    @contextmanager
    def no_sync(model_to_accumulate: nn.Module) -> Iterator[None]:
        ours = model_to_accumulate is model
        with sync.no_sync() if ours else no_sync_of_others(model_to_accumulate):
            yield

    accelerator.no_sync = lambda model: no_sync(model)


def end_steps(sync: Sync, optimizers: Sequence[Optimizer]) -> None:
    """End a step when all of these optimizers were called, also where a GradScaler skipped them."""
    calls = OptimizerCalls(sync, len(optimizers))
    for optimizer in optimizers:
        _record_calls(optimizer, calls)


def _record_calls(optimizer: Any, calls: OptimizerCalls) -> None:
    step = optimizer.step

    def step_and_record(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.gradient_state.sync_gradients:  # Accelerate does not step, but accumulates
            return step(*args, **kwargs)
        with calls.of(self):
            return step(*args, **kwargs)

    optimizer.step = MethodType(step_and_record, optimizer)  # a scheduler of torch wraps methods only


def _wrap_checkpoints(accelerator: Accelerator, sync: Sync) -> None:
    """Let `save_state` save the models that all ranks share, and each rank's own states beside them."""
    syncs = _prepared.setdefault(accelerator, [])
    syncs.append(sync)
    if len(syncs) > 1:
        return
    save, load = accelerator.save_state, accelerator.load_state

    def save_state(*args: Any, **kwargs: Any) -> Any:
        attached = [each for each in syncs if not each.closed]
        with ExitStack() as shown:
            for each in attached:
                each.settle()  # a look does not wait for what is in flight, but a checkpoint is to have it
                shown.enter_context(each.consensus())
            folder = save(*args, **kwargs)
        for number, each in enumerate(attached):
            save_rank_state(each, folder, number)
        accelerator.wait_for_everyone()
        return folder

    def load_state(input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        attached = [each for each in syncs if not each.closed]
        if input_dir is None and attached:
            raise SettingError("load_state(): name the folder, which each rank's own state is read from, too")
        load(input_dir, *args, **kwargs)
        for number, each in enumerate(attached):
            load_rank_state(each, str(input_dir), number)

    accelerator.save_state, accelerator.load_state = save_state, load_state
