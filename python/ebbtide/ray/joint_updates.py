"""Updates of a fleet: prepared by all replicas, then committed by all that live, or by none."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import ray

from ebbtide.ray.replica import Answers, Replica, dealt, gather
from ebbtide.srt.errors import EngineError

# What is committed by all at the same time. Within a session an update commits nothing, and its end does.
JOINT_METHODS: Final = frozenset(
    {
        "update_weights_from_tensor",
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_ipc",
        "end_weight_update",
    }
)
# What is prepared is committed at a boundary between two forward passes: that much later it hangs.
COMMIT_S: Final = 60.0
GIVEN_UP: Final = "Nothing was committed"
SESSION_ON_SOME: Final = "nothing was committed: a session is open on some replicas only"
TOO_LATE: Final = "it was told to commit, and did not within {seconds:g} s, as others did"


class JointUpdates:
    """Carries updates out, one after the other.

    Args:
        living: the replicas that live.
        num_replicas: how many there are in all, dead ones included.

    Attributes:
        lock: held while weights change, or must not.
        has_committed: whether the weights are others than at the start.
    """

    def __init__(self, living: Callable[[], list[Replica]], num_replicas: int) -> None:
        self.lock = asyncio.Lock()
        self.has_committed = False
        self._living = living
        self._num_replicas = num_replicas

    async def update(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Answers:
        """Prepare an update on all replicas, and commit it on those that live.

        Raises:
            RequestRejected, EngineError: some refused or failed, and are named; it is committed on none.
        """
        async with self.lock:
            call_id = uuid.uuid4().hex
            args, kwargs = await asyncio.to_thread(_shared, method, args, kwargs)
            prepared = await gather(
                {one: self._prepare(one, call_id, method, args, kwargs) for one in self._living()}
            )
            waiting = [one for one, reply in prepared.done.items() if reply is None]
            refusal = _refusal(prepared, waiting)
            if refusal is not None:
                await gather({one: _decide(one, call_id, refusal) for one in waiting})
                prepared.require_all_done(GIVEN_UP)
                raise EngineError(refusal)
            if not waiting:
                prepared.require_all_done()
                return prepared
            return await self._commit(call_id, waiting)

    async def _prepare(
        self, replica: Replica, call_id: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        own = [
            dealt(one, self._num_replicas, replica.slot) if self._is_for_all_ranks(replica, one) else one
            for one in args
        ]
        return await replica.call("prepare", call_id, method, own, dict(kwargs))

    def _is_for_all_ranks(self, replica: Replica, argument: Any) -> bool:
        """Whether these are serialized tensors with an entry for every rank of every replica."""
        if not isinstance(argument, list) or not all(isinstance(one, bytes | str) for one in argument):
            return False
        return len(argument) == self._num_replicas * replica.engine.num_ranks > replica.engine.num_ranks

    async def _commit(self, call_id: str, waiting: Sequence[Replica]) -> Answers:
        committed = await gather({one: _decide(one, call_id, None) for one in waiting})
        self.has_committed = self.has_committed or bool(committed.done)
        if committed.done:
            # Whoever did not do what the others did must not serve; another one takes its place.
            for one, error in committed.failed.items():
                one.die(str(error))
                committed.dead.append(one)
            committed.failed.clear()
        committed.require_all_done()
        return committed

    async def begin(self, ask_all: Callable[[], Any], abort_on: Callable[[Replica], Any]) -> Answers:
        """Open a session on all replicas, or on none."""
        async with self.lock:
            begun: Answers = await ask_all()
            if begun.failed:
                await gather({one: abort_on(one) for one in begun.done})
            begun.require_all_done("No session is open")
            return begun


async def _decide(replica: Replica, call_id: str, refusal: str | None) -> Any:
    try:
        async with asyncio.timeout(COMMIT_S):
            return await replica.call("decide", call_id, refusal)
    except TimeoutError:
        raise EngineError(TOO_LATE.format(seconds=COMMIT_S)) from None


def _refusal(prepared: Answers, waiting: Sequence[Replica]) -> str | None:
    """Why what is prepared must not be committed; None: it may."""
    if prepared.failed:
        return "other replicas have refused this"
    if waiting and len(waiting) < len(prepared.done):
        return SESSION_ON_SOME
    return None


def _shared(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments with tensors in Ray's store, once for all replicas. `named_tensors` becomes the first."""
    given, named = list(args), dict(kwargs)
    if method == "update_weights_from_tensor":
        tensors = given.pop(0) if given else named.pop("named_tensors")
        pairs = list(tensors)
        if all(isinstance(one, bytes | str) for one in pairs):
            given.insert(0, pairs)
        else:
            given.insert(0, ray.put([(name, _on_host(tensor)) for name, tensor in pairs]))
    return given, named


def _on_host(tensor: Any) -> Any:
    return tensor.detach().cpu() if hasattr(tensor, "detach") else tensor
