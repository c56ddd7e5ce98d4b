"""Rules of the source: the layers, no wires and clocks below the worlds, small interfaces, small files.

Each rule is a function that returns a package's offences. It is tried on Offbeat, which has none, and on a
planted package, whose offences it must see.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

import offbeat
from offbeat.cli import app
from tests.support.source import Package, SourceFile

OFFBEAT = Package(Path(offbeat.__file__).parent)
TESTS = Path(__file__).parent

# A room imports only rooms of the lines above it, and itself.
LAYERS = [
    {"errors"},
    {"core"},
    {"codecs"},
    {"server"},
    {"strategies"},
    {"worlds"},
    {"attach", "data"},
    {"integrations"},
    {"experiments"},
    {"__init__"},
    {"cli"},
    {"__main__"},
]
ROOT_FILES = {"__init__", "__main__", "attach", "errors"}
FOR_TYPES_ALONE = {("offbeat.core.strategy", "offbeat.server.half")}  # what Strategy.server_half returns
ONLY_FROM = {"data": {"errors", "core", "worlds"}}  # stricter than the order
WORLDS = ("offbeat.worlds.processes", "offbeat.worlds.virtual")

PURE_ROOMS = {"core", "codecs", "server", "strategies"}
WIRES_AND_CLOCKS = {"time", "os", "threading", "socket", "torch.distributed", "asyncio", "random"}
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}

OPTION = re.compile(r"(?<![\w-])--(?:[a-z][a-z-]*|\{\})")
OPTIONS_OF_OTHERS = {"--nproc-per-node"}  # torchrun's

MOST_LINES = 400
VAGUE = {"utils", "util", "helpers", "misc", "common"}
MOST_MEMBERS = {
    # name summary identical_replicas layout server_half init ready step drain publish check_elastic
    # on_roster_change
    "Strategy": 12,
    "Port": 11,  # rank world elastic server usage record, and five collectives
    "Replica": 14,  # see core/replica.py
    "Rule": 9,  # init members join leave advance admits gate staleness hint
}
SETTINGS = frozenset({"Settings"})  # the base of declared settings does not count as Strategy's interface

NAMESAKES: dict[str, set[str]] = {}  # classes that may have the same name, with their modules

WITHOUT_TESTS = {  # and why
    "offbeat": "re-exports; tests/test_exported_members.py reads them",
    "offbeat.__main__": "one call of the command line",
    "offbeat.codecs": "re-exports and the table of codecs, which codecs/test_parse.py uses",
    "offbeat.strategies": "re-exports and the table of strategies, which the rules below read",
    "offbeat.worlds.processes.server.__main__": "the entry of a process, which tests of its server start",
}


# --- the layers


def layer_of(room: str) -> int:
    return next((index for index, rooms in enumerate(LAYERS) if room in rooms), len(LAYERS))


def upward_imports(package: Package) -> list[str]:
    """Every chain of imports that goes up contains an import that does, so direct ones are enough to read."""
    offences = []
    for name, file in package.files.items():
        for other in sorted(package.imports(name)):
            here, there = file.room, package.files[other].room
            allowed = there == here or layer_of(there) < layer_of(here)
            if (name, other) in FOR_TYPES_ALONE:
                allowed = other not in package.imports(name, runtime=True)
            if not allowed or (there != here and there not in ONLY_FROM.get(here, {there})):
                offences.append(f"{name} imports {other}")
    return offences


def imports_between_worlds(package: Package) -> list[str]:
    """`data` and `attach` belong to real processes: they do not reach the virtual world either."""
    forbidden = [(here, there) for here in WORLDS for there in WORLDS if here != there]
    forbidden += [("offbeat.attach", WORLDS[1]), ("offbeat.data", WORLDS[1])]
    return [
        f"{name} reaches {other}"
        for here, there in forbidden
        for name in package.files
        if _is_inside(name, here)
        for other in sorted(package.reached(name))
        if _is_inside(other, there)
    ]


def wires_and_clocks(package: Package) -> list[str]:
    pure = {name for name, file in package.files.items() if file.room in PURE_ROOMS}
    reached = pure.union(*(package.reached(name) for name in pure))
    return [
        f"{name} uses {bad}"
        for name in sorted(reached)
        for bad in sorted(package.files[name].uses(WIRES_AND_CLOCKS))
    ]


def commands(package: Package) -> set[str]:
    """Modules cli/<command>.py, which define <command>_command."""
    return {
        name
        for name, file in package.files.items()
        if file.room == "cli" and len(file.parts) == 2
        for node in file.tree.body
        if isinstance(node, ast.FunctionDef) and node.name == f"{file.parts[1]}_command"
    }


def commands_that_import_commands(package: Package) -> list[str]:
    every = commands(package)
    return [
        f"{name} reaches {other}"
        for name in sorted(every)
        for other in sorted(package.reached(name) & (every - {name}))
    ]


def options_outside_cli(package: Package) -> list[str]:
    return [
        f"{name}: {option} in {text.strip()[:60]!r}"
        for name, file in package.files.items()
        if file.room != "cli"
        for text in file.strings
        for option in OPTION.findall(text)
        if option not in OPTIONS_OF_OTHERS
    ]


def strangers_in_the_root(package: Package) -> list[str]:
    files = {path.stem for path in package.root.glob("*.py")}
    rooms = {file.room for file in package.files.values()}
    return sorted((files - ROOT_FILES) | (rooms - set().union(*LAYERS)))


def _is_inside(name: str, package_name: str) -> bool:
    return name == package_name or name.startswith(f"{package_name}.")


# --- names and sizes


def classes_of_one_name(package: Package) -> list[str]:
    modules: dict[str, list[str]] = defaultdict(list)
    for name, file in package.files.items():
        for node in file.classes:
            modules[node.name].append(name)
    return [
        f"{name}: {', '.join(found)}"
        for name, found in sorted(modules.items())
        if len(found) > 1 and set(found) != NAMESAKES.get(name)
    ]


def wide_interfaces(package: Package) -> list[str]:
    offences = []
    for name, most in MOST_MEMBERS.items():
        members = package.members(name, beside=SETTINGS)
        if not members:
            offences.append(f"{name} is not there")
        elif len(members) > most:
            offences.append(f"{name} has {len(members)} public members: {', '.join(sorted(members))}")
    return offences


def long_files(package: Package) -> list[str]:
    return [name for name, file in package.files.items() if len(file.text.splitlines()) > MOST_LINES]


def files_without_a_topic(package: Package) -> list[str]:
    return [name for name, file in package.files.items() if file.path.stem in VAGUE]


def mirrored_test(file: SourceFile) -> Path:
    """Return where a module's test lies: of core/port.py, core/test_port.py; of a package, inside of it."""
    folder = TESTS.joinpath(*file.parts) if file.path.stem == "__init__" else TESTS.joinpath(*file.parts[:-1])
    return folder / f"test_{file.parts[-1] if file.parts else file.name}.py"


def modules_without_tests(package: Package) -> list[str]:
    """Whoever opens a module finds its test by its name. A file that says nothing needs none."""
    return [
        f"{name} has no {mirrored_test(file).relative_to(TESTS.parent)}"
        for name, file in package.files.items()
        if name not in WITHOUT_TESTS and has_statements(file) and not mirrored_test(file).exists()
    ]


def has_statements(file: SourceFile) -> bool:
    """Tell whether a file has more than a docstring."""
    return len(file.tree.body) > (ast.get_docstring(file.tree) is not None)


def files_without_a_docstring(package: Package) -> list[str]:
    return [n for n, f in package.files.items() if f.tree.body and not ast.get_docstring(f.tree)]


# --- what is loaded is data only


def pickles(package: Package) -> list[str]:
    return [name for name, file in package.files.items() if file.uses(PICKLES)]


def loads_of_more_than_weights(package: Package) -> list[str]:
    """`torch.load` unpickles, unless told not to."""
    return [
        f"{name}, line {node.lineno}"
        for name, file in package.files.items()
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "torch.load"
        and "weights_only=True" not in map(ast.unparse, node.keywords)
    ]


RULES = [
    upward_imports,
    imports_between_worlds,
    wires_and_clocks,
    commands_that_import_commands,
    options_outside_cli,
    strangers_in_the_root,
    classes_of_one_name,
    wide_interfaces,
    long_files,
    files_without_a_topic,
    files_without_a_docstring,
    modules_without_tests,
    pickles,
    loads_of_more_than_weights,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_offbeat_keeps_the_rule(rule) -> None:
    offences = rule(OFFBEAT)
    assert not offences, "\n".join(offences)


def plant(folder: Path, files: dict[str, str]) -> Package:
    """Write a package called offbeat, with these files."""
    for name, text in files.items():
        path = folder / "offbeat" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Package(folder / "offbeat")


FIELDS = "\n".join(f"    m{n}: int" for n in range(14))
ATTRIBUTES = "\n".join(f"        self.m{n} = 0" for n in range(15))
PLANTED = [
    (upward_imports, {"core/a.py": "from offbeat.codecs import Codec", "codecs/__init__.py": ""}),
    (upward_imports, {"core/a.py": "def f():\n    import offbeat.server.b", "server/b.py": ""}),
    (upward_imports, {"core/strategy.py": "from offbeat.server.half import A", "server/half.py": ""}),
    (upward_imports, {"strategies/a.py": "from offbeat import attach", "attach.py": ""}),
    (upward_imports, {"worlds/a.py": "import offbeat", "__init__.py": ""}),
    (upward_imports, {"attach.py": "import offbeat.data.a", "data/a.py": ""}),
    (upward_imports, {"data/a.py": "import offbeat.strategies.bsp", "strategies/bsp.py": ""}),
    (upward_imports, {"experiments/a.py": "from offbeat.cli import options", "cli/options.py": ""}),
    (
        imports_between_worlds,
        {"worlds/virtual/a.py": "import offbeat.worlds.processes.b", "worlds/processes/b.py": ""},
    ),
    (
        imports_between_worlds,
        {
            "worlds/processes/a.py": "import offbeat.experiments.b",
            "experiments/b.py": "from offbeat.worlds.virtual import c",
            "worlds/virtual/c.py": "",
        },
    ),
    (imports_between_worlds, {"data/a.py": "import offbeat.worlds.virtual.b", "worlds/virtual/b.py": ""}),
    (wires_and_clocks, {"strategies/a/b.py": "import time"}),
    (wires_and_clocks, {"core/a.py": "def f():\n    from os import path"}),
    (wires_and_clocks, {"core/a.py": "import torch.distributed as dist"}),
    (wires_and_clocks, {"core/a.py": "from torch import distributed"}),
    (wires_and_clocks, {"core/a.py": "import torch as t\nt.distributed.barrier()"}),
    (wires_and_clocks, {"server/a.py": "from threading import Lock"}),
    (wires_and_clocks, {"codecs/a.py": "from offbeat import errors", "errors.py": "import socket"}),
    (
        commands_that_import_commands,
        {
            "cli/plan.py": "import offbeat.cli.train\ndef plan_command(): ...",
            "cli/train.py": "def train_command(): ...",
        },
    ),
    (
        commands_that_import_commands,
        {
            "cli/plan.py": "import offbeat.cli.options\ndef plan_command(): ...",
            "cli/options.py": "from offbeat.cli import train",
            "cli/train.py": "def train_command(): ...",
        },
    ),
    (options_outside_cli, {"experiments/a.py": "raise ValueError('give --data DIR')"}),
    (options_outside_cli, {"experiments/a.py": "def f(name): return f'{name}: as in --set {name}=1'"}),
    (options_outside_cli, {"experiments/a.py": "def f(name): return f'give --{name}'"}),
    (options_outside_cli, {"core/a.py": '"""Settings as `--set` takes them."""'}),
    (strangers_in_the_root, {"ledger.py": ""}),
    (strangers_in_the_root, {"live/log.py": ""}),
    (classes_of_one_name, {"core/a.py": "class Plan: ...", "cli/b.py": "def f():\n    class Plan: ..."}),
    (wide_interfaces, {"core/a.py": f"class Strategy:\n{FIELDS}"}),
    (wide_interfaces, {"core/a.py": f"class Base:\n{FIELDS}\nclass Port(Base, Protocol): ..."}),
    (wide_interfaces, {"core/a.py": f"class Replica:\n    def __init__(self):\n{ATTRIBUTES}"}),
    (long_files, {"core/a.py": "\n" * (MOST_LINES + 1)}),
    (files_without_a_topic, {"core/utils.py": ""}),
    (files_without_a_docstring, {"core/a.py": "import math"}),
    (modules_without_tests, {"core/nowhere.py": "HERE = 1"}),
    (modules_without_tests, {"strategies/nowhere/__init__.py": "HERE = 1"}),
    (pickles, {"core/a.py": "from pickle import loads"}),
    (loads_of_more_than_weights, {"core/a.py": "import torch\ntorch.load('a', weights_only=False)"}),
]


@pytest.mark.parametrize(
    ("rule", "files"), PLANTED, ids=[f"{rule.__name__}-{list(f)}" for rule, f in PLANTED]
)
def test_the_rule_sees_an_offence(rule, files: dict[str, str], tmp_path: Path) -> None:
    offences = rule(plant(tmp_path, files))
    assert [each for each in offences if "is not there" not in each]


def test_every_rule_has_a_planted_offence() -> None:
    assert {rule for rule, _ in PLANTED} == set(RULES)


def test_what_only_looks_like_an_offence_is_none(tmp_path: Path) -> None:
    """A parameter called `time`, a server's own `os` attribute, a dash in prose, a row of dashes."""
    text = (
        '"""A -- b, and a row: -----, x--y."""\ndef f(time, server):\n    return time.real, server.os.name\n'
    )
    package = plant(
        tmp_path, {"core/port.py": text, "core/__init__.py": "", "cli/__init__.py": '"""Commands."""'}
    )
    assert [rule(package) for rule in RULES if rule is not wide_interfaces] == [[]] * (len(RULES) - 1)


def test_a_type_of_a_layer_above_may_be_named_where_that_is_listed(tmp_path: Path) -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from offbeat.server.half import A"
    package = plant(tmp_path, {"core/strategy.py": text, "core/port.py": text, "server/half.py": ""})
    assert upward_imports(package) == ["offbeat.core.port imports offbeat.server.half"]


def test_a_module_without_a_test_is_one_of_ours_and_has_none() -> None:
    for name, reason in WITHOUT_TESTS.items():
        assert reason
        assert not mirrored_test(OFFBEAT.files[name]).exists(), f"{name} has a test: strike it off the list"


def test_all_commands_are_read() -> None:
    names = {command.name for command in app.registered_commands}
    assert {file.rpartition(".")[2] for file in commands(OFFBEAT)} == names
