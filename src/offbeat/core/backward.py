"""The end of a running `backward()`, reported by autograd's own engine.

Reentrant checkpointing runs a backward inside another backward. The end of the inner backward is not the end
of the outer one: the callback is then passed to the outer backward, through the node that runs next there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import Variable


class EndOfBackward:
    """A callback at the end of each backward in which `expect` was called.

    The callback is a method, held weakly: its object holds this one, and a cycle would keep the model alive.
    """

    def __init__(self, callback: Callable[[], None], after_others: bool = False) -> None:
        self._callback = weakref.WeakMethod(callback)
        self.after_others = after_others  # run behind callbacks that others queue until backward ends
        # Only the engine has a strong reference: a failed backward deletes the call, and `expect` sees that.
        self._call: weakref.ref[_Call] | None = None

    def expect(self) -> bool:
        """Request the callback from a hook inside backward; return whether this is its first request."""
        if self._call is not None and self._call() is not None:
            return False
        call = _Call(self)
        self._call = weakref.ref(call)
        Variable._execution_engine.queue_callback(call)
        return True

    def finish(self) -> None:
        """Run the callback, when the engine has finished the outermost backward."""
        self._call = None
        callback = self._callback()
        if callback is not None:
            callback()


class _Call:
    def __init__(self, end: EndOfBackward) -> None:
        self._end = end
        self._waits = end.after_others

    def __call__(self) -> None:
        outer = torch._C._current_autograd_node()
        if outer is None and self._waits:
            self._waits = False
            Variable._execution_engine.queue_callback(self)
        elif outer is None:
            self._end.finish()
        else:
            self._pass_to_outer(next(node for node, _ in outer.next_functions if node is not None))

    def _pass_to_outer(self, node: torch.autograd.graph.Node) -> None:
        def before(_: tuple[Tensor, ...]) -> None:
            handle.remove()
            Variable._execution_engine.queue_callback(self)

        handle = node.register_prehook(before)


def inside_backward() -> bool:
    """Return whether autograd is computing gradients on this thread."""
    return bool(torch._C._current_graph_task_id() >= 0)
