"""Groups that weights are broadcast in: joining and leaving, while the loop goes on.

Source: wire_api section 3.3.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Final

from ebbtide.srt.managers.control.ports import HandlerTable, Operation, Progress, Weights
from ebbtide.srt.managers.io_struct import (
    DestroyWeightsUpdateGroupReqInput,
    InitWeightsUpdateGroupReqInput,
    WeightsUpdateGroupReqOutput,
)

WAKEUP: Final = "weight-arrivals"
# Short waits first: what comes at once is not held up. A loop that sleeps is to stay almost idle.
FIRST_LOOKS_S: Final = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
LOOK_S: Final = 32e-3


class Wakeups:
    """Turns of the loop for operations that wait for what sends it no message."""

    def __init__(self, set_deadline: Callable[[str, float], None]) -> None:
        self._set_deadline = set_deadline
        self._is_set = False

    def until(self, is_done: Callable[[], bool]) -> Iterator[Progress]:
        """Wait, looking now and then."""
        waits_s = itertools.chain(FIRST_LOOKS_S, itertools.repeat(LOOK_S))
        while not is_done():
            if not self._is_set:
                self._set_deadline(WAKEUP, next(waits_s))
                self._is_set = True
            yield Progress.WAITING

    def expire(self, deadline_id: str) -> None:
        """A deadline has passed; ours is over then."""
        if deadline_id == WAKEUP:
            self._is_set = False


class GroupRequests:
    """The control requests about groups."""

    def __init__(self, weights: Weights, wakeups: Wakeups) -> None:
        self._weights = weights
        self._wakeups = wakeups
        self.handlers: HandlerTable = {
            InitWeightsUpdateGroupReqInput: self.init,
            DestroyWeightsUpdateGroupReqInput: self.destroy,
        }

    def init(self, request: InitWeightsUpdateGroupReqInput) -> Operation:
        """Join a group; a live one of that name is left first."""
        with closing(self._weights.join_group(request)) as joining:
            yield from self._wakeups.until(joining.poll)
        message = f"Joined the group {request.group_name}."
        return WeightsUpdateGroupReqOutput(changed=True, replaced=joining.replaced, message=message)

    def destroy(self, request: DestroyWeightsUpdateGroupReqInput) -> Operation:
        """Leave a group; what waits for broadcasts in it is refused."""
        has_left = self._weights.leave_group(request.group_name)
        if has_left is None:
            message = f"There is no group {request.group_name}."
            return WeightsUpdateGroupReqOutput(changed=False, message=message)
        yield from self._wakeups.until(has_left)
        return WeightsUpdateGroupReqOutput(changed=True, message=f"Left the group {request.group_name}.")
