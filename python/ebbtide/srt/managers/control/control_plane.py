"""The control plane: takes each control request to its handler, and says whether forward passes may run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from msgspec import structs

from ebbtide.srt.managers.control import HandlerTable, Operation, OutOfStep
from ebbtide.srt.managers.control.adapter_loads import AdapterLoads
from ebbtide.srt.managers.control.memory_occupation import MemoryOccupation
from ebbtide.srt.managers.control.operations import Operations, refusal
from ebbtide.srt.managers.control.pace import Ranks, Stall
from ebbtide.srt.managers.control.pause import Generation
from ebbtide.srt.managers.control.weights.update import WeightUpdates
from ebbtide.srt.managers.io_struct import (
    AnyControlRequest,
    AnyReply,
    ControlCall,
    PauseMode,
    PingReqInput,
    PingReqOutput,
    RankReport,
    StateReport,
    Verdict,
)
from ebbtide.srt.managers.wire.control_request import Deadline
from ebbtide.srt.memory_saver import MemoryTag

# How much longer than its deadline a prepared update waits for the verdict of the replicas. After that, no
# request runs until the verdict comes. By then all replicas have answered.
VERDICT_GRACE_S: Final = 10.0


@dataclass
class ControlPlane:
    """Applies control requests between forward passes, and says whether a forward pass may run.

    Args:
        others: further handler tables. All tables together cover every control request exactly once.
        rank: this rank as the reported state names it; its tags are filled in.
    """

    generation: Generation
    memory: MemoryOccupation
    updates: WeightUpdates
    adapters: AdapterLoads
    operations: Operations
    ranks: Ranks
    others: Sequence[HandlerTable]
    _rank: RankReport
    _weight_groups: Callable[[], list[str]]
    _reply: Callable[[str, AnyReply], None]
    _set_deadline: Callable[[str, float], None]

    def __post_init__(self) -> None:
        self._held: deque[ControlCall | Verdict] = deque()
        self.handlers: dict[type, Callable[[Any], AnyReply | Operation]] = {
            PingReqInput: lambda request: PingReqOutput()
        }
        own = (self.generation, self.memory, self.updates, self.adapters)
        for table in (*(machine.handlers for machine in own), *self.others):
            assert not self.handlers.keys() & table.keys()
            self.handlers.update(table)

    @property
    def can_run(self) -> bool:
        """Whether the state machines allow forward passes."""
        is_held = self.paused is not None or self.operations.is_fenced
        return not is_held and self.memory.allows_forward

    @property
    def allows_forward(self) -> bool:
        """Whether a forward pass may run now."""
        return self.can_run and not self.operations.stands_alone

    @property
    def any_pending(self) -> bool:
        """Whether there is anything to advance."""
        return self.operations.any_pending or bool(self._held)

    def apply(self, message: ControlCall | Verdict, settle: Callable[[], None]) -> None:
        """Carry a request out, or a verdict on one, in the order in which they come.

        The reply is sent when the effect holds, now or after further `advance`s.
        """
        if self.operations.stands_alone or self._held:
            self._held.append(message)
        else:
            self._apply(message, settle)

    def _apply(self, message: ControlCall | Verdict, settle: Callable[[], None]) -> None:
        if isinstance(message, Verdict):
            self.operations.decide(message.id, message.refusal)
        else:
            self._start(message, settle)

    def _start(self, call: ControlCall, settle: Callable[[], None]) -> None:
        request, stall = call.request, Stall()
        outcome: AnyReply | Operation
        try:
            with stall.measure():
                outcome = self.handlers[type(request)](request)
        except OutOfStep:
            raise
        except Exception as error:
            outcome = refusal(request, error)
        if isinstance(outcome, Generator):
            self.operations.start(call.id, request, outcome, settle, is_joint=call.is_joint)
        else:
            self.operations.stalls.note(request, stall)
            self._reply(call.id, outcome)
        timeout_s = limit_s(request, self.updates.timeout_s)
        # Even if this rank is done, other ranks may not be: their answers have the same limit.
        is_awaited = self.operations.is_pending(call.id) or not self.ranks.is_one
        if timeout_s is not None and is_awaited:
            self._set_deadline(call.id, timeout_s)

    def advance(self, settle: Callable[[], None]) -> None:
        """Let the operations under way go on. When one that stood alone has ended, apply what came meanwhile.

        Args:
            settle: commits the forward pass under way, if there is one.
        """
        stood_alone = self.operations.stands_alone
        self.operations.advance(settle)
        if (stood_alone or self._held) and not self.operations.stands_alone:
            settle()
            while self._held and not self.operations.stands_alone:
                self._apply(self._held.popleft(), settle)
            self.operations.advance(settle)

    def expire(self, deadline_id: str) -> None:
        """Note that the deadline of a pending request or of an open session has passed."""
        if any(isinstance(held, Verdict) and held.id == deadline_id for held in self._held):
            return  # The verdict came in time, and is about to be applied.
        if self.operations.expire(deadline_id):
            self._set_deadline(deadline_id, VERDICT_GRACE_S)
        self.updates.expire(deadline_id)

    @property
    def paused(self) -> PauseMode | None:
        return self.generation.paused

    @property
    def reason(self) -> str:
        """Why no forward pass may run; empty when one may."""
        reasons = [f"paused({self.paused.value})"] if self.paused is not None else []
        reasons += [f"{tag.value} is released" for tag in self.memory.needed_but_released]
        missing = self.memory.content.missing
        if missing and MemoryTag.WEIGHTS not in self.memory.released:
            reasons.append(f"weights are stale: {len(missing)} parameters not written since resume")
        if self.operations.is_fenced:
            reasons.append("other replicas may serve an update that is ready here: its verdict has not come")
        return "; ".join(reasons)

    def report(self) -> StateReport:
        return StateReport(
            dp_rank=self._rank.dp_rank,
            paused=self.paused,
            can_run=self.can_run,
            reason=self.reason,
            ranks=[structs.replace(self._rank, tags=self.memory.report())],
            weight_version=self.updates.version,
            model_path=self.updates.model_path,
            load_format=self.updates.load_format,
            session=self.updates.report(),
            weight_groups=self._weight_groups(),
            adapters=self.adapters.book.reports,
        )


def limit_s(request: AnyControlRequest, update_timeout_s: float) -> float | None:
    """Seconds after which a pending request is refused; None: never."""
    row = request.row
    if row.deadline is Deadline.NEVER:
        return None
    own_s: float | None = getattr(request, "timeout_s", None)
    if own_s is None:
        return update_timeout_s if row.deadline is Deadline.UPDATE else None
    return own_s + row.grace_s
