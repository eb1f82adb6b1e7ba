"""Translates Ray's errors of failed calls to those that `Engine` raises."""

from __future__ import annotations

from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from ebbtide.srt.errors import EbbtideError, EngineError


class ActorDied(EngineError):
    """An actor of an engine has died, and its processes with it. The message names the actor."""


def translated(error: RayError, who: str) -> Exception:
    """The error that a call raised in an actor, or an `EngineError` about Ray's own failure.

    Args:
        who: names what was called, for messages.
    """
    if isinstance(error, RayTaskError):
        cause = error.cause
        # Other errors stay Ray's, whose traceback shows where in the actor they were raised.
        return cause if isinstance(cause, EbbtideError | TypeError) else error
    if isinstance(error, RayActorError):
        return ActorDied(f"{who} has died: {_reason(error)}")
    if isinstance(error, GetTimeoutError):
        return EngineError(f"{who} did not answer in time")
    return EngineError(f"{who}: {type(error).__name__}: {error}")


def _reason(error: RayActorError) -> str:
    """The line of Ray's message that says why the actor died, without Ray's list of common causes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("The actor is dead because")]
    line = (causes or lines or [type(error).__name__])[-1 if causes else 0]
    return line.partition(" Some common causes")[0]
