"""What a session was to be brought, and has not: it is committed only on demand then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from ebbtide.srt.errors import RequestRejected, first_few
from ebbtide.srt.managers.control.weight_ports import IncomingWeights

# How many names, or refusals, the fields of an answer list at most.
MAX_TOLD: Final = 10


@dataclass
class _Refused:
    """An update that was refused.

    Attributes:
        names: what it was to write and nobody has written since; None: not even its names could be read.
    """

    reason: str
    names: frozenset[str] | None

    def make_up(self, names: frozenset[str]) -> None:
        """These were written."""
        if self.names is not None:
            self.names -= names

    @property
    def told(self) -> dict[str, Any]:
        names = None if self.names is None else sorted(self.names)[:MAX_TOLD]
        return {"message": self.reason, "names": names}


class Lacking:
    """Updates of a session that were refused, until others have written all that these were to write, and
    halves of tensors that came without the other."""

    def __init__(self) -> None:
        self._refused: list[_Refused] = []
        # Tensors whose weight needs a second one, which has not come, and the name of that one.
        self._halves: dict[str, str] = {}

    def note_refused(self, reason: str, names: frozenset[str] | None) -> None:
        """An update was refused that was to write these names; None: nobody knows which."""
        self._refused.append(_Refused(reason, names))

    def require_nothing(self) -> None:
        """Refuse to commit half of what was sent."""
        if self._halves:
            lacking = sorted(set(self._halves.values()))
            raise RequestRejected(
                f"the session is incomplete: {len(lacking)} tensors that belong to others of 8 bits did not "
                f"come: {first_few(lacking)}. Send them, or abort_weight_update; allow_incomplete "
                "leaves these weights as they were",
                409,
            )
        left = [refused for refused in self._refused if refused.names != frozenset()]
        if left:
            can_be_made_up = all(refused.names is not None for refused in left)
            remedy = "Send it, or" if can_be_made_up else "Not all of their names could be read:"
            raise RequestRejected(
                f"the session is incomplete: refused were {len(left)} of its updates, and what they were to "
                f"write was not sent again: {first_few([refused.reason for refused in left], '; ')}. "
                f"{remedy} abort_weight_update; allow_incomplete commits what there is",
                409,
                refusals=[refused.told for refused in left[:MAX_TOLD]],
                num_refusals=len(left),
            )

    def forget(self, incoming: IncomingWeights) -> None:
        """Forget that these halves came: they are being written anew."""
        for half in incoming.halves:
            self._halves.pop(half, None)

    def note_written(self, incoming: IncomingWeights) -> frozenset[str]:
        """It was written whole; returns the weights whose second half has come."""
        for refused in self._refused:
            refused.make_up(incoming.sent | incoming.names)
        joined = set()
        for half, (other, weight) in incoming.halves.items():
            if self._halves.pop(other, None) is None:
                self._halves[half] = other
            else:
                joined.add(weight)
        for half, other in list(self._halves.items()):
            if half in incoming.names or other in incoming.names:
                del self._halves[half]
        return frozenset(joined)
