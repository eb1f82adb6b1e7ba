"""What Ray says of a failed call, as the errors that `Engine` raises."""

from __future__ import annotations

from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from ebbtide.srt.errors import EbbtideError, EngineError


class ActorDied(EngineError):
    """An actor of the engine has ended, and its processes with it. The message names it."""


def translated(error: RayError, who: str) -> Exception:
    """What a call raised, out of Ray's wrapping.

    `who`: the engine or the part of it that was called, for messages.
    """
    if isinstance(error, RayTaskError):
        cause = error.cause
        # What is not ours keeps Ray's traceback, which shows where in the actor it was raised.
        return cause if isinstance(cause, EbbtideError | TypeError) else error
    if isinstance(error, RayActorError):
        return ActorDied(f"{who} has died: {_reason(error)}")
    if isinstance(error, GetTimeoutError):
        return EngineError(f"{who} did not answer in time")
    return EngineError(f"{who}: {type(error).__name__}: {error}")


def _reason(error: RayActorError) -> str:
    """What of several lines says why, without what Ray guesses."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("The actor is dead because")]
    line = (causes or lines or [type(error).__name__])[-1 if causes else 0]
    return line.partition(" Some common causes")[0]
