"""The progress of `offbeat plan`: the outcomes of its search so far, and the ranking."""

from __future__ import annotations

from offbeat.cli.progress import Display
from offbeat.cli.tables import ranking_table
from offbeat.cli.terminal import Terminal
from offbeat.core.ledger import Ledger, WorkerTotals
from offbeat.core.settings import non_defaults
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback
from offbeat.experiments.planner.plan_file import Ranked
from offbeat.experiments.planner.ranking import Outcome, label_of, ranked, risks
from offbeat.experiments.planner.search import HALF_A_PERCENT, MARGIN


class SearchProgress:
    """The outcomes of a search so far, shown as they become known."""

    def __init__(self, console: Terminal, candidates: int, seeds: int, quiet: bool = False) -> None:
        self.outcomes: list[Outcome] = []
        self._console = console
        self._candidates = candidates
        self._seeds = seeds
        self._quiet = quiet

    @property
    def target(self) -> float | None:
        """The value to reach; None until the first outcome is known."""
        return self.outcomes[0].trials[0].job.target if self.outcomes else None

    def ranking(self) -> list[Outcome]:
        """Return the outcomes, the best first."""
        return ranked(self.outcomes)

    def callbacks(self, job: Job, ledgers: list[Ledger]) -> list[Callback]:
        """Make the callbacks of a trial: a line of progress."""
        if self._quiet:
            return []
        seed = f" seed {job.seed}" if self._seeds > 1 else ""
        label = f"{len(self.outcomes) + 1} of {self._candidates}: {label_of(job.strategy)}{seed}"

        def latest() -> list[WorkerTotals]:
            return [ledger.totals() for ledger in ledgers]

        return [Display(latest, label=label)]

    def add(self, outcome: Outcome, derived_target: bool) -> None:
        """Add an outcome and print it; after the first one, also print a derived target."""
        self.outcomes.append(outcome)
        number = f"{len(self.outcomes)} of {self._candidates}"
        result = outcome.failure or f"{outcome.seconds.mean:.3g} s to {self.target:g}"
        if not self._quiet:
            self._console.say(f"{number}: {outcome.label}: {result}")
        if derived_target and len(self.outcomes) == 1:
            self._console.warn(
                f"no --target was given: bsp ends at {outcome.value.mean:.4g}, so the target is "
                f"{self.target:.4g}, {HALF_A_PERCENT:.1%} worse"
            )

    def show(self) -> None:
        """Print the ranking as a table."""
        if not self.outcomes:
            return
        metric = self.outcomes[0].trials[0].job.task.metric
        self._console.print()
        self._console.show(ranking_table(self.ranking(), self.target, metric, self.risk))
        if any(trial.stopped for outcome in self.outcomes for trial in outcome.trials):
            self._console.print(
                f"stopped: not at the target after {MARGIN:g}x the seconds of the best candidate so far"
            )

    def risk(self, outcome: Outcome) -> str:
        """Describe the risks seen in an outcome's trials."""
        return ", ".join(risks(outcome, self.outcomes[0])) or "none seen"

    def ranking_records(self) -> tuple[Ranked, ...]:
        """Return the ranking as the plan file holds it."""
        return tuple(
            Ranked(
                strategy=outcome.strategy.name,
                strategy_settings=non_defaults(type(outcome.strategy), outcome.strategy.settings()),
                seconds_to_target=outcome.seconds.mean if outcome.succeeds else None,
                bytes_sent=outcome.nbytes.mean,
                value=outcome.value.mean,
                fate=outcome.failure,
                risk=self.risk(outcome),
            )
            for outcome in self.ranking()
        )
