"""Simulation of a user's own model: what is trained, what comes back, what is left alone, what is refused."""

from __future__ import annotations

import copy
import inspect
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import MISSING
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset

import offbeat
from offbeat import BSP, LocalSGD, SettingError
from offbeat.core.settings import schema
from offbeat.experiments.job import Job
from offbeat.experiments.loop import seed_step
from offbeat.experiments.report.load import load_all
from offbeat.experiments.tasks.digits import Digits
from offbeat.experiments.tasks.models.small_images import digits_cnn
from offbeat.experiments.tasks.own import Workload
from offbeat.experiments.virtual_run import simulate_here
from offbeat.strategies import STRATEGIES
from offbeat.worlds.virtual.cluster import Cluster, Workers, dump, load_cluster
from tests.support.commands import command
from tests.support.own_workload import SAMPLES, build, error_on_all, net, regression, squared_error

pytestmark = pytest.mark.virtual

PLAIN_SGD = partial(torch.optim.SGD, lr=0.05)


def run(**changes: Any) -> offbeat.SimulationResult:
    """A short run of a small model, with these changes."""
    return offbeat.simulate(**{**build(), "strategy": BSP(), "workers": 4, "steps": 6, **changes})


# --- the same training as elsewhere


class Tied(nn.Module):
    """A model whose two layers have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.second(self.first(x).relu()).relu())
        return out


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def frozen() -> nn.Module:
    model = plain()
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("make", [plain, frozen, Tied])
def test_bsp_on_parts_of_the_data_equals_one_process_on_all_of_it(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    model = make()
    alone, steps = copy.deepcopy(model), 7
    optimizer = PLAIN_SGD(alone.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        squared_error(alone, regression()).backward()
        optimizer.step()
    result = run(model=model, optimizer=PLAIN_SGD, batch_size=SAMPLES // 4, steps=steps)
    trained = dict(result.model.named_parameters())
    for name, expected in alone.named_parameters():
        torch.testing.assert_close(trained[name], expected, msg=name)
        changed = not torch.equal(expected, model.get_parameter(name))
        assert changed == expected.requires_grad, name
    assert result.summary["samples"] == steps * SAMPLES
    if isinstance(result.model, Tied):
        assert result.model.first.weight is result.model.second.weight


def test_the_digits_task_as_own_parts_has_the_same_summary(tmp_path: Path) -> None:
    task = Digits()
    images = task.load()

    def accuracy(model: nn.Module) -> float:
        inputs, targets = images.test
        return (model(inputs).argmax(dim=1) == targets).float().mean(dtype=torch.float64).item()

    own = offbeat.simulate(
        model=digits_cnn,
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        data=images.train,
        optimizer=lambda params: torch.optim.SGD(params, lr=task.lr, momentum=0.9),
        evaluate=accuracy,
        batch_size=task.batch_size,
        strategy=LocalSGD(period=4),
        cluster="stragglers",
        workers=3,
        steps=12,
        evaluate_every=5,
        seed=2,
        target=0.3,
    )
    job = Job(
        task=task, strategy=LocalSGD(period=4), workers=3, steps=12, evaluate_every=5, seed=2, target=0.3
    )
    built_in = simulate_here(job, "stragglers", images, tmp_path, lambda latest, hosts=dict: [])
    assert {**own.summary, "task": "digits", "model": "cnn"} == built_in
    assert len({point["value"] for point in own.history}) == 3


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_trains_it_and_the_result_has_the_evaluated_weights(name: str) -> None:
    torch.manual_seed(0)
    model = net()
    # Of so few weights, two in a hundred are hardly any.
    strategy = STRATEGIES[name](**({"period": 4, "ratio": 0.5} if name == "sparse_loco" else {}))
    result = run(model=model, strategy=strategy, steps=40, evaluate_every=40, cluster="mixed-gpus")
    assert result.model is not model
    assert error_on_all(result.model.eval()) == result.value
    assert result.value is not None and result.value < 0.9 * error_on_all(model.eval())
    assert result.seconds > 0 and result.bytes_sent > 0 and result.summary["complete"]
    statistics = dict(result.model.named_buffers())
    assert all(not torch.equal(before, statistics[n]) for n, before in model.named_buffers())


# --- the user's own objects


def test_the_model_and_the_random_numbers_of_the_user_are_left_alone() -> None:
    torch.manual_seed(5)
    model = net()
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    result = run(model=model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())
    assert [module.training for module in model.modules()] == [True, True, False, True, True]
    assert [m.training for m in result.model.modules()] == [True, True, False, True, True]
    assert not torch.equal(result.model[0].weight, model[0].weight)  # type: ignore[index]
    own = {param.untyped_storage().data_ptr() for param in result.model.parameters()}
    assert len(own) == len(list(result.model.parameters())), "each has its own memory again"


def test_only_a_function_builds_other_weights_for_another_seed() -> None:
    def first_losses(model: Any) -> list[float]:
        whole = {"workers": 1, "batch_size": SAMPLES, "steps": 1}
        return [run(model=model, seed=seed, **whole).history[0]["loss"] for seed in (0, 1)]

    same, other = first_losses(net()), first_losses(net)
    assert same[0] == pytest.approx(same[1], rel=1e-5)
    assert other[0] != pytest.approx(other[1], rel=1e-5)


class Noisy(Dataset[dict[str, Tensor]]):
    """Samples as dicts, with a random number in each."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < 8:
            raise IndexError
        noise = torch.rand(1)
        self.drawn.append(noise.item())
        return {"x": torch.full((2,), float(index)) + noise, "y": torch.ones(1)}


def test_a_data_set_may_draw_random_numbers_and_make_dicts() -> None:
    data = Noisy()
    result = run(
        model=nn.Linear(2, 1),
        loss=lambda model, batch: functional.mse_loss(model(batch["x"]), batch["y"]),
        evaluate=lambda model: 0.0,
        data=data,
        batch_size=1,
        workers=2,
        steps=3,
    )
    expected = []
    for rank in range(2):
        for step in range(1, 4):
            seed_step(0, rank, step)
            expected.append(torch.rand(1).item())
    drawn = data.drawn[1:]  # the first is of the trial
    assert Counter(drawn) == Counter(expected), "they depend on worker and step alone"
    assert result.summary["samples"] == 6
    assert result.summary["metric"] == "value", "a lambda has no name"


def test_gradients_are_clipped() -> None:
    start = plain()
    result = run(model=start, optimizer=PLAIN_SGD, max_norm=1e-3, steps=1)
    moved = [
        (new - old).norm() for new, old in zip(result.model.parameters(), start.parameters(), strict=True)
    ]
    assert torch.stack(moved).norm().item() == pytest.approx(0.05 * 1e-3, rel=1e-2)


# --- clusters, and what comes back


def test_a_cluster_is_a_preset_a_file_or_an_object(tmp_path: Path) -> None:
    described, file = load_cluster("wan"), tmp_path / "mine.toml"
    file.write_text(dump(described))
    results = [run(cluster=each, workers=None, batch_size=4, steps=1) for each in ("wan", file, described)]
    assert {result.seconds for result in results} == {results[0].seconds}
    assert {result.summary["workers"] for result in results} == {described.size}
    assert [result.summary["cluster"] for result in results] == ["wan", str(file), described.summary]


def test_step_times_are_the_clusters_unless_they_are_given() -> None:
    links: dict[str, Any] = {"up_bits_per_s": "1gbit", "down_bits_per_s": "1gbit"}
    cluster = Cluster(workers=(Workers(step_s=0.1, **links), Workers(step_s=0.3, **links)))

    def computed(**changes: Any) -> list[float]:
        workers = run(cluster=cluster, workers=4, steps=2, **changes).summary["per_worker"]
        return [worker["compute_s"] for worker in workers]

    assert computed() == pytest.approx([0.2, 0.2, 0.6, 0.6])
    assert computed(step_s=0.5) == pytest.approx([1, 1, 3, 3])


def test_results_are_written_for_reports(tmp_path: Path) -> None:
    result = run(out=tmp_path, target=1e6, evaluate_every=2)
    assert json.loads((tmp_path / "summary.json").read_text()) == result.summary
    assert [(loaded["task"], loaded["model"]) for loaded in load_all([tmp_path])] == [("own", "net")]
    assert result.seconds_to_target == result.history[0]["seconds"]
    assert (result.summary["metric"], result.summary["higher_is_better"]) == ("error_on_all", False)


def test_without_a_metric_the_loss_over_the_data_is_evaluated() -> None:
    result = run(evaluate=None, higher_is_better=True, batch_size=7, model=plain)
    assert (result.summary["metric"], result.summary["higher_is_better"]) == ("loss", False)
    assert result.value == pytest.approx(error_on_all(result.model), rel=1e-5)


def test_the_function_has_the_defaults_of_a_workload() -> None:
    parameters = inspect.signature(offbeat.simulate).parameters
    for name, declared in schema(Workload).items():
        default = inspect.Parameter.empty if declared.default is MISSING else declared.default
        assert parameters[name].default == default, name


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "virtual.md").read_text(encoding="utf-8")
FENCED = re.compile(r"^```(?:python|diff)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page_runs_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file, its commands, and the call, in one folder."""
    file, commands, call = FENCED.findall(PAGE.split("## Try your own model")[1].split("\n## ")[0])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "mine", None)  # so that it is removed afterwards
    del sys.modules["mine"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(file)
    for line in commands.splitlines():
        said = command(*shlex.split(line)[1:])
        assert said.code == 0, said.err
    folders = sorted(folder.name for folder in (tmp_path / "runs").iterdir())
    assert [re.sub(r"-\d{8}-\d{6}$", "", name) for name in folders] == [
        "compare-mine-build",
        "mine-build-local_sgd-virtual",
    ]
    names: dict[str, Any] = {}
    exec(file + call, names)
    assert names["result"].summary["metric"] == "accuracy"
    assert names["result"].model.load_state_dict(torch.load("trained.pt", weights_only=True))


def test_the_readme_runs_as_it_is_written() -> None:
    (block,) = (
        text for text in FENCED.findall((ROOT / "README.md").read_text("utf-8")) if "simulate(" in text
    )
    known = {"inputs": torch.randn(512, 4), "targets": torch.ones(512).long(), "model": nn.Linear(4, 2)}
    names = {"torch": torch, "functional": functional, "offbeat": offbeat, **known}
    exec(block, names)
    assert names["result"].value < names["result"].history[0]["value"]


def test_the_page_lists_every_part_with_its_default() -> None:
    shown = dict(re.findall(r"^\| `(\w+)` \| .* \| (.*?) \|$", PAGE, re.MULTILINE))
    for name, declared in schema(Workload).items():
        if declared.default is MISSING:
            assert shown[name] == "required"
        elif declared.default is not None:
            assert shown[name].strip("`") == str(declared.default), name
        assert name in shown


# --- refusals


def with_nan() -> tuple[Tensor, Tensor]:
    inputs, targets = regression()
    return inputs.index_fill(0, torch.tensor([0]), torch.nan), targets


class Stream(IterableDataset[int]):
    def __len__(self) -> int:
        return 64

    def __iter__(self) -> Iterator[int]:
        return iter(range(64))


META = nn.Linear(6, 1, device="meta")
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": 3}, "model=3: an nn.Module, or a function that builds one"),
    ({"model": lambda: "net"}, "model() returned a str: expected an nn.Module"),
    ({"model": META}, "parameter weight is on the meta device, without values: call model.to_empty"),
    ({"model": lambda: META}, "parameter weight is on the meta device"),
    ({"model": nn.LazyLinear(1)}, "parameter weight has no shape yet: run a batch through the model first"),
    ({"model": frozen().requires_grad_(False)}, "the loss of the first batch has no gradient"),
    ({"loss": None}, "loss=None: a function of the model and a batch that returns the mean loss"),
    ({"loss": lambda model, batch: 0.5}, "the loss of the first batch is a float: expected a single number"),
    ({"loss": lambda model, batch: model(batch[0])}, "a Tensor of shape [8, 1]: expected a single number"),
    ({"loss": lambda model, batch: torch.zeros(())}, "the loss of the first batch has no gradient"),
    ({"data": with_nan()}, "the loss of the first batch is nan before any training"),
    ({"data": (torch.ones(3, 6), torch.ones(4, 1))}, "data=[(3, 6), (4, 1)]: tensors of one length"),
    ({"data": DataLoader(regression()[0])}, "(of a DataLoader, give its dataset)"),
    ({"data": Stream()}, "a data set with a length above 0 and an index"),
    ({"data": []}, "data=[]: tensors of one length, such as (inputs, targets), or a data set"),
    ({"batch_size": 17}, "4 workers with batches of 17 need 68 samples, but there are 64: take fewer"),
    ({"workers": 9}, "9 workers with batches of 8 need 72 samples, but there are 64"),
    (
        {"optimizer": PLAIN_SGD(plain().parameters())},
        "such as lambda params: torch.optim.SGD(params, lr=0.1)",
    ),
    ({"optimizer": lambda params: None}, "optimizer(params) returned None: expected one torch optimizer"),
    ({"optimizer": lambda params: []}, "returned a list: expected one torch optimizer, or a list of them"),
    ({"optimizer": lambda params: PLAIN_SGD(params[:1])}, "optimizer steps 0.bias, 1.weight, 1.bias"),
    ({"optimizer": lambda params: PLAIN_SGD(plain().parameters())}, "parameters that are not the model's"),
    ({"strategy": BSP}, "a Strategy"),
    ({"cluster": "lan-1gg"}, "no cluster is named 'lan-1gg'; did you mean 'lan-1g'?"),
    ({"cluster": "none/mine.toml"}, "none/mine.toml: the cluster file cannot be read: No such file"),
    ({"workers": 0}, "workers=0: a whole number of workers, at least 1"),
    ({"epochs": 0}, "epochs=0: a whole number of epochs, at least 1"),
    ({"step_s": -1}, "step_s=-1: a number of seconds above 0"),
    ({"max_norm": 0}, "max_norm=0: a finite number above 0"),
    ({"evaluate": lambda model: None}, "evaluate(model) returned None: expected a number"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_simulated_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError) as refusal:
        run(**changes, out=tmp_path)
    assert message in str(refusal.value)
    assert "evaluate" in changes or not list(tmp_path.iterdir())


def test_a_part_that_is_missing_is_named() -> None:
    parts = build()
    del parts["loss"]
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'loss'"):
        offbeat.simulate(**parts, strategy=BSP())


@pytest.mark.parametrize("loss", [functional.mse_loss, nn.MSELoss()])
def test_a_loss_of_outputs_and_targets_is_told_how_it_is_called(loss: Any) -> None:
    with pytest.raises((TypeError, AttributeError)) as error:
        run(loss=loss)
    assert "criterion(model(batch[0]), batch[1])" in error.value.__notes__[0]


def test_a_model_that_cannot_be_copied_is_to_be_built() -> None:
    model = plain()
    model.scores = model(regression()[0])  # a result of the graph, kept by many a careless module
    with pytest.raises(SettingError, match="cannot be copied for each worker: give a function that builds"):
        run(model=model)


def test_divergence_is_a_result_and_no_error() -> None:
    result = run(optimizer=partial(torch.optim.SGD, lr=1e30), steps=4)
    assert result.summary["complete"] and result.value is None
