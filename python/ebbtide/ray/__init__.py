"""Engines and fleets of engines as Ray actors. Needs the extra `ray`; nothing else imports this."""

from __future__ import annotations

try:
    import ray as _ray
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise ModuleNotFoundError(
        "ebbtide.ray needs Ray, which is not installed: pip install 'ebbtide[ray]'", name="ray"
    ) from None

from ebbtide.ray.engine import RayEngine
from ebbtide.ray.errors import ActorDied
from ebbtide.ray.fleet import RayFleet

__all__ = ["ActorDied", "RayEngine", "RayFleet"]
del _ray
