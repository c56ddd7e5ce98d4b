"""The example of a plugin, examples/plugin: installed by pip, and then known to all commands."""

from __future__ import annotations

import json
import math
import os
import subprocess
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat.strategies import STRATEGIES
from offbeat.worlds.processes.server.auth import TOKEN
from offbeat.worlds.processes.server.bootstrap import SERVER
from offbeat.worlds.virtual.cluster import load_cluster
from offbeat.worlds.virtual.session import VirtualSession, autograd
from offbeat.worlds.virtual.simulation import run_workers
from tests.support.commands import offbeat, read_summary
from tests.support.limits import HANG_S
from tests.support.plugins import offer, pip_install
from tests.support.python import Python
from tests.support.served import Serve
from tests.support.served import serve as serve

pytestmark = pytest.mark.processes

SOURCES = Path(__file__).parents[1] / "examples" / "plugin"
PACKAGE = "offbeat-example 0.1.0"
SMALL = ("--workers", 2, "--steps", 12, "--evaluate-every", 6)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("plugin") / "site-packages"
    pip_install(SOURCES, target)
    return target


@pytest.fixture(autouse=True)
def _plugins(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # other threads, other sums


def run(*arguments: object) -> str:
    done = offbeat(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# --- the commands


def test_list_shows_plugins_and_refuses_broken_ones(
    tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path, "unlucky", "offbeat.strategies", {"torn": "unlucky:Torn"}, "import nowhere_at_all")
    offer(tmp_path, "squatter", "offbeat.codecs", {"top_k": "squatter:TopK"})
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    listed = json.loads(run("list", "--json"))
    packages = {
        kind: {each["name"]: each["package"] for each in listed[kind] if each["package"]}
        for kind in ("strategies", "codecs", "tasks")
    }
    assert packages == {
        "strategies": dict.fromkeys(["rotate", "tightening_ssp"], PACKAGE),
        "codecs": {"float8": PACKAGE},
        "tasks": {"spirals": PACKAGE},
    }
    assert [each["name"] for each in listed["strategies"]][: len(STRATEGIES)] == list(STRATEGIES)
    refused = {each["name"]: each["reason"] for each in listed["refused"]}
    assert set(refused) == {"torn", "topk", "top_k"}
    assert "unlucky 1.0 (entry point offbeat.strategies: torn = unlucky:Torn)" in refused["torn"]
    assert "Offbeat itself (topk), and by squatter 1.0" in refused["top_k"]
    shown = " ".join(run("list").split())
    assert f"in turn; from {PACKAGE}" in shown and refused["torn"] in shown
    for strategy, words in [
        (("torn",), "'torn' of unlucky 1.0"),
        (("bsp", "--set", "codec=top_k(0.1)"), "squatter 1.0"),
    ]:
        done = offbeat("simulate", "quadratic", "--strategy", *strategy)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_plan_and_then_train_over_processes(tmp_path: Path) -> None:
    slow = "[[workers]]\ncount = 2\nstep_s = 0.01\nup = '1mbit'\ndown = '1mbit'\nlatency_s = 0.0\n"
    (tmp_path / "slow.toml").write_text(slow, encoding="utf-8")
    options = (*SMALL, "--cluster", tmp_path / "slow.toml", "--strategies", "rotate", "--target", 0.55)
    run("plan", "spirals", *options, "--most-seeds", 1, "--out", tmp_path / "plan.toml")
    plan = tomllib.loads((tmp_path / "plan.toml").read_text())
    assert [plan["task"], plan["strategy"]] == ["spirals", "rotate"]
    assert [each["strategy"] for each in plan["ranking"]] == ["rotate", "bsp"]
    run("train", "--from", tmp_path / "plan.toml", "--set", "parts=3", "--out", tmp_path / "trained")
    run(
        "simulate",
        "spirals",
        "--strategy",
        "rotate",
        "--set",
        "parts=3",
        *SMALL,
        "--out",
        tmp_path / "virtual",
    )
    trained, virtual = read_summary(tmp_path / "trained"), read_summary(tmp_path / "virtual")
    assert (trained["world"], trained["strategy"], trained["settings"]) == (
        "processes",
        "rotate",
        {"parts": 3},
    )
    assert (trained["task"], trained["workers"], trained["steps"]) == ("spirals", 2, 12)
    assert losses(trained) == losses(virtual), "both worlds train the same model"


def test_compare(tmp_path: Path) -> None:
    strategies = "rotate(parts=1),local_sgd,rotate,bsp(codec=error_feedback(float8(2)))"
    options = ("--world", "virtual", "--set", "local_sgd.period=1", *SMALL, "--out", tmp_path)
    shown = run("compare", "spirals", "--strategies", strategies, *options)
    assert "rotate parts=1" in shown
    one_part, local_sgd, rotate, bsp = json.loads((tmp_path / "summary.json").read_text())
    assert losses(one_part) == losses(local_sgd) != losses(rotate)
    assert bsp["settings"] == {"codec": "error_feedback(float8(2))"}
    assert rotate["bytes_sent"] == pytest.approx(one_part["bytes_sent"] / 4, rel=0.01)
    assert "rotate" in (tmp_path / "report.html").read_text()


WORKER = """
import offbeat, torch
from offbeat_example.float8 import Float8
from offbeat_example.tightening_ssp import TighteningSSP

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with offbeat.attach(model, optimizer, TighteningSSP(first=2, codec=Float8(2))) as sync:
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    print(sync.metrics.steps, "steps")
"""


def test_serve(tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's process finds the strategy and its codec."""
    served = serve("--workers", "1", "--listen", "127.0.0.1:0", "--snapshots", str(tmp_path))
    monkeypatch.setenv(SERVER, served.address)
    monkeypatch.setenv(TOKEN, "secret")
    with Python("-c", WORKER, stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert served.end() == 0, served.said  # when the worker has left, or when the server fails
            assert worker.communicate(timeout=HANG_S)[0] == "3 steps\n"
        finally:
            worker.kill()
    said = " ".join(served.said.split())
    assert "training: offbeat_example.tightening_ssp:TighteningSSP codec=float8(2)" in said


def losses(summary: dict[str, Any]) -> list[float]:
    assert len(summary["history"]) == 2
    return [point["loss"] for point in summary["history"]]


# --- the parts


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that imports a module of the plugin."""
    monkeypatch.syspath_prepend(SOURCES)
    return import_module


@pytest.mark.parametrize(("mantissa", "relative", "absolute"), [(3, 2**-4, 2**-10), (2, 2**-3, 2**-17)])
def test_float8_keeps_its_bound(example: Any, mantissa: int, relative: float, absolute: float) -> None:
    codec = example("offbeat_example.float8").Float8(mantissa)
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(1)).pow_(5)
    packet = torch.empty(codec.nbytes(x.numel(), x.dtype), dtype=torch.uint8)
    assert packet.numel() == 4 + x.numel()
    decoded = torch.empty_like(x)
    codec.encode(None, x, packet)
    codec.decode(packet, decoded)
    step = x.abs().max() / torch.finfo(torch.float8_e4m3fn if mantissa == 3 else torch.float8_e5m2).max
    bound = torch.maximum(x.abs() * relative, absolute * step)
    error = (x - decoded).abs()
    assert bool((error <= bound * 1.0001).all())
    assert bool((error > bound / 2).any()), "the bound is no larger than it must be"
    for special, then in [(0.0, 0.0), (1e-45, 0.0), (math.inf, math.nan), (math.nan, math.nan)]:
        x[:] = 0.0
        x[7] = special
        codec.encode(None, x, packet)
        codec.decode(packet, decoded)
        assert math.isfinite(decoded.sum().item()) == math.isfinite(then)
        assert not math.isfinite(then) or decoded[7] == then


def test_rotate_averages_the_parts_in_turn(example: Any) -> None:
    rotate = example("offbeat_example.rotate").Rotate(parts=2)

    def build(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(64, 1, bias=False)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    async def train(session: VirtualSession) -> list[Tensor]:
        seen: list[Tensor] = []
        for _ in range(4):
            await session.backward(torch.full((1, 64), 1.0 + session.rank), samples=1)
            await session.update()
            seen.append(session.model.weight.detach().clone().flatten())
        return seen

    gradient = autograd(lambda model, batch: model(batch).sum())
    first, second = run_workers(2, load_cluster("lan-1g"), rotate, build, gradient, train)
    same = (torch.stack(first) == torch.stack(second)).view(4, 2, 32)
    assert same.all(2).tolist() == [[True, False], [False, True], [True, False], [False, True]]


def test_bound_of_tightening_ssp_shrinks_to_nothing(example: Any) -> None:
    rule = example("offbeat_example.tightening_ssp").TighteningSSP(first=2, every=5).rule()
    clocks = rule.init()
    rule.join(clocks, 0, None)

    def lead() -> int:
        return max(lead for lead in range(10) if rule.admits(clocks, 1, clocks.slowest + lead))

    leads = []
    for clock in (0, 4, 5, 10, 100):
        clocks.of[0] = clock
        leads.append(lead())
    assert leads == [2, 2, 1, 0, 0]
