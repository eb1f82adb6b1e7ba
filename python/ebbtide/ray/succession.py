"""How a new replica of a fleet comes to serve what the others serve."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ebbtide.ray.errors import ActorDied
from ebbtide.ray.replica import Replica
from ebbtide.srt.errors import EngineError, RequestRejected

logger = logging.getLogger(__name__)


async def bring_up_to_date(replica: Replica, living: Sequence[Replica]) -> str:
    """Give a new replica the weights of a living one, and bring it into the same state.

    Updates have to wait meanwhile: that is the caller's affair.

    Returns:
        What it has to wait for; empty: nothing, it is done.

    Raises:
        EngineError: nobody lives, or the new replica has died, or holds other weights in spite of it all.
    """
    if not living:
        raise EngineError("no replica is left to take the weights from")
    peer = min(living, key=lambda one: one.num_live)
    try:
        state = await peer.ask("server_info")
        weights = state["state"]["tags"]["weights"]
        if state["weight_update"]["session_open"]:
            return "a weight update session is open"
        if weights["state"] != "resident":
            return f"the weights of {peer.name} are {weights['state']}"
        if weights.get("content", "valid") != "valid":
            return f"the weights of {peer.name} are {weights['content']}"
        version = (await peer.ask("model_info"))["weight_version"]
        began_s = time.monotonic()
        # A replica at work reads its weights for the checksum piece by piece, beside its forward passes: that
        # takes long, and need not wait for the transfer.
        num_bytes, theirs = await asyncio.gather(
            replica.call("take_weights", peer.engine.actor, version), peer.ask("check_weights")
        )
        logger.info(
            "%s has the weights of %s: bytes=%s s=%.1f",
            *(replica.name, peer.name, num_bytes, time.monotonic() - began_s),
        )
        mine = await replica.ask("check_weights")
        await _imitate(replica, state["state"])
    except ActorDied:
        if peer.engine is not replica.engine and await _lives(replica):
            return f"{peer.name}, which was to give its weights, has died"
        raise
    except RequestRejected as error:
        return f"it cannot take the weights of {peer.name} now: {error}"
    if mine["per_engine_checksum"] != theirs["per_engine_checksum"]:
        raise EngineError(f"{replica.name} holds other weights than {peer.name} after taking them")
    return ""


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
