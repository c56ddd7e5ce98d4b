"""A promise about a method ends with the method: a subclass that changes it has to repeat the promise."""

from __future__ import annotations

from offbeat.core.overrides import promises


class Promised:
    exact = True

    def step(self) -> int:
        return 1


class Unchanged(Promised):
    def other(self) -> int:
        return 2


class Changed(Unchanged):
    def step(self) -> int:
        return 3


class Repeated(Changed):
    exact = True


def test_who_defined_the_method_last_has_to_have_defined_the_promise() -> None:
    kept = {cls: promises(cls, "exact", "step") for cls in (Promised, Unchanged, Changed, Repeated)}
    assert kept == {Promised: True, Unchanged: True, Changed: False, Repeated: True}
