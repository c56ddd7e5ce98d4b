"""Cases and what came of them: one line of JSON each, so that a stopped run goes on where it was."""

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
    """One training: what, where, by whom."""

    task: str
    rate: str
    workers: str  # EQUAL or STRAGGLER
    contender: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    purpose: str = ROW  # SEARCH: it ends as soon as the target is reached
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
class Look:
    """The global model at some moment."""

    steps: int
    seconds: float  # of training, so far
    value: float
    nbytes: int  # that left all cards, so far


@dataclass(frozen=True, kw_only=True)
class Outcome:
    case: Case
    ended: str
    history: tuple[Look, ...] = ()
    limit_s: float = 0.0
    failure: str = ""

    def reached(self, target: float, higher_is_better: bool) -> Look | None:
        """The first look at which the target was there."""
        sign = 1 if higher_is_better else -1
        return next((look for look in self.history if sign * look.value >= sign * target), None)

    def line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Outcome:
        history = tuple(Look(**look) for look in line["history"])
        return cls(**{**line, "case": Case(**line["case"]), "history": history})


class Cache:
    """The outcomes in a folder on one device, by case; of several for the same case the last one counts."""

    def __init__(self, folder: Path, device: str = CPU) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = "peers" if device == CPU else f"peers-{device}"
        self.path = folder / f"{self.name}.jsonl"
        self.notes: list[str] = []
        self._outcomes: dict[str, Outcome] = {}
        whole = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        if whole and not whole[-1].endswith("\n"):  # a run was stopped while it wrote
            self.path.write_text("".join(whole[:-1]))
            del whole[-1]
        for line in map(json.loads, whole):
            self._take(line)

    def _take(self, line: Mapping[str, Any]) -> None:
        if "note" in line:
            self.notes.append(line["note"])
        else:
            outcome = Outcome.of(line)
            self._outcomes[outcome.case.key] = outcome

    def _append(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text + "\n")
        self._take(json.loads(text))

    def note(self, text: str) -> None:
        self._append(json.dumps({"note": text}))

    def add(self, outcome: Outcome) -> None:
        self._append(outcome.line())

    def get(self, case: Case) -> Outcome | None:
        return self._outcomes.get(case.key)

    def __iter__(self) -> Iterator[Outcome]:
        return iter(list(self._outcomes.values()))
