"""The task of a user's own parts: by the name of a function, with other settings, in another process."""

from __future__ import annotations

import pickle

import pytest
import torch

from offbeat.errors import SettingError
from offbeat.experiments.tasks import task
from offbeat.experiments.tasks.own import OwnTask, Workload, import_workload
from tests.support import own_workload

HERE = "tests.support.own_workload"


def test_a_text_names_a_task_with_its_own_defaults() -> None:
    own = task(f"{HERE}:build")
    assert (own.name, own.model, own.metric) == (f"{HERE}:build", "net", "error_on_all")
    assert (own.batch_size, own.epochs, own.lr, own.higher_is_better) == (8, 3, None, False)
    optimizer = own.optimizer(own.build())
    assert [group["lr"] for group in optimizer.param_groups] == [0.05]


def test_settings_replace_those_of_the_function_also_in_other_processes() -> None:
    chosen = task(f"{HERE}:build", model="net", batch_size=4, lr="0.5")
    for own in (chosen, pickle.loads(pickle.dumps(chosen))):
        assert (own.name, own.batch_size, own.epochs, own.lr) == (f"{HERE}:build", 4, 3, 0.5)
        optimizer = own.optimizer(own.build())
        assert [group["lr"] for group in optimizer.param_groups] == [0.5]
    assert "object at" not in repr(chosen), "calibration compares the texts of all ranks"


def test_the_function_is_called_once_under_one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def build_counted() -> dict[str, object]:
        drawn.append(torch.rand(1).item())
        return own_workload.build()

    monkeypatch.setattr(own_workload, "build_counted", build_counted, raising=False)
    import_workload.cache_clear()
    for _ in range(2):
        assert isinstance(task(f"{HERE}:build_counted"), OwnTask)
    import_workload.cache_clear()
    torch.manual_seed(77)
    task(f"{HERE}:build_counted")
    assert len(drawn) == 2 and drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("PARTS", "is no function: it is of type dict"),
        ("build_a_list", "returned a list: expected a dict with model, loss, data and optimizer"),
        ("build_without_a_loss", "loss: missing; expected a function of the model and a batch"),
        ("build_with_a_typo", "batchsize: not a known field; did you mean 'batch_size'?"),
    ],
)
def test_what_a_function_must_return_is_said(name: str, message: str) -> None:
    with pytest.raises(SettingError) as refusal:
        task(f"{HERE}:{name}")
    assert str(refusal.value).startswith(f"'{HERE}:{name}'")
    assert message in str(refusal.value)


def test_another_model_is_refused() -> None:
    with pytest.raises(SettingError, match="build has no model 'resnet'; did you mean 'net'"):
        task(f"{HERE}:build", model="resnet")


def test_a_workload_is_itself_alone() -> None:
    """Tensors cannot be compared as a whole, so neither can workloads."""
    one, other = (Workload(**own_workload.build()) for _ in range(2))
    assert one == one and one != other
    assert OwnTask(workload=one) == OwnTask(workload=one) != OwnTask(workload=other)
