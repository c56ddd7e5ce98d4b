"""Time limits of the tests.

A limit is here to end a hang, and for nothing else. So it is far longer than anything takes on the busiest
machine: a test that passes only if something is quick fails where other work runs beside it.
"""

from __future__ import annotations

HANG_S = 600.0
"""How long to wait for what is certain to come. pytest's own limit, in pyproject.toml, is longer."""

SILENCE_S = 3.0
"""How long to wait for what is certain not to come, say from a rank that was killed before the wait began."""
