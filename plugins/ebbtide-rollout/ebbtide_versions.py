"""Published versions brought to one server of `ebbtide serve`.

A version is staged whole, checksums included, while the old one serves. A commit only swaps it in, so a pause
around it is one of milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ebbtide import Client
from ebbtide.srt.errors import EbbtideError
from ebbtide.srt.managers.io_struct import CONTROL_REQUESTS
from ebbtide.srt.weight_sync.published import INDEX, version_folder

SESSION: Final = "rollout"
# Beside the paths of control requests: those that change an engine in other words.
_OTHER_ROUTES: Final = (
    *("transition", "pull_weights", "fetch_weights", "collective_rpc"),
    *("pause", "resume", "sleep", "wake_up", "release_kv_cache_memory", "reset_prefix_cache"),
    *("init_weight_transfer_engine", "shutdown_weight_transfer_engine", "init_broadcaster"),
    *("start_weight_update", "update_weights", "finish_weight_update", "receive_weight_update"),
)


class VersionedEngine:
    """One server, and the versions of a run that it is brought to.

    Args:
        base_url: of the server.
        local_checkpoint_dir: a folder on the server's host for notes of what was pulled; no second checkpoint
            is kept there.
        model_path: what the server was started with, to go back to at another run; None: as it says itself.
        admin_api_key: if the server has one.
    """

    def __init__(
        self,
        base_url: str,
        local_checkpoint_dir: str,
        *,
        model_path: str | None = None,
        admin_api_key: str | None = None,
    ) -> None:
        self._client = Client(base_url, admin_api_key=admin_api_key)
        self._local, self._model_path = local_checkpoint_dir, model_path
        # Deltas on top of a whole checkpoint that is staged: the folder of versions, and the last of them.
        self._on_top: tuple[Path, int] | None = None
        self._staged = 0

    def base_url(self) -> str:
        return self._client.url

    def blocked_routes(self) -> frozenset[str]:
        """Paths that clients of the rollout service must not reach."""
        paths = [kind.row.path for kind in CONTROL_REQUESTS if kind.row.path is not None]
        return frozenset(path.strip("/") for path in (*paths, *_OTHER_ROUTES))

    # ---------------------------------------------------------------------------------------------- versions

    async def stage(self, manifest: Any, source_dir: str) -> None:
        """Bring the weights of a version into a second copy, and check them.

        Args:
            manifest: its `ref` has `version`, a number, and `identity`, a name.
            source_dir: the folder of the version; those before it are next to it.

        Raises:
            RuntimeError: a version is missing, follows another one than what serves, or has other checksums;
                the old weights serve.
        """
        await self._client.async_abort_weight_update()
        folder, target = Path(source_dir), manifest.ref.version
        whole = self._last_whole(folder.parent, await self.served(), target)
        self._on_top = None if whole in (None, target) else (folder.parent, target)
        self._staged = target if whole is None else whole
        with _explained(f"stage {manifest.ref.identity}"):
            await self._client.async_begin_weight_update(session_id=SESSION)
            try:
                if whole is None:
                    await self._pull(folder.parent, target)
                path = self._local if whole is None else str(version_folder(folder.parent, whole))
                await self._client.async_update_weights_from_disk(path, session_id=SESSION)
            except BaseException:
                await self._client.async_abort_weight_update()
                raise

    async def commit(self, ref: Any, *, flush_cache: bool = False, weight_names: object = None) -> None:
        """Have the staged version serve. When this returns it does, on every rank.

        Args:
            weight_names: taken, and not used: what was staged is known.
        """
        with _explained(f"commit {ref.identity}"):
            await self._client.async_end_weight_update(
                str(self._staged), flush_cache=flush_cache, pause_mode="in_place", session_id=SESSION
            )
            if self._on_top is not None:
                await self._pull(*self._on_top)
                await self._client.async_update_weights_from_disk(
                    self._local,
                    weight_version=str(ref.version),
                    flush_cache=flush_cache,
                    pause_mode="in_place",
                )
                self._on_top = None

    async def reset(self) -> None:
        """Go back to the checkpoint that the server was started with, as version 0."""
        with _explained("reset"):
            await self._client.async_abort_weight_update()
            path = self._model_path or (await self._client.async_server_info())["model_path"]
            await self._client.async_update_weights_from_disk(path, weight_version="0", flush_cache=True)

    async def prefetch(self) -> None:
        """There is no second checkpoint that would have to be made."""

    async def flush(self) -> None:
        with _explained("flush"):
            await self._client.async_flush_cache()

    # Its name in newer versions of the port.
    flush_cache = flush

    async def pause(self) -> None:
        """Running requests keep their KV, and go on after `resume`."""
        with _explained("pause"):
            await self._client.async_pause_generation("in_place")

    async def resume(self) -> None:
        with _explained("resume"):
            await self._client.async_continue_generation()

    # ---------------------------------------------------------------------------------------------- and below

    async def served(self) -> int:
        """The version that serves; 0, what the server was started with.

        Raises:
            RuntimeError: the server does not answer.
        """
        with _explained("say its version"):
            version = (await self._client.async_model_info())["weight_version"]
        return int(version) if version.isdecimal() else 0

    async def _pull(self, source_dir: Path, target: int) -> None:
        await self._client.async_pull_weights(str(source_dir), self._local, target)

    @staticmethod
    def _last_whole(source_dir: Path, served: int, target: int) -> int | None:
        """The last version after `served` that is a whole checkpoint; None: all of them are deltas."""
        for version in range(target, served, -1):
            index = version_folder(source_dir, version) / INDEX
            if index.is_file() and not _metadata(index).get("delta_encoding"):
                return version
        return None


def say_versions(response: dict[str, Any], otherwise: tuple[int, int] | None = None) -> None:
    """Write into a response which versions sampled it first and last; `otherwise`: where it does not say."""
    meta = response.get("meta_info")
    outputs = [meta, *(response.get("choices") or ())]
    spans = [
        span for output in outputs if isinstance(output, dict) for span in output.get("weight_versions") or ()
    ]
    versions = [int(span["version"]) for span in spans if span["version"].isdecimal()]
    said = (min(versions), max(versions)) if versions and len(versions) == len(spans) else otherwise
    if said is not None:
        place = meta if isinstance(meta, dict) else response
        place["weight_version_start"], place["weight_version_end"] = said


def _metadata(index: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(index.read_text(encoding="utf-8")).get("metadata") or {}
    return found


@contextmanager
def _explained(action: str) -> Iterator[None]:
    """What the engine refuses or fails at is a RuntimeError: it may be tried again later."""
    try:
        yield
    except EbbtideError as error:
        raise RuntimeError(f"ebbtide refused to {action}: {error}") from error
