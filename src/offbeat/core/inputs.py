"""Step inputs: what the training loop tells a strategy about its steps, beyond gradients."""

from __future__ import annotations

from torch import Tensor

from offbeat.errors import SettingError


class StepInputs:
    """Samples, losses and the length of an epoch, as the training loop reports them.

    coming            samples of the backward to come; `count` adds them to `samples` when it has ended
    samples           samples of all steps since the last `take_samples`
    steps_per_epoch   steps of one worker per epoch; None where the loop did not say
    """

    def __init__(self, steps_per_epoch: int | None = None) -> None:
        self.steps_per_epoch = steps_per_epoch
        self.coming = 0
        self.samples = 0
        self._keeps_losses = False
        self._losses = 0  # reported since the last `take_loss`
        self._loss: Tensor | float = 0.0  # their sum, on its device: reading it would stall a GPU

    def count(self) -> None:
        """Count the samples of a backward that has ended."""
        self.samples, self.coming = self.samples + self.coming, 0

    def take_samples(self) -> int:
        """Return the samples since the last call."""
        if not self.samples:
            raise SettingError(
                "weighting by samples needs their number: call sync.samples(len(batch)) in the loop, "
                "before backward()"
            )
        samples, self.samples = self.samples, 0
        return samples

    def keep_losses(self) -> None:
        """Keep losses from now on, for `take_loss`. A strategy that needs them asks for them in `init`."""
        self._keeps_losses = True

    def report_loss(self, loss: Tensor | float) -> None:
        """Add a step's loss to the sum, if the strategy asked for losses; else do nothing."""
        if self._keeps_losses:
            self._loss = self._loss + (loss.detach() if isinstance(loss, Tensor) else loss)
            self._losses += 1

    def take_loss(self) -> float:
        """Return the mean of the losses reported since the last call."""
        if not self._losses:
            raise SettingError("this strategy needs the loss: call sync.loss(loss) in the loop, every step")
        loss, self._loss, self._losses = self._loss / self._losses, 0.0, 0
        return float(loss)
