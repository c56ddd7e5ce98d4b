"""Order of hooks: ours run after all others, also after those that the loop registers later.

A hook that changes a gradient, or clips just before the optimizer steps, must have run before a strategy
takes the gradient: else it would change what is being sent, or what was read already.
"""

from __future__ import annotations

from typing import Any

from torch.utils.hooks import RemovableHandle


class LastHooks:
    """Hooks that stay the last ones of their objects."""

    def __init__(self) -> None:
        self._entries: list[tuple[dict[int, Any], int]] = []
        self._registered = -1  # hooks of this process when all of these were last

    def add(self, hooks: Any, handle: RemovableHandle) -> RemovableHandle:
        """Keep the hook of this handle the last of `hooks`; return the handle."""
        self._entries.append((hooks, handle.id))
        return handle

    def keep_last(self, running: Any = None) -> bool:
        """Move each hook to the end, except those of `running`, which are being called.

        Return whether all are last now. As long as nobody registers any hook, this looks at one number.
        """
        if RemovableHandle.next_id == self._registered:
            return True
        all_last = True
        for hooks, number in self._entries:
            if next(reversed(hooks)) == number:
                continue
            if hooks is running:
                all_last = False
            else:
                # Unlike move_to_end(), this changes the order that autograd sees.
                hooks[number] = hooks.pop(number)
        if all_last:
            self._registered = RemovableHandle.next_id
        return all_last
