"""The end of backward is found once, also where backward runs inside of backward, or fails."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offbeat.core.backward import EndOfBackward


class Watched:
    """Three layers that note when their gradients come and when backward ends."""

    def __init__(self) -> None:
        self.layers = [nn.Linear(4, 4) for _ in range(3)]
        self.seen: list[str] = []
        self.firsts: list[bool] = []
        end = EndOfBackward(self._end)
        for number, layer in enumerate(self.layers):

            def note(_: Tensor, number: int = number) -> None:
                self.firsts.append(end.expect())
                self.seen.append(str(number))

            layer.weight.register_post_accumulate_grad_hook(note)

    def _end(self) -> None:
        self.seen.append("end")

    def __call__(self, x: Tensor, *numbers: int) -> Tensor:
        for number in numbers:
            x = self.layers[number](x)
        return x


def reentrant(function: object, *args: object) -> Tensor:
    result: Tensor = checkpoint(function, *args, use_reentrant=True)  # type: ignore[arg-type]
    return result


@pytest.mark.parametrize("shape", ["plain", "inner", "all", "nested", "last"])
def test_end_comes_once_and_last(shape: str) -> None:
    net = Watched()
    x = torch.ones(2, 4, requires_grad=True)
    outputs = {
        "plain": lambda: net(x, 0, 1, 2),
        "inner": lambda: net(reentrant(net, net(x, 0), 1), 2),
        "all": lambda: reentrant(net, reentrant(net, reentrant(net, x, 0), 1), 2),
        "nested": lambda: reentrant(lambda z: net(reentrant(net, z, 0, 1), 2), x),
        "last": lambda: net(reentrant(net, x, 0), 1, 2),
    }
    for _ in range(3):
        net.seen.clear()
        net.firsts.clear()
        outputs[shape]().sum().backward()
        assert net.seen == ["2", "1", "0", "end"]
        assert net.firsts == [True, False, False]


def test_after_a_backward_that_failed() -> None:
    net = Watched()
    x = torch.ones(2, 4)

    def fail(grad: Tensor) -> None:
        raise MemoryError

    hidden = net(x, 0)
    hidden.register_hook(fail)
    with pytest.raises(MemoryError):
        net(hidden, 1, 2).sum().backward()
    assert net.seen == ["2", "1"]
    net.firsts.clear()
    net(x, 0, 1, 2).sum().backward()
    assert net.seen == ["2", "1", "2", "1", "0", "end"]
    assert net.firsts == [True, False, False]
