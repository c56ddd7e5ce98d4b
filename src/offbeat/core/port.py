"""A worker's port: its operations with all other workers, and with the parameter server.

A strategy sees only the interfaces in this file. It never learns which wire carries an operation, nor how
long that takes, so the same strategy runs over real processes and in virtual time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from torch import Tensor

from offbeat.core.pending import Arrived, Pending
from offbeat.core.slices import Slices
from offbeat.errors import OffbeatError

if TYPE_CHECKING:
    from offbeat.core.ledger import Ledger

T = TypeVar("T")
SlicesT = TypeVar("SlicesT", bound=Sequence[Tensor])


class Op(Enum):
    """Reduction of the workers' tensors to one."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"


class Lane(Enum):
    """Queue of operations. Operations of one lane run in order; the two lanes do not wait for each other."""

    FRONT = "front"
    BACK = "back"


class Usage(NamedTuple):
    """Resources that a worker's training has used so far; seconds are of the real or the virtual clock."""

    compute_s: float  # not blocked by other workers
    communicate_s: float  # with an operation in progress, whether or not computation hides it
    nbytes: int  # sent by this worker
    server_reduced: int = 0  # bytes of tensors that the parameter server has reduced for this worker
    wait_s: float = 0.0  # blocked by other workers


class Notice(NamedTuple):
    """News of a worker for people who watch the run, shown once on the page of a running job."""

    kind: str  # one word: changed, regrouped, ...
    text: str  # a sentence about this worker, without its name


class PullResult(NamedTuple):
    """Numbers that the server sends with its weights."""

    staleness: int  # by how many clocks the slowest worker's updates lag behind the reader
    hint: int = 0  # the server rule's number for this worker


class Reducer(Protocol):
    """An object that reduces a tensor over all workers: the port itself, or the parameter server."""

    def all_reduce(self, tensor: Tensor, op: Op = Op.MEAN, lane: Lane = Lane.FRONT) -> Pending[Tensor]:
        """Replace the tensor by the sum, mean or maximum over all workers, on all of them."""
        ...


class ServerPort(Reducer, Protocol):
    """A worker's connection to the parameter server.

    Its `all_reduce` covers the workers that are connected, and has one lane.
    """

    def push(
        self, update: list[Tensor], clock: int, *, report: Sequence[float] = (), codec: int = 0
    ) -> Pending[bool]:
        """Send `update` as this worker's push number `clock`. Resolves to whether the server accepted it.

        The server adds the update to its weights or, where it owns the optimizer, steps with it as a
        gradient. It refuses an update that is not finite, or too late for its rule. `report` holds numbers
        for the server, equally many with every push: learning rates, or numbers that its aggregation needs.
        With `codec=i` push codec i compresses the update; the residual is left in `update`, which may then
        be changed at once.
        """
        ...

    def pull(self, into: list[Tensor], clock: int | None) -> Pending[PullResult]:
        """Read the weights once the rule admits a worker at `clock`. None: as they are when this arrives."""
        ...

    def read(self, into: list[Tensor]) -> Pending[None]:
        """Read the weights as they are now, for evaluation, past all pushes and pulls in flight."""
        ...

    def pull_state(self, part: int, into: list[Tensor]) -> Pending[None]:
        """Read one part of the state of the server's optimizer as it is now, laid out as the weights are.

        Parts count from 1, by the names of the state in alphabetical order; a number of a parameter is
        repeated for each of its elements. Messages are handled in order: what is read lacks a push that
        follows.
        """
        ...


class ServerAdmin(Protocol):
    """The parameter server's interface for checkpoints."""

    async def save(self) -> list[Tensor]:
        """Read the server's whole state: its weights, then the state of its optimizer."""
        ...

    async def load(self, tensors: list[Tensor]) -> None:
        """Replace the server's whole state by tensors that `save` returned."""
        ...


class Port(Reducer, Protocol):
    """A worker's connection to all other workers. Each call starts an operation and returns at once.

    Tensors are used in place: do not touch them until the result has been awaited. They then hold the result.
    """

    rank: int
    world: int
    elastic: bool
    """Workers may be lost and others join: keep no state that only one worker has."""

    @property
    def server(self) -> ServerPort:
        """The parameter server; raises OffbeatError where the strategy declared no server half."""
        ...

    def broadcast(self, tensor: Tensor, root: int = 0, lane: Lane = Lane.FRONT) -> Pending[Tensor]:
        """Replace the tensor by that of worker `root`, on all workers."""
        ...

    def usage(self) -> Usage:
        """Return this worker's seconds and bytes so far, for strategies that adapt to them."""
        ...

    def reduce_scatter(
        self, slices: Sequence[Tensor], op: Op = Op.MEAN, lane: Lane = Lane.FRONT
    ) -> Pending[Tensor]:
        """Reduce `slices[k]` of all workers to worker k.

        There is one slice per worker, in a list or as `Slices` of flat memory; sizes may differ, and be 0,
        but are the same on all workers. The value is this worker's own slice, `slices[rank]`, in place; the
        other slices are undefined afterwards.
        """
        ...

    def all_gather(self, slices: SlicesT, lane: Lane = Lane.FRONT) -> Pending[SlicesT]:
        """Send `slices[rank]` to all workers, and fill the other slices with theirs, in place."""
        ...

    def all_to_all(
        self, outgoing: list[Tensor], incoming: list[Tensor], lane: Lane = Lane.FRONT
    ) -> Pending[list[Tensor]]:
        """Send `outgoing[k]` to worker k, and receive that worker's tensor for this one in `incoming[k]`.

        Each list has one tensor per worker, and all workers send worker k equally many bytes. No worker sends
        to itself: `incoming[rank]` stays as it is, and may be `outgoing[rank]`.
        """
        ...

    def record(self, *events: Notice, **gauges: float) -> None:
        """Record events in the ledger, and the latest value of each gauge, such as `planned_steps`."""
        ...


class Signature(NamedTuple):
    """Description of a collective operation, which must be the same on all workers."""

    operation: str  # the method's name
    detail: str  # of a reduction, its Op; of a broadcast, its root
    nbytes: tuple[int, ...]  # of each tensor


class CollectivePort(ABC):
    """Base of the ports of both worlds, which differ in how an operation is started."""

    elastic = False

    def __init__(self, rank: int, world: int, ledger: Ledger) -> None:
        self.rank = rank
        self.world = world
        self.ledger = ledger

    @property
    def server(self) -> ServerPort:
        server = self._server_port()
        if server is None:
            raise OffbeatError("this strategy has no parameter server: its server_half() returns None")
        return server

    def all_reduce(self, tensor: Tensor, op: Op = Op.MEAN, lane: Lane = Lane.FRONT) -> Pending[Tensor]:
        if self.world == 1:
            return Arrived(tensor)
        return self._start(Signature("all_reduce", op.value, (tensor.nbytes,)), [tensor], tensor, lane)

    def broadcast(self, tensor: Tensor, root: int = 0, lane: Lane = Lane.FRONT) -> Pending[Tensor]:
        if self.world == 1:
            return Arrived(tensor)
        return self._start(Signature("broadcast", str(root), (tensor.nbytes,)), [tensor], tensor, lane)

    def reduce_scatter(
        self, slices: Sequence[Tensor], op: Op = Op.MEAN, lane: Lane = Lane.FRONT
    ) -> Pending[Tensor]:
        self._check_slices(slices)
        own = slices[self.rank]
        if self.world == 1:
            return Arrived(own)
        return self._start(Signature("reduce_scatter", op.value, _sizes(slices)), slices, own, lane)

    def all_gather(self, slices: SlicesT, lane: Lane = Lane.FRONT) -> Pending[SlicesT]:
        self._check_slices(slices)
        if self.world == 1:
            return Arrived(slices)
        return self._start(Signature("all_gather", "slices", _sizes(slices)), slices, slices, lane)

    def all_to_all(
        self, outgoing: list[Tensor], incoming: list[Tensor], lane: Lane = Lane.FRONT
    ) -> Pending[list[Tensor]]:
        self._check_slices(outgoing)
        self._check_slices(incoming)
        if self.world == 1:
            return Arrived(incoming)
        signature = Signature("all_to_all", "slices", _sizes(outgoing))
        return self._start(signature, [*outgoing, *incoming], incoming, lane)

    def usage(self) -> Usage:
        return self.ledger.usage()

    def record(self, *events: Notice, **gauges: float) -> None:
        self.ledger.record(*events, **gauges)

    @abstractmethod
    def _server_port(self) -> ServerPort | None: ...

    @abstractmethod
    def _start(self, signature: Signature, tensors: Sequence[Tensor], value: T, lane: Lane) -> Pending[T]:
        """Start a collective operation on `tensors`, whose result is `value`."""

    def _check_slices(self, slices: Sequence[Tensor]) -> None:
        """Refuse slices that would leave a worker without one, and all others waiting for it."""
        if len(slices) != self.world:
            raise OffbeatError(
                f"{len(slices)} slices for {self.world} workers: there must be one per worker, even if empty"
            )


def _sizes(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tensors.nbytes if isinstance(tensors, Slices) else tuple([tensor.nbytes for tensor in tensors])
