"""The progress of `offbeat plan`: the outcomes of its search so far, and the ranking."""

from __future__ import annotations

from offbeat.cli.progress import Display
from offbeat.cli.tables import cost_columns, ranking_table
from offbeat.cli.terminal import Terminal
from offbeat.core.ledger import Ledger, WorkerTotals
from offbeat.core.settings import non_defaults
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback
from offbeat.experiments.planner.cost import Price
from offbeat.experiments.planner.plan_file import Ranked
from offbeat.experiments.planner.race import Comparison
from offbeat.experiments.planner.ranking import (
    Outcome,
    comparison,
    label_of,
    leader_of,
    ranked,
    risks,
    verdict,
)
from offbeat.experiments.planner.search import HALF_A_PERCENT, MARGIN


class SearchProgress:
    """The outcomes of a search so far, shown as they become known."""

    def __init__(
        self,
        console: Terminal,
        candidates: int,
        quiet: bool = False,
        price: Price | None = None,
        failing: bool = False,
    ) -> None:
        self._outcomes: dict[str, Outcome] = {}  # by label, BSP first
        self._console = console
        self._candidates = candidates
        self._quiet = quiet
        self._price = price
        self._failing = failing  # whether workers fail

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes so far, in the order of the candidates."""
        return list(self._outcomes.values())

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
        label = f"{self._place(label_of(job.strategy))}, seed {job.seed}"

        def latest() -> list[WorkerTotals]:
            return [ledger.totals() for ledger in ledgers]

        return [Display(latest, label=label)]

    def _place(self, label: str) -> str:
        """Say which candidate this is, of how many; one that was there before is run again."""
        known = label in self._outcomes
        return f"again: {label}" if known else f"{len(self._outcomes) + 1} of {self._candidates}: {label}"

    def add(self, outcome: Outcome, derived_target: bool) -> None:
        """Add or replace an outcome and print it; after the first one, also print a derived target."""
        place = self._place(outcome.label)
        self._outcomes[outcome.label] = outcome
        last = outcome.trials[-1]
        reached = None if last.reached is None else f"{last.reached.seconds:.3g} s to {self.target:g}"
        if not self._quiet:
            self._console.tell(f"{place}, seed {last.job.seed}: {reached or outcome.failure}")
        if derived_target and len(self._outcomes) == 1:
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
        extra = cost_columns(self._price, self._failing)
        self._console.show(ranking_table(self.ranking(), self.target, metric, self.risk, extra))
        if any(trial.stopped for outcome in self.outcomes for trial in outcome.trials):
            self._console.print(
                f"stopped: not at the target after {MARGIN:g}x the seconds of the best candidate so far"
            )
        failed = {trial.problem: o.label for o in self.outcomes for trial in o.trials if trial.problem}
        for problem, label in failed.items():
            self._console.tell(f"failed: {label}: {problem}")
        if said := verdict(self.ranking()):
            self._console.tell(said)
        costs = [(cost, o.label) for o in self.outcomes if o.succeeds and (cost := self._cost(o)) is not None]
        if self._price is not None and costs:
            cost, label = min(costs)
            self._console.tell(f"the cheapest: {label}, {self._price.write(cost)}")

    def _cost(self, outcome: Outcome) -> float | None:
        """Return what the machines cost until the target, on average; None without a price."""
        seconds = outcome.machine_seconds.mean
        return None if self._price is None or seconds is None else self._price.of(seconds)

    def risk(self, outcome: Outcome) -> str:
        """Describe the risks seen in an outcome's trials."""
        return ", ".join(risks(outcome, self.outcomes[0])) or "none seen"

    def ranking_records(self) -> tuple[Ranked, ...]:
        """Return the ranking as the plan file holds it."""
        leader = leader_of(self.outcomes)
        return tuple(self._record(outcome, comparison(outcome, leader)) for outcome in self.ranking())

    def _record(self, outcome: Outcome, against: Comparison | None) -> Ranked:
        return Ranked(
            strategy=outcome.strategy.name,
            strategy_settings=non_defaults(type(outcome.strategy), outcome.strategy.settings()),
            seconds_to_target=outcome.seconds.mean if outcome.succeeds else None,
            steps_to_target=outcome.steps.mean if outcome.succeeds else None,
            seconds_per_step=outcome.step_seconds.mean,
            seeds=len(outcome.trials),
            ratio=against.ratio if against else None,
            ratio_low=against.low if against else None,
            ratio_high=against.high if against else None,
            bytes_sent=outcome.nbytes.mean,
            value=outcome.value.mean,
            goodput=outcome.goodput.mean if self._failing else None,
            cost=self._cost(outcome) if outcome.succeeds else None,
            fate=outcome.failure,
            risk=self.risk(outcome),
        )
