"""Step inputs: the facts, other than gradients, that the training loop reports to a strategy."""

from __future__ import annotations

from torch import Tensor

from offbeat.errors import SettingError


class StepInputs:
    """Samples, losses and the length of an epoch, as the training loop reports them.

    upcoming          samples of the next backward; `count` adds them to `samples` when backward has ended
    samples           samples of all steps since the last `take_samples`
    steps_per_epoch   steps of one worker per epoch; None where the loop did not say
    skipped_updates   steps without an update: a GradScaler, or the loop, skipped the optimizer
    """

    def __init__(self, steps_per_epoch: int | None = None) -> None:
        self.steps_per_epoch = steps_per_epoch
        self.upcoming = 0
        self.samples = 0
        self.skipped_updates = 0
        self._records_losses = False
        self._losses = 0  # reported since the last `take_loss`
        self._loss: Tensor | float = 0.0  # their sum, on its device: reading it would stall a GPU

    def count(self) -> None:
        """Count the samples of a backward that has ended."""
        self.samples, self.upcoming = self.samples + self.upcoming, 0

    def take_samples(self) -> int:
        """Return the number of samples since the last call."""
        if not self.samples:
            raise SettingError(
                "weighting by samples needs their number: call sync.samples(len(batch)) in the loop, "
                "before backward()"
            )
        samples, self.samples = self.samples, 0
        return samples

    def record_losses(self) -> None:
        """Record losses from now on, for `take_loss`. A strategy that needs losses calls this in `init`."""
        self._records_losses = True

    def report_loss(self, loss: Tensor | float) -> None:
        """Add a step's loss to the sum, if losses are recorded; else do nothing."""
        if self._records_losses:
            self._loss = self._loss + (loss.detach() if isinstance(loss, Tensor) else loss)
            self._losses += 1

    def take_loss(self) -> float:
        """Return the mean of the losses reported since the last call."""
        if not self._losses:
            raise SettingError("this strategy needs the loss: call sync.loss(loss) in the loop, every step")
        loss, self._loss, self._losses = self._loss / self._losses, 0.0, 0
        return float(loss)
