"""Replies: copies as of the moment, one copy for all who read the same, and one operation for all shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offbeat import Half
from offbeat.server.messages import PullReply, PushAck, ReduceReply, SaveReply, Tensors
from offbeat.server.packets import decode
from offbeat.worlds.virtual.replies import Reply, copies_of, copy_tensors

pytestmark = pytest.mark.virtual


def reply_of(answer: Any, shard: int = 0) -> Reply:
    request: Any = None
    return Reply(request, shard, answer)


def pulled(weights: Tensors, worker: int = 0, **more: Any) -> Reply:
    return reply_of(PullReply(worker=worker, weights=weights, **more))


def test_a_copy_is_of_the_moment() -> None:
    weights = [torch.arange(3.0), torch.arange(2.0, dtype=torch.float64)]
    total = torch.ones(4)
    replies = [pulled(weights), reply_of(ReduceReply(worker=0, number=1, tensor=total))]
    copy_tensors(replies, None)
    for tensor in (*weights, total):
        tensor.fill_(9.0)
    assert [copy.tolist() for copy in replies[0].copies] == [[0.0, 1.0, 2.0], [0.0, 1.0]]
    assert [copy.dtype for copy in replies[0].copies] == [torch.float32, torch.float64]
    assert replies[1].copies[0].tolist() == [1.0] * 4


def test_who_reads_the_same_weights_shares_a_copy_and_others_have_their_own() -> None:
    one, two = [torch.zeros(3)], [torch.ones(2)]
    replies = [pulled(one, 0), pulled(two, 1), pulled(one, 2)]
    copy_tensors(replies, None)
    assert replies[0].copies[0] is replies[2].copies[0]
    assert [reply.copies[0].tolist() for reply in replies] == [[0.0] * 3, [1.0] * 2, [0.0] * 3]


def test_all_shards_are_copied_by_one_operation_into_one_piece_of_memory() -> None:
    lists = [[torch.full((n,), float(n)), torch.zeros(0)] for n in (3, 1, 2)]
    copies = copies_of(lists)
    assert [[part.tolist() for part in each] for each in copies] == [[[float(n)] * n, []] for n in (3, 1, 2)]
    assert len({part.untyped_storage().data_ptr() for each in copies for part in each}) == 1
    assert copies_of([]) == []


def test_weights_to_train_on_are_encoded_and_others_are_not() -> None:
    weights = [torch.tensor([0.1, 2.0])]
    training, evaluation = pulled(weights), pulled(weights, for_evaluation=True)
    copy_tensors([training, evaluation], Half())
    into = [torch.empty(2)]
    decode(Half(), training.copies, into)
    assert torch.equal(into[0], weights[0].half().float())
    assert torch.equal(evaluation.copies[0], weights[0])


def test_what_is_a_copy_already_and_what_has_no_tensors_stay_as_they_are() -> None:
    saved = [torch.ones(2)]
    replies = [reply_of(SaveReply(worker=0, part=1, tensors=saved)), reply_of(PushAck(worker=0, clock=1))]
    copy_tensors(replies, None)
    assert replies[0].copies is saved
    assert replies[1].copies == []
