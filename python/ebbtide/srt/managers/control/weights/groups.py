"""Groups that weights are broadcast in: joining and leaving, while the loop goes on.

Source: wire_api section 3.3.
"""

from __future__ import annotations

from contextlib import ExitStack, closing

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.control.pace import Wake, look_until
from ebbtide.srt.managers.control.ports import Activity, DeadlinePassed, HandlerTable, Operation, Ranks, Work
from ebbtide.srt.managers.control.weight_ports import Weights
from ebbtide.srt.managers.io_struct import (
    DestroyWeightsUpdateGroupReqInput,
    InitWeightsUpdateGroupReqInput,
    WeightsUpdateGroupReqOutput,
)


class GroupRequests:
    """The control requests about groups. All ranks join, or none; all leave."""

    def __init__(self, weights: Weights, ranks: Ranks, wake: Wake) -> None:
        self._weights = weights
        self._ranks = ranks
        self._wake = wake
        self.handlers: HandlerTable = {
            InitWeightsUpdateGroupReqInput: self.init,
            DestroyWeightsUpdateGroupReqInput: self.destroy,
        }

    def init(self, request: InitWeightsUpdateGroupReqInput) -> Operation:
        """Join a group; a live one of that name is left first."""
        with ExitStack() as if_refused:
            try:
                replaced = yield from self._on_all_ranks(self._join(request, if_refused))
            except EngineError as error:
                raise RequestRejected(f"the group {request.group_name} was not joined: {error}") from error
            if_refused.pop_all()
        message = f"Joined the group {request.group_name}."
        return WeightsUpdateGroupReqOutput(changed=True, replaced=replaced, message=message)

    def destroy(self, request: DestroyWeightsUpdateGroupReqInput) -> Operation:
        """Leave a group; what waits for broadcasts in it is refused."""
        was_there = yield from self._on_all_ranks(self._leave(request.group_name))
        if not was_there:
            message = f"There is no group {request.group_name}."
            return WeightsUpdateGroupReqOutput(changed=False, message=message)
        return WeightsUpdateGroupReqOutput(changed=True, message=f"Left the group {request.group_name}.")

    def _on_all_ranks(self, work: Work[bool]) -> Work[bool]:
        """Whether it was so on any of them."""
        try:
            _, answers = yield from self._ranks.survey(Activity.WAITING, work, bool)
        except DeadlinePassed:
            raise EngineError("not every rank was done with it in time") from None
        return any(answers)

    def _join(self, request: InitWeightsUpdateGroupReqInput, if_refused: ExitStack) -> Work[bool]:
        with closing(self._weights.join_group(request)) as joining:
            yield from look_until(joining.poll, self._wake)
        if_refused.callback(self._weights.leave_group, request.group_name)
        return joining.replaced

    def _leave(self, name: str) -> Work[bool]:
        has_left = self._weights.leave_group(name)
        if has_left is None:
            return False
        yield from look_until(has_left, self._wake)
        return True
