"""A worker's door to the others: operations that start now and are awaited later.

A strategy sees only what is on this page. It never learns over which wire an operation travels, nor how
long that takes, so the same strategy runs over real processes and in virtual time.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Coroutine, Generator, Sequence
from enum import Enum
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from offbeat.errors import OffbeatError

T = TypeVar("T")


class Op(Enum):
    """How the workers' tensors become one."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"


class Lane(Enum):
    """Operations of one lane run in order; the two lanes do not wait for each other."""

    FRONT = "front"
    BACK = "back"


class Pending(Generic[T]):  # not an ABC: whether something is a Pending is asked at every resume
    """A result on its way. Await it for the value; hold it to overlap."""

    __slots__ = ()

    @abstractmethod
    def done(self) -> bool:
        """Whether `result` would answer at once."""

    @abstractmethod
    def result(self) -> T:
        """The value, or the error that came instead. Only once `done`."""

    @abstractmethod
    def wait(self) -> None:
        """Block until `done`, in a world where a worker can block."""

    def __await__(self) -> Generator[Pending[Any], None, T]:
        if not self.done():
            yield self
        return self.result()


class Arrived(Pending[T]):
    """A result that is already here."""

    def __init__(self, value: T) -> None:
        self._value = value

    def done(self) -> bool:
        return True

    def result(self) -> T:
        return self._value

    def wait(self) -> None:
        return


class Usage(NamedTuple):
    """What a worker's training has taken so far: time as data, from the real clock or the virtual one."""

    compute_s: float  # not blocked by the others
    communicate_s: float  # with an operation under way, hidden behind computing or not
    nbytes: int  # out of its NIC
    combined: int = 0  # bytes that the server has added up for it


class PullResult(NamedTuple):
    """What comes with the server's weights."""

    staleness: int  # by how many clocks the slowest worker's updates lag behind the reader
    hint: int = 0  # what the server's rule tells this worker


class Port(Protocol):
    """A worker's only door to the others. Each call starts an operation and returns at once.

    Tensors handed in are used in place: they are not to be touched until the result has been awaited, and
    then they *are* the result.
    """

    rank: int
    world: int

    def all_reduce(self, tensor: Tensor, op: Op = Op.MEAN, lane: Lane = Lane.FRONT) -> Pending[Tensor]:
        """The sum, mean or maximum over all workers, to all of them."""
        ...

    def broadcast(self, tensor: Tensor, root: int = 0, lane: Lane = Lane.FRONT) -> Pending[Tensor]:
        """The tensor of worker `root`, to all of them."""
        ...

    def usage(self) -> Usage:
        """This worker's seconds and bytes so far, for strategies that adapt to them."""
        ...

    def reduce_scatter(
        self, shares: list[Tensor], op: Op = Op.MEAN, lane: Lane = Lane.FRONT
    ) -> Pending[Tensor]:
        """Reduce to owners: `shares[k]` of all workers become one at worker k.

        There is one share a worker; sizes may differ, and be 0, but are the same on all workers. The value is
        this worker's own, `shares[rank]`, in place; what the other entries hold afterwards is not said.
        """
        ...

    def all_gather(self, shares: list[Tensor], lane: Lane = Lane.FRONT) -> Pending[list[Tensor]]:
        """Every worker's `shares[own rank]` to everybody: the other entries are filled, in place."""
        ...

    def all_to_all(
        self, away: list[Tensor], into: list[Tensor], lane: Lane = Lane.FRONT
    ) -> Pending[list[Tensor]]:
        """`away[k]` to worker k, whose own for this worker comes into `into[k]`.

        There is one of each a worker, and all workers send worker k equally much. What a worker has for
        itself goes nowhere: `into[rank]` stays as it is, and may be `away[rank]`.
        """
        ...

    def record(self, **gauges: float) -> None:
        """Keep the latest value of a number for the ledger, such as `planned_steps`."""
        ...

    def push(
        self, update: list[Tensor], clock: int, report: Sequence[float] = (), form: int = 0
    ) -> Pending[bool]:
        """Fold `update` into the parameter server's weights, as this worker's push number `clock`.

        It is added; or, where the server has the optimizer, it is a gradient to step with. `report` are
        numbers for the server, as many with every push: the learning rates for such a step, or what its rule
        asks for. In a `form` of the strategy's not all of it may travel: what does not is left in `update`,
        which is then free at once. The value is whether it was taken; what is not finite, or too late for the
        rule, is not.
        """
        ...

    def combine(self, tensor: Tensor, op: Op = Op.MEAN) -> Pending[Tensor]:
        """As `reduce`, but by the parameter server, over the workers that are there."""
        ...

    def pull(self, into: list[Tensor], clock: int | None, part: int = 0) -> Pending[PullResult]:
        """Read the server's weights, once its rule lets a worker at `clock` go on; None: at once.

        `part`: not the weights, but part 1, 2, … of what the server's optimizer keeps, for a checkpoint.
        """
        ...


class ThroughServer:
    """A port whose reductions the parameter server makes, on one lane. All else is the port's own."""

    def __init__(self, port: Port) -> None:
        self._port = port

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)

    def all_reduce(self, tensor: Tensor, op: Op = Op.MEAN, lane: Lane = Lane.FRONT) -> Pending[Tensor]:
        return self._port.combine(tensor, op)

    def usage(self) -> Usage:
        """Bytes as a ring would have sent them: what was added up counts, wherever the servers are."""
        spent, world = self._port.usage(), self._port.world
        return spent._replace(nbytes=2 * spent.combined * (world - 1) // world)


def check_slices(shares: list[Tensor], world: int) -> None:
    """Refuse what would leave some worker without a share, and the others waiting for it."""
    if len(shares) != world:
        raise OffbeatError(f"{len(shares)} shares for {world} workers: there must be one for each, if empty")


def expect_pending(awaited: object) -> Pending[Any]:
    """Refuse anything else that a strategy may have awaited: no world could ever wake it."""
    if not isinstance(awaited, Pending):
        raise OffbeatError(
            f"a strategy may await only what a port or a replica gave it (a Pending), not a "
            f"{type(awaited).__name__}: no clock but theirs exists in both worlds"
        )
    return awaited


def block_on(coroutine: Coroutine[Pending[Any], None, T]) -> T:
    """Run a coroutine to its end by blocking wherever it awaits."""
    try:
        while True:
            expect_pending(coroutine.send(None)).wait()
    except StopIteration as finished:
        value: T = finished.value
        return value
    finally:
        coroutine.close()
