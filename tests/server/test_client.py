"""ServerClient: slices for shards, clocks, codecs and counts, against real shards without a wire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import nn
from torch.optim import SGD

from offbeat import ASP, SSP, Half, OffbeatError, TopK
from offbeat.core.ledger import Ledger
from offbeat.core.pending import Arrived, Pending, block_on
from offbeat.core.replica import Replica
from offbeat.server.apply import make_apply
from offbeat.server.client import Operation, ServerClient
from offbeat.server.half import ServerHalf
from offbeat.server.messages import Join, JoinAck, Load, PullReply, Push, Save, Tensors
from offbeat.server.optimizer_spec import OptimizerSpec, spec_of
from offbeat.server.packets import allocate, decode, encode
from offbeat.server.server import ParameterServer
from offbeat.server.sharding import ShardState, shard_bounds, split_shards

T = TypeVar("T")
SHARDS = 3


class Direct:
    """A transport that hands messages to the shards in this process, decodes packets and copies replies."""

    shards = SHARDS

    def __init__(self, half: ServerHalf, weights: Tensors, spec: OptimizerSpec | None = None) -> None:
        self.half = half
        self.servers = []
        for number, part in enumerate(split_shards(weights, SHARDS)):
            bounds = shard_bounds([weight.numel() for weight in weights], number, SHARDS)
            apply = make_apply(spec and spec.for_shard(bounds))
            self.servers.append(ParameterServer(ShardState(part), half, apply))
        self.sent: list[tuple[Operation, list[Any]]] = []
        self.joined_clock = 0

    def join(self, worker: int, clock: int | None = None) -> None:
        for server in self.servers:
            (answer,) = server.handle(Join(worker=worker, clock=clock))
            assert isinstance(answer, JoinAck)
            self.joined_clock = answer.clock

    def request(
        self, operation: Operation, messages: Sequence[Any], finish: Callable[[list[Any]], T]
    ) -> Pending[T]:
        self.sent.append((operation, list(messages)))
        answers = []
        for server, message in zip(self.servers, messages, strict=True):
            (answer,) = server.handle(self._unpacked(server, message))
            self._fill(message, answer)
            answers.append(answer)
        return Arrived(finish(answers))

    def _unpacked(self, server: ParameterServer, message: Any) -> Any:
        if not isinstance(message, Push) or not message.codec:
            return message
        update = [torch.empty_like(weight) for weight in server.shard.weights]
        decode(self.half.push_codecs[message.codec - 1], message.update, update)
        return Push(worker=message.worker, clock=message.clock, update=update)

    def _fill(self, message: Any, answer: Any) -> None:
        if isinstance(answer, PullReply):
            packed = self.half.pull_codec is not None and message.clock is not None
            tensors = answer.weights
            if packed:
                assert self.half.pull_codec is not None
                tensors = allocate(self.half.pull_codec, answer.weights)
                encode(self.half.pull_codec, answer.weights, tensors, 0, residual=False)
            torch._foreach_copy_(message.into, tensors)
        elif isinstance(message, Save):
            torch._foreach_copy_(message.into, answer.tensors)


def connected(
    half: ServerHalf, weights: Tensors, worker: int = 0, **more: Any
) -> tuple[ServerClient, Direct]:
    transport = Direct(half, [weight.clone() for weight in weights], more.pop("spec", None))
    transport.join(worker)
    ledger = Ledger(worker, lambda: 0.0)
    ledger.start()
    return ServerClient(transport, half, ledger, worker=worker, world=2, weights=weights, **more), transport


def a_half(strategy: Any) -> ServerHalf:
    half: ServerHalf = strategy.server_half()
    return half


def test_what_is_pushed_is_added_to_the_slices_of_all_shards_and_pulled_whole() -> None:
    weights = [torch.arange(7.0), torch.arange(2.0, dtype=torch.float64)]
    client, transport = connected(a_half(ASP()), weights)
    update = [torch.full((7,), 0.5), torch.ones(2, dtype=torch.float64)]
    assert block_on(_awaited(client.push(update, 1))) is True
    pulled = [torch.empty(7), torch.empty(2, dtype=torch.float64)]
    assert block_on(_awaited(client.pull(pulled, 1))) == (0, 0)
    for one, weight, change in zip(pulled, weights, update, strict=True):
        assert torch.equal(one, weight + change)
    assert [operation for operation, _ in transport.sent] == [("push", "1"), ("pull", "1")]


def test_tensors_elsewhere_are_cut_anew() -> None:
    """The slices of the latest push and pull are kept: for the same memory, and no other."""
    client, transport = connected(a_half(ASP()), [torch.zeros(6)])
    update, into = torch.zeros(6), torch.empty(6)
    for clock in (1, 2):
        update.fill_(clock)
        client.push([update], clock)
        client.pull([into], clock)
    update.data = torch.full((6,), 3.0)  # the same tensor, with other memory
    client.push([update], 3)
    client.pull([elsewhere := torch.empty(6)], 3)
    assert into.tolist() == [3.0] * 6
    assert elsewhere.tolist() == [6.0] * 6
    kept, again, anew = (messages for (kind, _), messages in transport.sent if kind == "push")
    assert all(one.update is other.update for one, other in zip(kept, again, strict=True))
    assert all(one.update is not other.update for one, other in zip(kept, anew, strict=True))


async def _awaited(pending: Pending[T]) -> T:
    return await pending


def test_the_strategys_clock_is_shifted_to_the_servers() -> None:
    """The slowest worker stood at 40 when this one joined: its first push is the server's 41st."""
    client, transport = connected(a_half(SSP(staleness=2)), [torch.zeros(6)])
    transport.join(0, clock=40)
    client.push([torch.ones(6)], 1)
    client.pull([torch.empty(6)], 2)
    client.pull([torch.empty(6)], None)
    clocks = [message.clock for _, messages in transport.sent for message in messages]
    assert clocks == [41] * SHARDS + [42] * SHARDS + [None] * SHARDS
    client.rejoin()
    transport.join(0, clock=90)
    client.pull([torch.empty(6)], 5)
    client.push([torch.ones(6)], 6)
    clocks = [message.clock for _, messages in transport.sent[-2:] for message in messages]
    assert clocks == [90] * SHARDS + [91] * SHARDS


def test_a_push_that_some_shard_refuses_counts_as_refused_once() -> None:
    client, transport = connected(a_half(ASP()), [torch.zeros(6)])
    bad = torch.ones(6)
    bad[5] = torch.nan
    assert client.push([bad], 1).result() is False
    assert client.push([torch.ones(6)], 2).result() is True
    assert client._ledger.totals().refused == 1
    assert [server.refused for server in transport.servers] == [{}, {}, {0: 1}]


def test_staleness_is_the_largest_of_all_shards_and_kept_in_the_ledger() -> None:
    client, transport = connected(a_half(ASP()), [torch.zeros(6)])
    for server in transport.servers:
        server.handle(Join(worker=1))
    for clock in (1, 2, 3):
        client.push([torch.ones(6)], clock)
    assert client.pull([torch.empty(6)], 3).result().staleness == 3
    assert client.pull([torch.empty(6)], None).result().staleness == 0
    assert client._ledger.totals().staleness_max == 3


def test_a_push_codec_sends_packets_and_leaves_the_rest_in_the_update() -> None:
    client, transport = connected(a_half(ASP(codec=TopK(0.5))), [torch.zeros(12)])
    update = torch.arange(12.0)
    client.push([update], 1, codec=1)
    for message in transport.sent[0][1]:
        assert message.update[0].dtype == torch.uint8
    held = [torch.empty(12)]
    client.pull(held, None)
    assert torch.equal(held[0] + update, torch.arange(12.0)), "what was sent and what is left"
    assert held[0].count_nonzero() == 6


def test_a_pull_codec_packs_what_workers_go_on_with_and_not_what_they_evaluate() -> None:
    half = ServerHalf(rule=ASP().rule(), pull_codec=Half())
    exact = torch.full((6,), 1.0001)
    client, _ = connected(half, [exact])
    coded, read = [torch.empty(6)], [torch.empty(6)]
    client.push([torch.zeros(6)], 1)
    client.pull(coded, 1)
    client.pull(read, None)
    assert torch.equal(read[0], exact)
    assert torch.equal(coded[0], exact.half().float()) and not torch.equal(coded[0], exact)


def test_what_was_saved_is_loaded_again_with_the_state_of_the_optimizer() -> None:
    model = nn.Linear(5, 3)
    replica = Replica(model, optimizer=SGD(model.parameters(), lr=0.1, momentum=0.9))
    spec, half = spec_of(replica), a_half(SSP(push="gradient"))
    options = {"spec": spec, "state_parts": len(spec.state_names())}
    client, _ = connected(half, replica.weights, **options)
    gradient = [torch.ones_like(weight) for weight in replica.weights]
    report = (*replica.optimizer.learning_rates, *[1.0] * spec.marks)
    client.push([each.clone() for each in gradient], 1, report=report)
    saved = block_on(client.save())
    assert len(saved) == 2 * len(replica.weights)
    assert saved[1].any(), "the momentum"
    other, transport = connected(half, replica.weights, **options)
    block_on(other.load(saved))
    parts = [m.part for _, messages in transport.sent for m in messages if isinstance(m, Load)]
    assert parts == [0] * SHARDS + [1] * SHARDS
    client.push([each.clone() for each in gradient], 2, report=report)
    other.push([each.clone() for each in gradient], 1, report=report)
    assert all(map(torch.equal, block_on(client.save()), block_on(other.save())))


def test_weights_that_are_not_finite_are_loaded_nowhere() -> None:
    client, transport = connected(a_half(ASP()), [torch.zeros(6)])
    with pytest.raises(OffbeatError, match="not finite: a server does not accept them"):
        block_on(client.load([torch.full((6,), torch.nan)]))
    assert transport.sent == []


def test_a_worker_alone_reduces_nothing() -> None:
    half = a_half(ASP())
    transport = Direct(half, [torch.zeros(6)])
    client = ServerClient(
        transport, half, Ledger(0, lambda: 0.0), worker=0, world=1, weights=[torch.zeros(6)]
    )
    tensor = torch.ones(4)
    assert client.all_reduce(tensor).result() is tensor
    assert transport.sent == []


def test_a_worker_most_of_whose_updates_are_refused_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [torch.zeros(6)]
    direct = Direct(ASP().server_half(), weights)
    direct.join(0)
    half = ASP().server_half()
    client = ServerClient(direct, half, Ledger(0, lambda: 0.0), worker=0, world=1, weights=weights)
    good, bad = [torch.zeros(6)], [torch.full((6,), torch.nan)]
    for clock in range(1, 101):
        client.push(bad if clock % 2 else good, clock)  # half of them: not yet most
    client.push(bad, 101)
    with pytest.raises(OffbeatError, match="the server refused 51 of this worker's last 100 updates"):
        client.push(bad, 102)
