"""Cases and their outcomes, cached as one line of JSON each, so that a stopped run can continue."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROW, SEARCH = "row", "search"
EQUAL, STRAGGLER = "equal", "straggler"
CPU, CUDA = "cpu", "cuda"
DONE, CUT, REACHED, FAILED = "done", "cut", "reached", "failed"  # how a case may end


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training: task, link rate, workers, contender and settings."""

    task: str
    rate: str
    workers: str  # EQUAL or STRAGGLER
    contender: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    purpose: str = ROW  # SEARCH: training ends as soon as the target is reached
    epochs: float = 1.0
    device: str = CPU

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    def __str__(self) -> str:
        settings = " ".join(f"{name}={value}" for name, value in self.settings.items())
        on = "" if self.device == CPU else f", {self.device}"
        return f"{self.task}, {self.rate}, {self.workers}{on}: {self.contender} {settings}".rstrip()


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of the global model during training."""

    steps: int
    seconds: float  # of training so far
    value: float
    nbytes: int  # sent by all hosts so far


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a case ended, with all evaluations of the global model."""

    case: Case
    ended: str
    history: tuple[Evaluation, ...] = ()
    limit_s: float = 0.0
    failure: str = ""

    def reached(self, target: float, higher_is_better: bool) -> Evaluation | None:
        """Return the first evaluation that reached the target."""
        sign = 1 if higher_is_better else -1
        return next((point for point in self.history if sign * point.value >= sign * target), None)

    def to_json(self) -> str:
        """Return the outcome as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Outcome:
        """Rebuild an outcome from a parsed line of JSON."""
        history = tuple(Evaluation(**point) for point in line["history"])
        return cls(**{**line, "case": Case(**line["case"]), "history": history})


class Cache:
    """Outcomes on one device, in a file of a folder; the last outcome of a case counts."""

    def __init__(self, folder: Path, device: str = CPU) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.variant = "" if device == CPU else device
        self.path = folder / (f"peers-{device}.jsonl" if self.variant else "peers.jsonl")
        self.notes: list[str] = []
        self._outcomes: dict[str, Outcome] = {}
        whole = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        if whole and not whole[-1].endswith("\n"):  # the writing process was killed
            self.path.write_text("".join(whole[:-1]))
            del whole[-1]
        for line in map(json.loads, whole):
            self._store(line)

    def _store(self, line: Mapping[str, Any]) -> None:
        if "note" in line:
            self.notes.append(line["note"])
        else:
            outcome = Outcome.from_json(line)
            self._outcomes[outcome.case.key] = outcome

    def _append(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text + "\n")
        self._store(json.loads(text))

    def note(self, text: str) -> None:
        """Add a line to be written above the table."""
        self._append(json.dumps({"note": text}))

    def add(self, outcome: Outcome) -> None:
        """Add an outcome; it replaces an earlier one of the same case."""
        self._append(outcome.to_json())

    def get(self, case: Case) -> Outcome | None:
        """Return the outcome of a case, or None if it has not run."""
        return self._outcomes.get(case.key)

    def __iter__(self) -> Iterator[Outcome]:
        return iter(list(self._outcomes.values()))
