"""Updates a server of `ebbtide serve` to published versions.

A version is staged and its checksums are verified while the old one serves. The commit only swaps it in, so
that generation pauses for milliseconds.
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
# Other paths that change an engine, besides those of control requests.
_OTHER_ROUTES: Final = (
    *("transition", "pull_weights", "fetch_weights", "collective_rpc"),
    *("pause", "resume", "sleep", "wake_up", "release_kv_cache_memory", "reset_prefix_cache"),
    *("init_weight_transfer_engine", "shutdown_weight_transfer_engine", "init_broadcaster"),
    *("start_weight_update", "update_weights", "finish_weight_update", "receive_weight_update"),
)


class VersionedEngine:
    """A server that is updated to the versions of a run.

    Args:
        base_url: of the server.
        local_checkpoint_dir: folder on the server's host for notes about pulled versions. No checkpoint is
            written there.
        model_path: the checkpoint of version 0, for `reset`; None: the one that the server was started with.
        admin_api_key: the server's key for control requests; None: it has none.
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
        # Deltas to apply after a staged whole checkpoint: the folder of versions, and the last version.
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
        """Stage a version: load its weights beside the serving ones, and verify their checksums.

        Args:
            manifest: its `ref` has `version`, a number, and `identity`, a name.
            source_dir: folder of the version; those of earlier versions are beside it.

        Raises:
            RuntimeError: a version is missing, does not apply to the serving one, or has wrong checksums. The
                old weights keep serving.
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
        """Commit the staged version. When this returns, every rank serves it.

        Args:
            flush_cache: whether to empty the prefix cache.
            weight_names: ignored: the engine knows what was staged.

        Raises:
            RuntimeError: the engine refused or failed.
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
        """Go back to the first checkpoint, as version 0. RuntimeError: the engine refused or failed."""
        with _explained("reset"):
            await self._client.async_abort_weight_update()
            path = self._model_path or (await self._client.async_server_info())["model_path"]
            await self._client.async_update_weights_from_disk(path, weight_version="0", flush_cache=True)

    async def prefetch(self) -> None:
        """Does nothing: no second checkpoint is needed."""

    async def flush(self) -> None:
        with _explained("flush"):
            await self._client.async_flush_cache()

    # The name in newer versions of Stitch.
    flush_cache = flush

    async def pause(self) -> None:
        """Pause generation. Running requests keep their KV, and go on after `resume`."""
        with _explained("pause"):
            await self._client.async_pause_generation("in_place")

    async def resume(self) -> None:
        with _explained("resume"):
            await self._client.async_continue_generation()

    # ---------------------------------------------------------------------------------------------- internals

    async def served(self) -> int:
        """The serving version; 0: the first checkpoint.

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
        """The last version from `served` + 1 to `target` that is a whole checkpoint; None: all are deltas."""
        for version in range(target, served, -1):
            index = version_folder(source_dir, version) / INDEX
            if index.is_file() and not _metadata(index).get("delta_encoding"):
                return version
        return None


def say_versions(response: dict[str, Any], otherwise: tuple[int, int] | None = None) -> None:
    """Write the first and last version that sampled a response into it.

    Args:
        otherwise: these versions, if the response does not say; None: write nothing then.
    """
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
    """Raise refusals and failures of the engine as RuntimeError, which callers may retry."""
    try:
        yield
    except EbbtideError as error:
        raise RuntimeError(f"ebbtide refused to {action}: {error}") from error
