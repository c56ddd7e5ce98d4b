"""A task made of the user's own parts: a model, its loss, data and an optimizer, without a class of ours."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from offbeat.core.fields import Instance, Number, Text
from offbeat.core.settings import Settings, build
from offbeat.errors import SettingError
from offbeat.experiments.tasks.base import Batch, BatchSize, Data, Epochs, Task, count_samples, evaluating
from offbeat.experiments.tasks.build_function import find_function
from offbeat.experiments.tasks.own_data import Collate, OwnData, SamplesField

_POSITIVE = Number(noun="a finite number", above=0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload(Settings):
    """The parts of a user's training, under the names that `offbeat.simulate` has for them."""

    model: Annotated[
        Callable[..., Any], Instance(of=Callable, noun="an nn.Module, or a function that builds one")
    ]
    loss: Annotated[
        Callable[[nn.Module, Any], Tensor],
        Instance(of=Callable, noun="a function of the model and a batch that returns the mean loss"),
    ]
    data: Annotated[Any, SamplesField()]
    optimizer: Annotated[
        Callable[[list[nn.Parameter]], Optimizer | Sequence[Optimizer]],
        Instance(
            of=Callable,
            noun="a function of the parameters, such as lambda params: torch.optim.SGD(params, lr=0.1)",
        ),
    ]
    evaluate: Annotated[
        Callable[[nn.Module], float] | None,
        Instance(of=Callable, noun="a function of the model that returns a number"),
    ] = None
    higher_is_better: bool = True
    batch_size: BatchSize = 32
    epochs: Epochs = 10
    collate: Annotated[Collate | None, Instance(of=Callable, noun="a function of a list of samples")] = None
    max_norm: Annotated[float | None, _POSITIVE] = None
    step_s: Annotated[float | None, Number(noun="a number of seconds", above=0)] = None

    @property
    def model_name(self) -> str:
        """The name of the model's class, or of the function that builds it."""
        known = type(self.model) if isinstance(self.model, nn.Module) else self.model
        return _name_of(known, "model")


@dataclass(frozen=True, kw_only=True)
class OwnTask(Task):
    """The task of a workload. Its metric is named after the user's function; without one, it is the loss."""

    name: ClassVar[str] = "own"
    summary: ClassVar[str] = "the user's own model and data"
    shrinks_batches: ClassVar[bool] = False

    workload: Annotated[Workload, Instance(of=Workload, noun="a Workload")] = field(repr=False)
    label: Annotated[str, Text()] = name
    lr: Annotated[float | None, _POSITIVE] = None  # type: ignore[assignment]  # None: as the optimizer has it

    def check(self) -> None:
        parts = self.workload
        own = {
            "name": self.label,
            "models": (parts.model_name,),
            "metric": "loss" if parts.evaluate is None else _name_of(parts.evaluate, "value"),
            "higher_is_better": parts.higher_is_better and parts.evaluate is not None,
            "max_norm": parts.max_norm,
            "step_s": parts.step_s,
        }
        for name, value in own.items():  # of other tasks, the class has these
            object.__setattr__(self, name, value)
        super().check()

    def load(self, folder: Path | None = None) -> OwnData:
        """Return the data, after a trial of the loss on its first batch."""
        data = OwnData(self.workload.data, self.workload.collate, self.batch_size)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            batch = next(data.test_batches())
            model = self.build().to("cpu")
            try:
                loss = self.loss(model, batch)
            except Exception as error:
                error.add_note(
                    "offbeat: the loss is called with the model and a batch, as in "
                    "loss=lambda model, batch: criterion(model(batch[0]), batch[1])"
                )
                raise
        check_loss(loss)
        return data

    def build(self) -> nn.Module:
        given = self.workload.model
        try:
            model = copy.deepcopy(given) if isinstance(given, nn.Module) else given()
        except RuntimeError as error:
            if not isinstance(given, nn.Module):
                raise
            raise SettingError(
                f"the model cannot be copied for each worker: give a function that builds it ({error})"
            ) from error
        if not isinstance(model, nn.Module):
            raise SettingError(f"model() returned {_kind(model)}: expected an nn.Module")
        check_initialized(model)
        return model

    def optimizer(self, model: nn.Module) -> Optimizer:
        (only,) = self.optimizers(model)
        return only

    def optimizers(self, model: nn.Module) -> list[Optimizer]:
        made = self.workload.optimizer(list(model.parameters()))
        several: list[Any] = list(made) if isinstance(made, list | tuple) else [made]
        if not several or not all(isinstance(each, Optimizer) for each in several):
            raise SettingError(
                f"optimizer(params) returned {_kind(made)}: expected one torch optimizer, or a list of them"
            )
        if self.lr is not None and len(several) > 1:
            raise SettingError(
                f"lr={self.lr}: your function returns {len(several)} optimizers, which may need different "
                "rates: set the rates there"
            )
        if self.lr is not None:
            for group in several[0].param_groups:
                group["lr"] = self.lr
        return several

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.workload.loss(model, batch)

    def evaluate(self, model: nn.Module, data: Data) -> float:
        with evaluating(model), torch.no_grad():
            if self.workload.evaluate is None:
                return self._mean_loss(model, data)
            value = self.workload.evaluate(model)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise SettingError(f"evaluate(model) returned {_kind(value)}: expected a number") from None

    def _mean_loss(self, model: nn.Module, data: Data) -> float:
        total, samples = 0.0, 0
        for batch in data.test_batches():
            total += count_samples(batch) * self.loss(model, batch).item()
            samples += count_samples(batch)
        return total / samples

    def __reduce__(self) -> tuple[Callable[..., Task], tuple[Any, ...]]:
        # Functions of users cannot be pickled, so other processes import them by their text again.
        return import_task, (
            self.label,
            {"batch_size": self.batch_size, "epochs": self.epochs, "lr": self.lr},
        )


def import_task(text: str, settings: Mapping[str, Any]) -> OwnTask:
    """Build the task whose parts the function `package.module:function` returns, with these settings."""
    parts = import_workload(text)
    own = {"workload": parts, "label": text, "batch_size": parts.batch_size, "epochs": parts.epochs}
    return build(OwnTask, {**own, **settings})


@lru_cache(maxsize=4)  # data sets may take long to load
def import_workload(text: str) -> Workload:
    """Call the function that a text names, under one seed, so that all processes get the same parts."""
    function = find_function(text)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = function()
    if not isinstance(parts, Mapping):
        raise SettingError(
            f"{text!r} returned {_kind(parts)}: expected a dict with model, loss, data and optimizer"
        )
    try:
        return Workload.from_table(parts)
    except SettingError as error:
        raise SettingError(f"{text!r}: {error}") from None


def check_loss(loss: Any) -> None:
    """Raise an error if this is no loss that training could begin with."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f" of shape {list(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise SettingError(f"the loss of the first batch is {_kind(loss)}{shape}: expected a single number")
    if not loss.requires_grad:
        raise SettingError(
            "the loss of the first batch has no gradient: nothing in the model is trainable, or the loss "
            "was computed under no_grad, detached or made from a Python number"
        )
    if not loss.isfinite():
        raise SettingError(
            f"the loss of the first batch is {loss.item()} before any training: look for such values in the "
            "data and the initial weights"
        )


def check_initialized(model: nn.Module) -> None:
    """Raise an error if a parameter or buffer has no values yet."""
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            if is_lazy(tensor):
                raise SettingError(f"{kind} {name} has no shape yet: run a batch through the model first")
            if tensor.is_meta:
                raise SettingError(
                    f"{kind} {name} is on the meta device, without values: call model.to_empty(device='cpu') "
                    "and initialize the weights first"
                )


def _name_of(function: Any, otherwise: str) -> str:
    name = getattr(function, "__name__", otherwise)
    return name if name.isidentifier() else otherwise  # no <lambda>


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
