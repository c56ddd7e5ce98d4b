"""Catalog of all benchmarks: the question each one answers, how long it takes and what it needs."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
ROOT, GPU, DATA, TRACES = (
    "root",
    "GPU",
    "data",  # a folder of Fashion-MNIST and the like
    "traces",  # a clone of skypilot-org/spot-traces
)


class UnknownBenchmark(Exception):
    """A name that is not in the catalog."""


@dataclass(frozen=True)
class Benchmark:
    """A benchmark in the catalog; `takes` is an estimate for a machine with two cores."""

    name: str
    folder: str
    question: str
    takes: str
    needs: tuple[str, ...] = ()
    file: str = ""  # default: the benchmark's name

    @property
    def module(self) -> str:
        return f"benchmarks.{self.folder}.{self.file or self.name}"

    @property
    def newest_result(self) -> Path | None:
        """Return the newest main result; variants such as DATE-search.md count only if there is no other."""
        results = (RESULTS / self.name).glob("*.md")
        return max(results, key=lambda path: (len(path.stem) == len("2026-11-16"), path.stem), default=None)


_ALL = (
    Benchmark("bsp_vs_ddp", "overhead", "Is a BSP step as fast as a step of torch's DDP?", "13 min", (ROOT,)),
    Benchmark(
        "hsdp", "overhead", "Is BSP between sharded replicas as fast as torch's HSDP?", "6 min", (ROOT,)
    ),
    Benchmark("attach_cost", "overhead", "How much time and memory does attach() add to a step?", "1 min"),
    Benchmark("memory", "overhead", "How many copies of the model does each strategy hold?", "3 min"),
    Benchmark("elastic", "overhead", "What does elastic=True cost while no worker is lost?", "2 min"),
    Benchmark("starting", "overhead", "How long does it take to start local workers?", "1 min"),
    Benchmark("gpu", "overhead", "Do all strategies run on a GPU, and at what cost?", "5 min", (GPU,)),
    Benchmark("gpu_step", "overhead", "How long is a step on a GPU under each strategy?", "5 min", (GPU,)),
    Benchmark("scale", "virtual_time", "How many workers can virtual time simulate?", "40 min"),
    Benchmark("internet", "virtual_time", "Which strategies live on the internet?", "10 min"),
    Benchmark(
        "prediction",
        "virtual_time",
        "Does virtual time predict real step times?",
        "1 h, in parts",
        (ROOT, DATA),
    ),
    Benchmark(
        "plan",
        "virtual_time",
        "Does `offbeat plan` choose the fastest strategy?",
        "30 min",
        (ROOT, DATA),
    ),
    Benchmark("kills", "virtual_time", "Does virtual time know what deaths cost?", "12 min", (ROOT, DATA)),
    Benchmark(
        "spot",
        "virtual_time",
        "What do public traces of spot machines do to a training, and to its plan?",
        "10 min",
        (TRACES,),
    ),
    Benchmark(
        "shares",
        "communication",
        "How close do scatter and gather come to the link's rate?",
        "3 min",
        (ROOT,),
    ),
    Benchmark("codecs", "communication", "How fast do codecs encode and decode?", "1 min"),
    Benchmark(
        "codecs_time", "communication", "What do codecs gain on a slow network?", "10 min", (ROOT, DATA)
    ),
    Benchmark(
        "server", "parameter_server", "How fast is the server, and what does it gain?", "6 min", (ROOT,)
    ),
    Benchmark("soak", "parameter_server", "Does training survive ten minutes of crashes?", "12 min", (ROOT,)),
    Benchmark("tls", "parameter_server", "How much speed does encryption cost?", "2 min", (ROOT,)),
    Benchmark("replication", "parameter_server", "What does a copy of each shard cost?", "2 min", (ROOT,)),
    Benchmark("fuzz", "parameter_server", "Can malformed input crash a server, or change its result?", "1 h"),
    Benchmark(
        "chaos",
        "chaos",
        "Does training stay fast and right while everything fails?",
        "2 h, in parts",
        (ROOT, DATA),
        file="command",
    ),
    Benchmark("overlap", "strategies", "How much communication do OSP and SSD-SGD hide?", "17 min", (ROOT,)),
    Benchmark("overlap_accuracy", "strategies", "Are OSP and SSD-SGD as accurate as BSP?", "10 min", (DATA,)),
    Benchmark(
        "looking", "strategies", "Does evaluating after every step make training slower?", "8 min", (ROOT,)
    ),
    Benchmark("osp_ablation", "strategies", "What does OSP's correction gain?", "5 min", (DATA,)),
    Benchmark(
        "selsync_time", "strategies", "How soon does SelSync match DDP's accuracy?", "12 min", (ROOT, DATA)
    ),
    Benchmark("selsync_norm", "strategies", "What does SelSync's own arithmetic cost per step?", "1 min"),
    Benchmark("selsync_ablation", "strategies", "Which parts of SelSync help?", "4 min", (DATA,)),
    Benchmark(
        "selsync_adam",
        "strategies",
        "Under Adam, does SelSync lose because a mean of the workers' own steps is short?",
        "6 min",
    ),
    Benchmark("auto", "strategies", "Is Auto never slower than BSP, nor less accurate?", "15 min", (DATA,)),
    Benchmark(
        "oscars", "strategies", "Does Oscars keep workers of different speeds busy?", "5 min", (ROOT, DATA)
    ),
    Benchmark("gssp", "strategies", "How much faster is GSSP, and what does GDTopK send?", "4 min", (ROOT,)),
    Benchmark(
        "pushes", "strategies", "Are updates to be pushed, or gradients? What does GDTopK cost?", "5 min"
    ),
    Benchmark(
        "gssp_choices",
        "strategies",
        "What should groups tell each other, and which entries should GDTopK send?",
        "8 min",
    ),
    Benchmark("gssp_ablation", "strategies", "What do GSSP and GDTopK cost in accuracy?", "5 min", (DATA,)),
    Benchmark(
        "diloco_settings",
        "strategies",
        "Which settings of DiLoCo need the fewest steps?",
        "minutes, on a GPU",
        (GPU, DATA),
    ),
    Benchmark(
        "papers", "papers", "Do the papers' claims hold here?", "hours, on a GPU", (GPU, DATA), file="command"
    ),
    Benchmark(
        "selsync_delta",
        "papers",
        "Which δ gives SelSync the paper's LSSR here, and how accurate is it then?",
        "25 min",
        (DATA,),
    ),
    Benchmark(
        "translation",
        "papers",
        "Did a mean of the workers' own Adam steps cost Seq2Seq its BLEU?",
        "25 min",
        (DATA,),
    ),
    Benchmark(
        "trained",
        "papers",
        "Trained to the end, is each method as accurate as BSP?",
        "an hour, on a GPU",
        (GPU, DATA),
    ),
    Benchmark(
        "speedups",
        "papers",
        "At which K/C, and with which stragglers, do the papers' speed-ups come out?",
        "4 min",
    ),
    Benchmark(
        "gpt",
        "papers",
        "At the field's own task, what do DiLoCo and its kin lose and save?",
        "10 min, on a GPU",
        (GPU, DATA),
    ),
    Benchmark(
        "gpt_hosts",
        "papers",
        "On four hosts at 200 Mbit/s, how much sooner than DDP do DiLoCo and its kin train a GPT?",
        "8 min",
        (ROOT, DATA),
    ),
    Benchmark(
        "peers",
        "peers",
        "How does Offbeat compare with other libraries?",
        "hours",
        (ROOT, DATA),
        file="command",
    ),
)

BENCHMARKS: dict[str, Benchmark] = {benchmark.name: benchmark for benchmark in _ALL}


def find_benchmark(name: str) -> Benchmark:
    """Return the benchmark with this name; if there is none, name the nearest one in the error."""
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    nearest = difflib.get_close_matches(name.replace("-", "_"), BENCHMARKS, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else "`python -m benchmarks list` shows all names"
    raise UnknownBenchmark(f"unknown benchmark {name!r}; {hint}")
