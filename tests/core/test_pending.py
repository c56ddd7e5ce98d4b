"""Pending results: what awaiting yields and returns, and what a strategy may not await."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from offbeat.core.pending import Arrived, Pending, block_on, expect_pending
from offbeat.errors import OffbeatError


class Later(Pending[str]):
    """A result that is there after it has been waited for."""

    def __init__(self, value: str, calls: list[str], fails: bool = False) -> None:
        self.value, self.calls, self.fails = value, calls, fails
        self.there = False

    def done(self) -> bool:
        return self.there

    def wait(self) -> None:
        self.calls.append(f"waited for {self.value}")
        self.there = True

    def result(self) -> str:
        if self.fails:
            raise OffbeatError(f"{self.value} failed")
        return self.value


def test_what_has_arrived_is_not_waited_for() -> None:
    async def both() -> list[str]:
        return [await Arrived("a"), await Arrived("b")]

    with pytest.raises(StopIteration) as ended:
        both().send(None)
    assert ended.value.value == ["a", "b"]
    Arrived(1).wait()


def test_blocking_waits_for_each_in_the_order_of_awaiting_and_for_none_twice() -> None:
    calls: list[str] = []
    one, other = Later("one", calls), Later("other", calls)

    async def step() -> list[str]:
        return [await other, await one, await other]

    assert block_on(step()) == ["other", "one", "other"]
    assert calls == ["waited for other", "waited for one"]


def test_an_operation_that_failed_raises_where_it_is_awaited() -> None:
    async def step() -> str:
        try:
            return await Later("push", [], fails=True)
        except OffbeatError as error:
            return f"caught: {error}"

    assert block_on(step()) == "caught: push failed"


def test_a_coroutine_is_closed_when_waiting_fails() -> None:
    ended: list[str] = []

    class Broken(Later):
        def wait(self) -> None:
            raise OffbeatError("the wire broke")

    async def step() -> None:
        try:
            await Broken("pull", [])
        finally:
            ended.append("closed")

    running = step()  # held here, so that it is not closed by being dropped
    with pytest.raises(OffbeatError, match="the wire broke"):
        block_on(running)
    assert ended == ["closed"]


@pytest.mark.parametrize("make", [lambda: asyncio.sleep(0)], ids=["sleep"])
def test_a_strategy_may_await_nothing_else(make: Callable[[], object]) -> None:
    async def step() -> None:
        await make()  # type: ignore[misc]

    with pytest.raises(OffbeatError, match=r"may await only a Pending .*, not a NoneType"):
        block_on(step())
    arrived = Arrived(1)
    assert expect_pending(arrived) is arrived
