"""A function in the user's own code, named by a text: `package.module:build` or `folder/file.py:build`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from offbeat.core.settings import nearest
from offbeat.errors import SettingError


def find_function(text: str) -> Callable[..., Any]:
    """Import the function that a text names; modules are also looked for in the current folder."""
    where, _, name = text.rpartition(":")
    if not where or not name:
        raise SettingError(f"{text!r}: write package.module:function or file.py:function")
    module = _load_file(text, Path(where)) if where.endswith(".py") else _import(text, where)
    if not hasattr(module, name):
        known = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise SettingError(f"{text!r}: {where} has no {name!r}{nearest(name, known)}")
    found = getattr(module, name)
    if not callable(found):
        raise SettingError(f"{text!r} is no function: it is of type {type(found).__name__}")
    function: Callable[..., Any] = found
    return function


def _import(text: str, module: str) -> ModuleType:
    _add_to_path(Path.cwd())  # as `python -m` does; a console script does not
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # an import inside the module fails: the traceback shows where
        raise SettingError(
            f"{text!r}: there is no module {error.name!r} in {Path.cwd()} or among the installed packages"
        ) from None


def _load_file(text: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise SettingError(f"{text!r}: there is no file {path}")
    _add_to_path(path.parent.resolve())  # for imports of its neighbours, as `python file.py` does
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None and spec.loader is not None  # its name ends in .py
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _add_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
