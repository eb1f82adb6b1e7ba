"""An implementation of Stitch's `Engine` interface, by which a replica's sidecar controls its server."""

from __future__ import annotations

from typing import Any

from ebbtide_versions import VersionedEngine, say_versions
from stitch.engines.base import Engine


class EbbtideEngine(VersionedEngine, Engine):  # type: ignore[misc]
    """Stitch's interface to an Ebbtide server. Most methods are those of `VersionedEngine`."""

    def stamp_request(self, request: dict[str, Any], served: Any) -> None:
        """Set `extra_key` so that only requests of the same version and run share cached prefixes."""
        given = request.get("extra_key")
        keys = given if isinstance(given, list) else [given]
        stamped = [f"{served.identity}:{key or ''}" for key in keys]
        request["extra_key"] = stamped if isinstance(given, list) else stamped[0]

    def stamp_response(self, response: dict[str, Any], served: Any, current: Any) -> None:
        """Write the versions that sampled a response into it: the engine's, or else those of Stitch."""
        say_versions(response, (served.version, current.version))
