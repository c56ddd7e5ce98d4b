"""Overrides: does a promise about a method still hold in a subclass that has changed the method?"""

from __future__ import annotations


def promises(cls: type, promise: str, *methods: str) -> bool:
    """Return whether the class that defined any of these methods last has also defined `promise`.

    A subclass that changes a method inherits what its base promised about another one. It has to repeat the
    promise, or it does not count.
    """
    latest = next(base for base in cls.__mro__ if not {promise, *methods}.isdisjoint(vars(base)))
    return promise in vars(latest)
