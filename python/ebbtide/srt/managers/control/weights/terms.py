"""What an update asks for, and what is wrong with it whatever the state."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.control.ports import IncomingWeights
from ebbtide.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    PauseMode,
    UpdateWeightFromDiskReqInput,
    WeightUpdateRequest,
)

MAX_ERRORS = 20


@dataclass(frozen=True)
class CommitTerms:
    """On what terms a session is committed.

    Attributes:
        mode: what becomes of running requests if nobody has paused them.
        version: None keeps the one that serves.
    """

    mode: PauseMode
    flush_cache: bool
    version: str | None


def check_fields(
    request: WeightUpdateRequest | BeginWeightUpdateReqInput | EndWeightUpdateReqInput,
) -> None:
    """Refuse values that no state allows."""
    if not isinstance(request, EndWeightUpdateReqInput) and request.selector == "draft":
        raise RequestRejected("selector 'draft': there is one model, expected 'target' or 'all'")
    if request.timeout_s is not None and not request.timeout_s >= 0:
        raise RequestRejected(f"timeout_s: expected 0 or more seconds, got {request.timeout_s}")


def mode_of(request: WeightUpdateRequest | EndWeightUpdateReqInput) -> PauseMode:
    """What the request asks to do with running requests, if nobody has paused them."""
    if isinstance(request, WeightUpdateRequest) and request.abort_all_requests:
        return PauseMode.ABORT
    return request.pause_mode if request.pause_mode is not None else PauseMode.WAIT


def version_of(request: WeightUpdateRequest | EndWeightUpdateReqInput) -> str | None:
    """The version that it gives the weights; None leaves it as it is."""
    return None if request.weight_version is None else str(request.weight_version)


def folder_of(request: WeightUpdateRequest) -> tuple[str, str] | None:
    """(model_path, load_format) where the weights come from a folder."""
    if isinstance(request, UpdateWeightFromDiskReqInput):
        return request.model_path, request.load_format or "auto"
    return None


def summary_of(incoming: IncomingWeights) -> str:
    """What must be the same on every rank."""
    names = zlib.crc32("\n".join(sorted(incoming.names)).encode())
    return f"{incoming.num_tensors} tensors ({incoming.num_ignored} ignored, names {names:08x})"


def refuse_problems(incoming: IncomingWeights) -> None:
    """Refuse tensors that do not fit the model, and list them."""
    problems = incoming.problems
    if problems:
        listed = "; ".join(f"{problem['name']}: {problem['reason']}" for problem in problems[:MAX_ERRORS])
        raise RequestRejected(
            f"{len(problems)} of {incoming.num_tensors + incoming.num_ignored} tensors do not fit the model, "
            f"nothing was written: {listed}",
            errors=problems[:MAX_ERRORS],
            num_errors=len(problems),
        )
