"""Plugins: classes of other packages, which offer them by entry points, as in their pyproject.toml

    [project.entry-points."offbeat.strategies"]
    my_method = "my_package:MyMethod"

A plugin is imported when its name is first looked up, and never by `import offbeat`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from offbeat.errors import SettingError

T = TypeVar("T")


class Catalog(Mapping[str, type[T]]):
    """Classes by name: Offbeat's own, and after them the plugins of an entry point group.

    Looking up a plugin that cannot be used raises a SettingError with the reason; so does a name that two
    packages offer. Names alone (`in`, iteration) import nothing.
    """

    def __init__(self, what: str, group: str, base: type, own: Mapping[str, type[T]]) -> None:
        self.what = what
        self.own = own
        self._group = group
        self._base = base

    @cached_property
    def _offers(self) -> dict[str, list[EntryPoint]]:
        """The entry points of all installed packages, by plain name."""
        offers: dict[str, list[EntryPoint]] = {}
        for entry in sorted(entry_points(group=self._group), key=lambda entry: entry.name):
            offers.setdefault(plain_name(entry.name), []).append(entry)
        return offers

    def __iter__(self) -> Iterator[str]:
        offered = (entry.name for entries in self._offers.values() for entry in entries)
        return iter(dict.fromkeys([*self.own, *offered]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return any(name == known for known in self)

    def __getitem__(self, name: str) -> type[T]:
        if name not in self:
            raise KeyError(name)
        offers = self._offers.get(plain_name(name), [])
        rivals = [f"Offbeat itself ({own})" for own in self.own if plain_name(own) == plain_name(name)]
        rivals += map(self._describe, offers)
        if len(rivals) > 1:
            raise SettingError(
                f"the {self.what} {name!r} is offered more than once: by {', and by '.join(rivals)}. "
                "Uninstall one of these packages, or rename its entry point"
            )
        return self._load(offers[0]) if offers else self.own[name]

    def load(self) -> tuple[dict[str, type[T]], dict[str, str]]:
        """Import all plugins; return the classes by name, and the reason for each name that is refused."""
        usable, reasons = dict(self.own), {}
        for name in self:
            try:
                usable[name] = self[name]
            except SettingError as problem:
                reasons[name] = str(problem)
        return usable, reasons

    def package_of(self, name: str) -> str | None:
        """Return the package that offers a plugin, with its version; None for Offbeat's own classes."""
        return None if name in self.own else _package(self._offers[plain_name(name)][0])

    def _describe(self, entry: EntryPoint) -> str:
        return f"{_package(entry)} (entry point {self._group}: {entry.name} = {entry.value})"

    def _load(self, entry: EntryPoint) -> type[T]:
        plugin = f"the {self.what} {entry.name!r} of {self._describe(entry)}"
        try:
            cls = entry.load()
        except Exception as cause:  # a module of others may raise anything
            raise SettingError(f"{plugin} cannot be imported: {type(cause).__name__}: {cause}") from cause
        problem = self._problem(entry.name, cls)
        if problem:
            raise SettingError(f"{plugin} cannot be used: {problem}")
        return cls  # type: ignore[no-any-return]

    def _problem(self, name: str, cls: Any) -> str:
        """Say why an object is no plugin of that name; empty if it is one."""
        if not (isinstance(cls, type) and issubclass(cls, self._base)):
            return f"it is {cls!r}, and no subclass of {self._base.__module__}.{self._base.__qualname__}"
        if missing := getattr(cls, "__abstractmethods__", None):
            return f"the class does not define {', '.join(sorted(missing))}"
        if not name.isidentifier():
            return "its name must consist of letters, digits and _"
        if getattr(cls, "name", None) != name:
            return f"the class has name = {getattr(cls, 'name', None)!r}: give both the same name"
        if not isinstance(getattr(cls, "summary", None), str):
            return "the class has no summary, a line that says what it does"
        return ""


def plain_name(name: str) -> str:
    """Return a name without what people confuse: capitals, _ and -."""
    return name.lower().replace("_", "").replace("-", "")


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown package"
