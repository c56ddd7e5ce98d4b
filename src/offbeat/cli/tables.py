"""The tables that commands print: runs, workers, strategies of a comparison, candidates of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.markup import escape
from rich.table import Table

from offbeat.core.units import percent, size, size_unit
from offbeat.experiments.planner.cost import Price
from offbeat.experiments.planner.race import Comparison
from offbeat.experiments.planner.ranking import Outcome, comparison, leader_of
from offbeat.experiments.report.aggregate import RunGroup, Statistic, changed, number_of
from offbeat.experiments.summary import Summary


def result_table(summaries: list[Summary]) -> Table:
    """Tabulate runs, one per row: seconds, metric, bytes of workers and server, fraction of time waiting."""
    metric = summaries[0]["metric"] if summaries else "value"
    target = summaries[0]["target"] if summaries else None
    table = Table("strategy", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("settings", min_width=18, overflow="fold")
    reached = "to target" if target is None else f"to {target:g}"
    for column in ("seconds", reached, metric, "bytes", "synced", "waiting"):
        table.add_column(column, justify="right", no_wrap=True)
    for s in summaries:
        total = sum(w["compute_s"] + w["wait_s"] for w in s["per_worker"])
        waiting = sum(w["wait_s"] for w in s["per_worker"]) / total if total else 0.0
        seconds = s["seconds_to_target"]
        table.add_row(
            f"[bold]{s['strategy']}[/]",
            escape(" ".join(changed(s["strategy"], s["settings"])) or "defaults"),
            f"{s['seconds']:.3g}",
            "–" if target is None else "never" if seconds is None else f"{seconds:.3g}",
            "–" if s["value"] is None else f"{s['value']:.4f}",
            size(number_of(s, "bytes_total")),
            f"{s['sync_steps']}/{s['steps']}",
            percent(waiting),
        )
    return table


def comparison_table(groups: list[RunGroup]) -> Table:
    """Tabulate strategies, one per row: means over the seeds with their standard deviations.

    Numbers are rounded, and have one unit per column, as on the report's page.
    """
    first = groups[0].runs[0]
    target = first["target"]
    race_unit, race_bytes = _bytes_column(groups, "bytes_to_target")
    sent_unit, sent_bytes = _bytes_column(groups, "bytes_total")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    longest = max(len(word) for group in groups for word in (*group.label.split(), *group.changed()))
    table.add_column("strategy", min_width=max(9, min(longest, 20)), overflow="fold")
    race = () if target is None else (f"s to {target:g}", f"{race_unit} to {target:g}")
    for column in ("seconds", *race, first["metric"], f"{sent_unit} sent", "synced", "waiting"):
        table.add_column(column, justify="right", no_wrap=column not in race)
    for group in groups:
        runs = len(group.runs)
        more = [f"\n{escape(text)}" for text in group.changed() if text not in group.label_settings]
        table.add_row(
            "".join([f"[bold]{escape(group.label)}[/]", *more]),
            shown(group.statistic("seconds"), "{:.3g}".format),
            *([] if target is None else _race(group, runs, race_bytes)),
            shown(group.statistic("value"), "{:.4f}".format),
            shown(group.statistic("bytes_total"), sent_bytes),
            shown(group.synced, percent),
            shown(group.waiting, percent),
        )
    return table


def _bytes_column(groups: list[RunGroup], name: str) -> tuple[str, Callable[[float], str]]:
    """Return the unit of a column of bytes, that of its greatest mean, and a function that writes in it."""
    unit, each = size_unit(max(group.statistic(name).mean or 0.0 for group in groups))
    return unit, lambda nbytes: f"{nbytes / each:.3g}"


def _race(group: RunGroup, runs: int, write_bytes: Callable[[float], str]) -> list[str]:
    """Format the seconds and bytes to the target."""
    seconds, nbytes = group.statistic("seconds_to_target"), group.statistic("bytes_to_target")
    return [_to_target(seconds, runs, "{:.3g}".format), _to_target(nbytes, runs, write_bytes)]


def shown(statistic: Statistic, write: Callable[[float], str]) -> str:
    """Format a mean with its spread in the line below, or the mean alone if there was one run."""
    if statistic.mean is None:
        return "–"
    return write(statistic.mean) + (f"\n± {write(statistic.spread)}" if statistic.spread is not None else "")


def _to_target(statistic: Statistic, runs: int, write: Callable[[float], str]) -> str:
    """Format the cost of reaching the target: never, or the mean over the runs that reached it."""
    if not statistic.runs:
        return "never"
    return shown(statistic, write) + (f"\n{statistic.runs} of {runs} runs" if statistic.runs < runs else "")


def worker_table(summary: Summary) -> Table:
    """Tabulate ranks, one per row: steps, seconds computing, communicating and waiting, bytes sent."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    planned = any(w["planned_steps"] for w in summary["per_worker"])
    columns = ["rank", "steps", "computing s", "communicating s", "waiting s", "bytes sent"]
    for column in [*columns, *(["planned steps"] if planned else [])]:
        table.add_column(column, justify="right", no_wrap=True)
    for w in summary["per_worker"]:
        table.add_row(
            str(w["rank"]),
            str(w["steps"]),
            f"{w['compute_s']:.2f}",
            f"{w['communicate_s']:.2f}",
            f"{w['wait_s']:.2f}",
            size(w["bytes_sent"]),
            *([str(w["planned_steps"])] if planned else []),
        )
    return table


Columns = dict[str, Callable[[Outcome], str]]  # how each column is written, by its head


def cost_columns(price: Price | None, failing: bool) -> Columns:
    """Return the columns of a plan for machines that fail, or have a price."""
    columns: Columns = {}
    if failing:
        columns["samples/s"] = lambda outcome: _mean(outcome.goodput, "{:,.0f}".format)
    if price is not None:
        columns["cost"] = lambda outcome: _mean(outcome.machine_seconds, lambda s: price.write(price.of(s)))
    return columns


def ranking_table(
    ranking: Sequence[Outcome],
    target: float | None,
    metric: str,
    risk: Callable[[Outcome], str],
    more: Columns | None = None,
) -> Table:
    """Tabulate the candidates of a plan, the best first."""
    table = Table("", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("candidate", min_width=18, overflow="fold")
    for column in (f"s to {target:.4g}", "/ fastest", "steps", "ms/step", "bytes", *(more or ()), metric):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("risk", min_width=22, overflow="fold")
    leader = leader_of(ranking)
    for number, outcome in enumerate(ranking, 1):
        table.add_row(
            str(number),
            f"[bold]{escape(outcome.label)}[/]",
            outcome.failure or shown(outcome.seconds, "{:.3g}".format),
            "fastest" if outcome is leader else _against(comparison(outcome, leader)),
            shown(outcome.steps, "{:.0f}".format),
            _mean(outcome.step_seconds, lambda seconds: f"{1000 * seconds:.3g}"),
            _mean(outcome.nbytes, size),
            *(write(outcome) for write in (more or {}).values()),
            _mean(outcome.value, "{:.4f}".format),
            risk(outcome),
        )
    return table


def _against(comparison: Comparison | None) -> str:
    """Format a ratio with its interval in the line below."""
    if comparison is None:
        return "–"
    return f"{comparison.ratio:.2f}\n{comparison.low:.2f} to {comparison.high:.2f}"


def _mean(statistic: Statistic, write: Callable[[float], str]) -> str:
    """Format a mean without its spread."""
    return "–" if statistic.mean is None else write(statistic.mean)
