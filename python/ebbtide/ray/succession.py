"""How a new replica of a fleet comes to serve what the others serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ebbtide.ray.errors import ActorDied
from ebbtide.ray.replica import Replica
from ebbtide.srt.errors import EngineError, RequestRejected

logger = logging.getLogger(__name__)


async def bring_up_to_date(replica: Replica, living: Sequence[Replica]) -> bool:
    """Give a new replica the weights of a living one, and bring it into the same state.

    Updates have to wait meanwhile: that is the caller's affair.

    Returns:
        Whether that was possible; it may be a moment later.

    Raises:
        EngineError: nobody lives, or the new replica has died, or holds other weights in spite of it all.
    """
    if not living:
        raise EngineError("no replica is left to take the weights from")
    peer = min(living, key=lambda one: one.num_live)
    try:
        state = await peer.ask("server_info")
        weights = state["state"]["tags"]["weights"]
        if state["weight_update"]["session_open"] or weights["state"] != "resident":
            return False
        if weights.get("content", "valid") != "valid":
            return False
        version = (await peer.ask("model_info"))["weight_version"]
        await replica.call("take_weights", peer.engine.actor, version)
        mine, theirs = await asyncio.gather(replica.ask("check_weights"), peer.ask("check_weights"))
        await _imitate(replica, state["state"])
    except ActorDied:
        if peer.engine is not replica.engine and await _lives(replica):
            return False
        raise
    except RequestRejected as error:
        logger.warning("%s waits for the weights of %s: %s", replica.name, peer.name, error)
        return False
    if mine["per_engine_checksum"] != theirs["per_engine_checksum"]:
        raise EngineError(f"{replica.name} holds other weights than {peer.name} after taking them")
    return True


async def _imitate(replica: Replica, state: Mapping[str, Any]) -> None:
    """Pause and release what the others have paused and released."""
    released = [tag for tag, report in state["tags"].items() if report["state"] == "released"]
    if released:
        await replica.ask("release_memory_occupation", released)
    if state["generation"]["state"] == "paused":
        await replica.ask("pause_generation", state["generation"]["mode"])


async def _lives(replica: Replica) -> bool:
    try:
        await replica.ask("model_info")
    except EngineError:
        return False
    return True
