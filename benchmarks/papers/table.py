"""Table of claims: the paper's figure and ours, side by side, from the cached outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from benchmarks.papers.claims import Claim, Outcomes, Paper
from benchmarks.papers.runs import Cache
from benchmarks.support.tables import Table

COLUMNS = ["paper", "claim", "paper's figure", "ours", "settings", "command", "why it differs"]
QUESTION = """Do the papers' claims hold here?

In virtual time: models, data and gradients are real, seconds are those that the cluster would have taken.
Papers' figures are quoted from our sources and marked [paper], [abstract] or [code]; some claims are in words
only. C is the computation time of a step, chosen by us where a paper does not state it. K is the time to
exchange a whole model: an all-reduce, or all pushes to a server with one NIC. A score is measured after the
last step, on the published test split; differences are taken seed by seed, with lowest and highest."""


def outcomes_of(claim: Claim, cache: Cache) -> Outcomes | None:
    """Return the outcomes by contender, for the seeds that all have finished; None if there are none."""
    done = [{run.seed for run in runs if run in cache} for runs in claim.runs.values()]
    seeds = set.intersection(*done)
    if not seeds:
        return None
    return {name: [cache[run] for run in runs if run.seed in seeds] for name, runs in claim.runs.items()}


def build_table(papers: Sequence[Paper], cache: Cache) -> Table:
    """Build the table of all claims; claims without outcomes are marked "not run"."""
    table = Table("papers", QUESTION, COLUMNS)
    for machine, count in machines(papers, cache).most_common():
        table.note(f"{count} runs on: {machine}")
    for paper in papers:
        if paper.unchecked:
            table.note(f"{paper.title}, not checked: {paper.unchecked}")
    for paper in papers:
        for claim in paper.claims:
            outcomes = outcomes_of(claim, cache)
            table.row(
                paper.title,
                claim.claim,
                f"{claim.figure or 'in words'} [{claim.mark}]" if claim.source else "none known",
                "not run" if outcomes is None else claim.ours(outcomes),
                claim.settings,
                f"`--only {paper.name}`",
                claim.why,
            )
    return table


def machines(papers: Iterable[Paper], cache: Cache) -> Counter[str]:
    """Count the cached runs by machine."""
    runs = {run for paper in papers for claim in paper.claims for some in claim.runs.values() for run in some}
    return Counter(cache[run]["machine"] for run in runs if run in cache)
