"""Runs on a Ray cluster of two nodes on this machine; what they come to is written into the current folder.

python -m tests.integrations.loops.ray_runs WISHES      what to train, and where to write it, as JSON
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from ray._private.utils import get_ray_address_file
from ray.cluster_utils import Cluster
from ray.train.torch import TorchTrainer
from torch import nn

import offbeat
from tests.integrations.loops.common import wishes
from tests.integrations.loops.ray_loop import train_all
from tests.integrations.scripts import installed, patch
from tests.support.returning import kill_once, train_until_back

EXAMPLES = Path(__file__).parents[3] / "examples" / "ray"
WORKERS = 2


def load(path: Path) -> Any:
    """Import a file whose functions Ray sends to the workers as they are."""
    spec = importlib.util.spec_from_file_location(path.stem + "_of_ray", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    ray.cloudpickle.register_pickle_by_value(module)
    return module


def checkpoints(folder: Path) -> None:
    """Train our example for three epochs, and once more with a worker that dies after the second."""
    example = load(EXAMPLES / "train.py")
    report = example.report

    def report_and_die(sync: Any, model: nn.Module, epoch: int, loss: float) -> None:
        report(sync, model, epoch, loss)
        if sync.port.rank == WORKERS - 1 and epoch == 1:
            kill_once(folder)

    for name in ("never stopped", "resumed"):
        if name == "resumed":
            example.report = report_and_die
        config = {"strategy": offbeat.LocalSGD(period=7), "epochs": 3}
        result = example.fit(config, WORKERS, str(folder / name))
        with result.checkpoint.as_directory() as saved:
            torch.save(
                {path.name: torch.load(path) for path in Path(saved).glob("*.pt")}, folder / f"{name}.pt"
            )


def elastic(folder: Path) -> None:
    """Kill a worker; the other goes on until it is back, and both end with one model."""

    def loop() -> dict[str, Any]:
        return {**train_until_back(folder), "node": ray.get_runtime_context().get_node_id()}

    torch.save(load(EXAMPLES / "elastic.py").train_elastic(loop, WORKERS), folder / "elastic.pt")


def conformance(folder: Path) -> None:
    """Train in all the ways that the test asks for."""
    scaling = ray.train.ScalingConfig(num_workers=WORKERS)
    storage = ray.train.RunConfig(storage_path=str(folder))
    TorchTrainer(
        train_all, train_loop_config={"wishes": wishes()}, scaling_config=scaling, run_config=storage
    ).fit()


def seeded(train: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    """Return a worker's function that begins with the same weights in every run, not with the others'."""

    def train_seeded(config: dict[str, Any]) -> Any:
        torch.manual_seed(ray.train.get_context().get_world_rank())
        return train(config)

    return train_seeded


def own_example(folder: Path) -> None:
    """Run Ray's own example as it is, under DDP, and with one line changed."""
    text = installed("ray", "train/examples/pytorch/torch_linear_example.py")
    prepare = "    model = train.torch.prepare_model(model)\n"
    ours = "    model = offbeat.integrations.ray.prepare_model(model, offbeat.BSP())\n"
    scripts = {"ddp": text, "bsp": patch(text, "import offbeat, offbeat.integrations.ray", {prepare: ours})}
    ended = {}
    for name, script in scripts.items():
        (folder / f"{name}.py").write_text(script)
        example = load(folder / f"{name}.py")
        example.train_func = seeded(example.train_func)
        metrics = example.train_linear(WORKERS, epochs=1, storage_path=str(folder / name))
        (saved,) = (folder / name).rglob("model.pt")
        ended[name] = {"metrics": metrics, "model": torch.load(saved)}
    torch.save(ended, folder / "ended.pt")


def main(folder: Path) -> None:
    options = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    # The path of a socket is short, and pytest's folders are not.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as sessions:
        head = {"include_dashboard": False, "temp_dir": sessions, **options}
        # Ray notes the cluster's address in its usual folder, too, which a new machine does not have.
        Path(get_ray_address_file(None)).parent.mkdir(parents=True, exist_ok=True)
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(**options)
        ray.init(address=cluster.address)
        try:
            for part in (conformance, checkpoints, elastic, own_example):
                (folder / part.__name__).mkdir()
                part(folder / part.__name__)
        finally:
            ray.shutdown()
            cluster.shutdown()


if __name__ == "__main__":
    main(Path.cwd())
