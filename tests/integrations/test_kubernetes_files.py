"""The structure of the files in examples/kubernetes, in the environment that has a parser of YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"

# Of trainer.kubeflow.org/v1alpha1, the fields that a user sets, with their types.
SPEC = {"runtimeRef": dict, "trainer": dict, "initializer": dict, "runtimePatches": list, "suspend": bool}
TRAINER = {
    "image": str,
    "command": list,
    "args": list,
    "env": list,
    "numNodes": int,
    "numProcPerNode": int,
    "resourcesPerNode": dict,
}


def load(name: str) -> dict[str, Any]:
    """Return the documents of a file by kind."""
    return {found["kind"]: found for found in yaml.safe_load_all((FOLDER / name).read_text("utf-8"))}


def check(fields: dict[str, Any], schema: dict[str, type]) -> None:
    assert set(fields) <= set(schema)
    assert {name: type(value) for name, value in fields.items()} == {name: schema[name] for name in fields}


def test_trainjob_fits_the_schema() -> None:
    job = load("trainjob.yaml")["TrainJob"]
    assert job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    check(job["spec"], SPEC)
    check(job["spec"]["trainer"], TRAINER)
    assert job["spec"]["runtimeRef"]["name"]
    assert job["spec"]["trainer"]["command"] == ["torchrun"]
    assert set(job["spec"]["trainer"]["resourcesPerNode"]) <= {"requests", "limits", "claims"}


def test_workers_find_the_server() -> None:
    files = load("server.yaml")
    pod = files["Deployment"]["spec"]["template"]
    assert files["Deployment"]["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    assert files["Service"]["spec"]["selector"] == pod["metadata"]["labels"]
    server = pod["spec"]["containers"][0]
    port = files["Service"]["spec"]["ports"][0]["port"]
    assert server["args"][server["args"].index("--listen") + 1] == f"$(POD_IP):{port}"
    assert server["ports"][0]["containerPort"] == port

    trainer = load("trainjob.yaml")["TrainJob"]["spec"]["trainer"]
    env = {variable["name"]: variable for variable in trainer["env"]}
    assert env["OFFBEAT_SERVER"]["value"] == f"{files['Service']['metadata']['name']}:{port}"
    workers = server["args"][server["args"].index("--workers") + 1]
    assert int(workers) == trainer["numNodes"] * trainer["numProcPerNode"]

    tokens = [env["OFFBEAT_TOKEN"], *(one for one in server["env"] if one["name"] == "OFFBEAT_TOKEN")]
    keys = [one["valueFrom"]["secretKeyRef"] for one in tokens]
    assert len(keys) == 2 and keys[0] == keys[1]
    assert keys[0]["name"] == files["Secret"]["metadata"]["name"]
    assert keys[0]["key"] in files["Secret"]["stringData"]
