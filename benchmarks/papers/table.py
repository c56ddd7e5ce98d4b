"""The table, from what the cache holds: a paper's figure and ours, side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from benchmarks.papers.claims import Claim, Outcomes, Paper
from benchmarks.papers.runs import Cache
from benchmarks.tables import Table

COLUMNS = ["paper", "claim", "paper's figure", "ours", "settings", "command", "why it differs"]
QUESTION = """What of the papers' claims can be seen here?

In virtual time: models, data and gradients are real, seconds are what the cluster would have taken. Figures
of papers are those our sources have, marked by where they come from: [paper], [abstract] or [code]; some
claims are in words only. C is the time of a step of computing, ours wherever a paper does not say it, and K
that of the exchange of a whole model (an all-reduce, or, at a server with one NIC, all pushes). A score is
the one after the last step, of the published test split; a difference is seed by seed, with the lowest and
highest."""


def outcomes_of(claim: Claim, cache: Cache) -> Outcomes | None:
    """By contender, for the seeds that are done for all of them; None: for none."""
    done = [{run.seed for run in runs if run in cache} for runs in claim.runs.values()]
    seeds = set.intersection(*done)
    if not seeds:
        return None
    return {name: [cache[run] for run in runs if run.seed in seeds] for name, runs in claim.runs.items()}


def write(papers: Sequence[Paper], cache: Cache, name: str = "papers") -> Table:
    table = Table(name, QUESTION, COLUMNS)
    for machine, count in machines(papers, cache).most_common():
        table.note(f"{count} runs on: {machine}")
    for paper in papers:
        if paper.unchecked:
            table.note(f"not checked of {paper.title}: {paper.unchecked}")
    for paper in papers:
        for claim in paper.claims:
            outcomes = outcomes_of(claim, cache)
            table.row(
                paper.title,
                claim.claim,
                f"{claim.figure or 'in words'} [{claim.mark}]" if claim.source else "none at hand",
                "not run" if outcomes is None else claim.ours(outcomes),
                claim.settings,
                f"`--only {paper.name}`",
                claim.why,
            )
    return table


def machines(papers: Iterable[Paper], cache: Cache) -> Counter[str]:
    runs = {run for paper in papers for claim in paper.claims for some in claim.runs.values() for run in some}
    return Counter(cache[run]["machine"] for run in runs if run in cache)
