"""Ebbtide behind Stitch's Engine port: what a replica's sidecar asks of the server next to it."""

from __future__ import annotations

from typing import Any

from ebbtide_versions import VersionedEngine, say_versions
from stitch.engines.base import Engine


class EbbtideEngine(VersionedEngine, Engine):  # type: ignore[misc]
    """`stage`, `commit`, `pause` and the others are those of `VersionedEngine`."""

    def stamp_request(self, request: dict[str, Any], served: Any) -> None:
        """Share cached prefixes among requests of one version of one run only."""
        given = request.get("extra_key")
        keys = given if isinstance(given, list) else [given]
        stamped = [f"{served.identity}:{key or ''}" for key in keys]
        request["extra_key"] = stamped if isinstance(given, list) else stamped[0]

    def stamp_response(self, response: dict[str, Any], served: Any, current: Any) -> None:
        """Say which versions sampled it: as the engine's spans have it, or else as Stitch's gate does."""
        say_versions(response, (served.version, current.version))
