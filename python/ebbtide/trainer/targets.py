"""Where a trainer's weights go: an `Engine` of this process, or a server by its address.

A bucket goes to a server in one of three ways: by reference to this process's GPU memory, where all ranks of
the server reach it; through shared memory, where the server is on this host; in the body, elsewhere. To an
engine or a server it may also be broadcast, in a group that all of their ranks join.
Source: wire_api sections 3.3 and 4.
"""

from __future__ import annotations

import http.client
import json
import socket
import sys
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias
from urllib.parse import urlsplit
from uuid import uuid4

import torch

from ebbtide.formats import Announcement, request_body
from ebbtide.formats.rendezvous import GroupAddress
from ebbtide.formats.tensor_list import Payload
from ebbtide.srt.errors import EbbtideError, read_error
from ebbtide.trainer.buckets import Bucket
from ebbtide.trainer.cuda_ipc import uuid_of
from ebbtide.trainer.payload_encoding import PayloadEncoder, WholeEncoder, side_by_side

Transport = Literal["auto", "memory", "body", "broadcast"]
# What each target's call returned, or why it failed, by the target's name.
Outcomes: TypeAlias = dict[str, Any | EbbtideError]

# How much longer than the server's own deadline an answer is awaited: the server's says more.
MARGIN_S: Final = 30.0
# A request for the state is answered at once, even by a busy server.
STATE_TIMEOUT_S: Final = 60.0


class AnswerLost(EbbtideError):
    """No answer came: whether the request was carried out is unknown."""


@dataclass(frozen=True)
class Adapter:
    """An adapter's tensors under PEFT's names, and the fields of its adapter_config.json."""

    name: str
    version: str
    tensors: Sequence[tuple[str, torch.Tensor]]
    config: Mapping[str, Any]
    in_flight: str

    @property
    def fields(self) -> dict[str, Any]:
        """What a request says of it."""
        named = {"lora_name": self.name, "lora_version": self.version}
        return {**named, "config_dict": dict(self.config), "in_flight": self.in_flight}


class UpdatableEngine(Protocol):
    """An engine in this process, as `ebbtide.Engine` is one: its methods take the fields of the requests."""

    def begin_weight_update(self, *_: Any, **fields: Any) -> dict[str, Any]: ...
    def load_lora_adapter_from_tensors(self, *_: Any, **fields: Any) -> dict[str, Any]: ...
    def update_weights_from_tensor(self, *_: Any, **fields: Any) -> dict[str, Any]: ...
    def end_weight_update(self, *_: Any, **fields: Any) -> dict[str, Any]: ...
    def abort_weight_update(self) -> dict[str, Any]: ...
    def init_weights_update_group(self, *_: Any, **fields: Any) -> dict[str, Any]: ...
    def update_weights_from_distributed(self, *_: Any, **fields: Any) -> dict[str, Any]: ...
    def destroy_weights_update_group(self, *_: Any, **fields: Any) -> dict[str, Any]: ...
    def forget_mapped(self) -> None: ...
    def server_info(self) -> dict[str, Any]: ...
    @property
    def weight_version(self) -> str: ...


class Target(ABC):
    """One engine that takes new weights.

    The methods raise `RequestRejected` for a refusal, `EngineError` when the engine failed, `AnswerLost`.

    Attributes:
        name: what messages call it.
        location: host and port; None for an engine of this process.
    """

    def __init__(self, name: str, location: tuple[str, int] | None, *, keep_mapped: bool) -> None:
        self.name = name
        self.location = location
        self._keep_mapped = keep_mapped
        self._session_id: str | None = None

    def begin(self, session_timeout_s: float | None) -> None:
        """Open a session; None: for as long as the engine allows by itself."""
        # What names a session is refused outside of it; without the name it would be served by itself.
        self._session_id = uuid4().hex
        self._call("begin_weight_update", session_id=self._session_id, timeout_s=session_timeout_s)

    @abstractmethod
    def stage(self, bucket: Bucket, timeout_s: float) -> Mapping[str, Any]:
        """Hand tensors over, which may change once this has returned; the body of the reply."""

    def _stays(self, bucket: Bucket) -> bool:
        """Whether its memory is to be kept mapped: what says what changed lies elsewhere each time."""
        return self._keep_mapped and bucket.changed is None

    @abstractmethod
    def load_adapter(self, adapter: Adapter, timeout_s: float) -> Mapping[str, Any]:
        """Hand over an adapter, which serves when this returns; the body of the reply."""

    def end(
        self, version: str | None, flush_cache: bool, pause_mode: str | None, timeout_s: float
    ) -> Mapping[str, Any]:
        """Commit the session; the body of the reply."""
        return self._call(
            "end_weight_update",
            timeout_s + MARGIN_S,
            weight_version=version,
            flush_cache=flush_cache,
            pause_mode=pause_mode,
            timeout_s=timeout_s,
            session_id=self._session_id,
        )

    def abort(self) -> bool:
        """Discard the open session; whether there was one."""
        return bool(self._call("abort_weight_update")["changed"])

    def has_all_weights(self) -> bool:
        """Whether no parameter is stale."""
        return bool(self._server_info()["state"]["tags"]["weights"]["content"] == "valid")

    @abstractmethod
    def serving_version(self) -> str:
        """The version of the weights that serve."""

    @abstractmethod
    def close(self) -> None:
        """Give up what is held from one update to the next. Idempotent."""

    def size(self) -> tuple[int, int]:
        """How many ranks it has, and on how many hosts these are."""
        info = self._server_info()
        return info["tp_size"] * info["dp_size"], info["nnodes"]

    def join_group(self, address: GroupAddress, timeout_s: float) -> None:
        """Make all ranks join a group, the first one as `address.rank`; returns when it is complete."""
        self._call(
            "init_weights_update_group",
            timeout_s + MARGIN_S,
            master_address=address.host,
            master_port=address.port,
            rank_offset=address.rank,
            world_size=address.world_size,
            group_name=address.name,
            backend=address.backend,
            timeout_s=timeout_s,
        )

    def leave_group(self, name: str) -> None:
        self._call("destroy_weights_update_group", group_name=name)

    def take_broadcast(self, announced: Announcement, group: str, timeout_s: float) -> Mapping[str, Any]:
        """Take what is broadcast at the same time into the session; the body of the reply."""
        return self._call(
            "update_weights_from_distributed",
            timeout_s + MARGIN_S,
            names=announced.names,
            dtypes=announced.dtypes,
            shapes=announced.shapes,
            load_format=announced.load_format,
            group_name=group,
            session_id=self._session_id,
            timeout_s=timeout_s,
        )

    @abstractmethod
    def _call(self, operation: str, wait_s: float = STATE_TIMEOUT_S, **fields: Any) -> dict[str, Any]:
        """Have a control request carried out, by its path, and wait for the body of the reply."""

    @abstractmethod
    def _server_info(self) -> Mapping[str, Any]: ...


class EngineTarget(Target):
    """An engine of this process, which chooses by itself how tensors reach its ranks."""

    def __init__(
        self, engine: UpdatableEngine, name: str = "the engine", *, keep_mapped: bool = False
    ) -> None:
        super().__init__(name, None, keep_mapped=keep_mapped)
        self._engine = engine

    def stage(self, bucket: Bucket, timeout_s: float) -> Mapping[str, Any]:
        fields = bucket.fields | ({"keep_mapped": True} if self._stays(bucket) else {})
        return self._engine.update_weights_from_tensor(
            list(bucket.tensors), **fields, timeout_s=timeout_s, session_id=self._session_id
        )

    def load_adapter(self, adapter: Adapter, timeout_s: float) -> Mapping[str, Any]:
        return self._engine.load_lora_adapter_from_tensors(
            **adapter.fields, tensors=adapter.tensors, keep_mapped=self._keep_mapped, timeout_s=timeout_s
        )

    def close(self) -> None:
        if self._keep_mapped:
            self._engine.forget_mapped()

    def serving_version(self) -> str:
        return self._engine.weight_version

    def _call(self, operation: str, wait_s: float = STATE_TIMEOUT_S, **fields: Any) -> dict[str, Any]:
        body: dict[str, Any] = getattr(self._engine, operation)(**fields)
        return body

    def _server_info(self) -> Mapping[str, Any]:
        return self._engine.server_info()


class ServerTarget(Target):
    """A server.

    Args:
        url: its address, without a path.
        transport: "memory" refers to memory of this host, "body" sends the data; "auto" takes "memory" where
            the address is one of this host's. Behind such an address a container, or a tunnel, may have
            memory of its own: then "body". With "broadcast" there is nothing to `stage`.
        api_key: sent with each request.
        keep_mapped: as `WeightSender` has it.
    """

    def __init__(
        self,
        url: str,
        transport: Transport = "auto",
        api_key: str | None = None,
        *,
        keep_mapped: bool = False,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"expected a URL as http://HOST:PORT, got {url!r}")
        location = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        super().__init__(url.rstrip("/"), location, keep_mapped=keep_mapped)
        self._host = parts.hostname
        self._transport = transport
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        # Straight to it: what the environment names as a proxy is for other traffic.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._encoder: PayloadEncoder | None = None
        # The devices of the ranks that the encoder shares memory with, and how many make a replica.
        self._reach: tuple[list[str], int] | None = None

    def begin(self, session_timeout_s: float | None) -> None:
        self._find_encoder()
        super().begin(session_timeout_s)

    def stage(self, bucket: Bucket, timeout_s: float) -> Mapping[str, Any]:
        assert self._encoder is not None, "`begin` comes first"
        with self._encoder.encode(bucket.tensors, keep_mapped=self._stays(bucket)) as payload:
            fields = bucket.fields | {"session_id": self._session_id}
            return self._send("update_weights_from_tensor", payload, fields, timeout_s)

    def load_adapter(self, adapter: Adapter, timeout_s: float) -> Mapping[str, Any]:
        encoder = self._find_encoder()
        tensors = adapter.tensors if self._keep_mapped else side_by_side(adapter.tensors)
        with encoder.encode(tensors, keep_mapped=self._keep_mapped) as payload:
            return self._send("load_lora_adapter_from_tensors", payload, adapter.fields, timeout_s)

    def _send(
        self, operation: str, payload: Payload, fields: Mapping[str, Any], timeout_s: float
    ) -> Mapping[str, Any]:
        return self._call(
            operation,
            timeout_s + MARGIN_S,
            **{"load_format": payload.load_format, **fields},
            serialized_named_tensors=payload.entries,
            timeout_s=timeout_s,
        )

    def close(self) -> None:
        if self._encoder is not None:
            self._encoder.close()

    def serving_version(self) -> str:
        return str(self._request("/model_info")["weight_version"])

    def _find_encoder(self) -> PayloadEncoder:
        """What shares memory with all ranks of the server, where it reaches all of them."""
        is_elsewhere = self._transport == "auto" and not _is_this_host(self._host)
        reach: tuple[list[str], int] | None = None
        if not is_elsewhere and self._transport not in ("body", "broadcast"):
            info = self._server_info()
            if info["nnodes"] == 1:
                reach = devices_of(self._request("/memory_occupation")["ranks"]), info["tp_size"]
        if self._encoder is None or reach != self._reach:
            self.close()
            self._reach = reach
            self._encoder = WholeEncoder() if reach is None else PayloadEncoder(*reach)
        return self._encoder

    def _call(self, operation: str, wait_s: float = STATE_TIMEOUT_S, **fields: Any) -> dict[str, Any]:
        body: dict[str, Any] = self._request(f"/{operation}", fields, wait_s)
        return body

    def _server_info(self) -> Mapping[str, Any]:
        info: Mapping[str, Any] = self._request("/server_info")
        return info

    def _request(
        self, path: str, fields: Mapping[str, Any] | None = None, wait_s: float = STATE_TIMEOUT_S
    ) -> Any:
        """POST these fields, or GET without any; the answer's JSON."""
        data = None if fields is None else request_body(fields)
        request = urllib.request.Request(self.name + path, data, self._headers | _trace_headers())
        try:
            with self._opener.open(request, timeout=wait_s) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise _as_error(error) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise AnswerLost(f"no answer from {self.name}{path}: {error}") from error


def _trace_headers() -> dict[str, str]:
    """The span that the trainer is in, where it traces at all: what the engine does is a part of it."""
    headers: dict[str, str] = {}
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry import propagate

        propagate.inject(headers)
    return headers


def outcomes_of(calls: Mapping[str, Future[Any]]) -> Outcomes:
    """Wait for all calls; what each came to. What is not an engine's answer is raised."""
    wait(calls.values())
    outcomes: Outcomes = {}
    for name, call in calls.items():
        error = call.exception()
        if error is not None and not isinstance(error, EbbtideError):
            raise error
        outcomes[name] = call.result() if error is None else error
    return outcomes


def failures_in(outcomes: Outcomes) -> dict[str, EbbtideError]:
    return {name: one for name, one in outcomes.items() if isinstance(one, EbbtideError)}


def _as_error(answer: urllib.error.HTTPError) -> EbbtideError:
    body = None
    with suppress(OSError, http.client.HTTPException, ValueError):
        body = json.load(answer)
    # 503 is of the moment: its queue is full, it starts, or goes down.
    is_refusal = answer.code < 500 or answer.code == http.HTTPStatus.SERVICE_UNAVAILABLE
    return read_error(body, answer.code, f"HTTP status {answer.code}", is_refusal=is_refusal)


def devices_of(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """The devices of ranks as `/memory_occupation` lists them, as this process counts its own.

    A GPU that this process does not see is out of its reach, as "cpu" is.
    """
    # A trainer on the CPU is not made to set up CUDA.
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    indices = range(torch.cuda.device_count() if is_used else 0)
    own = {_bare(uuid_of(torch.device("cuda", index))): f"cuda:{index}" for index in indices}
    in_order = sorted(ranks, key=lambda rank: (rank["dp_rank"], rank["tp_rank"]))
    return [own.get(_bare(rank["uuid"]), "cpu") for rank in in_order]


def _bare(uuid: str | None) -> str:
    return (uuid or "").lower().removeprefix("gpu-")


def _is_this_host(host: str) -> bool:
    """Whether all addresses of that name are this host's: only such can be listened at."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
    except OSError:
        return False
    return True
