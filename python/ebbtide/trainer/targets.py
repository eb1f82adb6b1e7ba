"""Targets of a trainer's weights: an `Engine` in this process, or a server by its URL.

A server gets a bucket by reference to this process's GPU memory if all its ranks can access it; else through
shared memory if it is on this host; else in the request body. Engines and servers may also get a bucket by
broadcast, in a group that all their ranks join.
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
# What each target's call returned, or its error, by the target's name.
Outcomes: TypeAlias = dict[str, Any | EbbtideError]

# Added to the server's own time limit: its error says more than a timeout here.
MARGIN_S: Final = 30.0
# Enough for requests that read the state, which even a busy server answers at once.
STATE_TIMEOUT_S: Final = 60.0


class AnswerLost(EbbtideError):
    """No answer came, so it is unknown whether the request was carried out."""


@dataclass(frozen=True)
class Adapter:
    """An adapter to send.

    Attributes:
        name, version: under which it is loaded.
        tensors: (PEFT's name, tensor) pairs.
        config: the fields of its adapter_config.json.
        in_flight: what happens to requests that run on an older version, see `load_lora_adapter`.
    """

    name: str
    version: str
    tensors: Sequence[tuple[str, torch.Tensor]]
    config: Mapping[str, Any]
    in_flight: str

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the request, without the tensors."""
        named = {"lora_name": self.name, "lora_version": self.version}
        return {**named, "config_dict": dict(self.config), "in_flight": self.in_flight}


class UpdatableEngine(Protocol):
    """The methods of `ebbtide.Engine` that are used here. They take the fields of the requests."""

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
    """An engine or server to which weights are sent.

    Methods raise `RequestRejected` if it refuses, `EngineError` if it fails, and `AnswerLost`.

    Attributes:
        name: used in messages.
        location: host and port; None: an engine in this process.
    """

    def __init__(self, name: str, location: tuple[str, int] | None, *, keep_mapped: bool) -> None:
        self.name = name
        self.location = location
        self._keep_mapped = keep_mapped
        self._session_id: str | None = None

    def begin(self, session_timeout_s: float | None) -> None:
        """Open a session. `session_timeout_s` None: the engine's own limit."""
        # Buckets name the session, so that they are refused when it has ended. Without the name, they would
        # be an update of their own.
        self._session_id = uuid4().hex
        self._call("begin_weight_update", session_id=self._session_id, timeout_s=session_timeout_s)

    @abstractmethod
    def stage(self, bucket: Bucket, timeout_s: float) -> Mapping[str, Any]:
        """Send a bucket; returns the reply's body. The tensors may change once this has returned."""

    def _stays(self, bucket: Bucket) -> bool:
        """Whether the bucket's memory is kept mapped. Not for changes: their address differs each time."""
        return self._keep_mapped and bucket.changed is None

    @abstractmethod
    def load_adapter(self, adapter: Adapter, timeout_s: float) -> Mapping[str, Any]:
        """Load an adapter, which is served when this returns; returns the reply's body."""

    def end(
        self, version: str | None, flush_cache: bool, pause_mode: str | None, timeout_s: float
    ) -> Mapping[str, Any]:
        """Commit the session; returns the reply's body."""
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
        """Discard the open session; returns whether there was one."""
        return bool(self._call("abort_weight_update")["changed"])

    def has_all_weights(self) -> bool:
        """Whether no parameter is stale."""
        return bool(self._server_info()["state"]["tags"]["weights"]["content"] == "valid")

    @abstractmethod
    def serving_version(self) -> str:
        """The version of the serving weights."""

    @abstractmethod
    def close(self) -> None:
        """Release what is kept between updates. Idempotent."""

    def size(self) -> tuple[int, int]:
        """Number of ranks, and number of hosts that they are on."""
        info = self._server_info()
        return info["tp_size"] * info["dp_size"], info["nnodes"]

    def join_group(self, address: GroupAddress, timeout_s: float) -> None:
        """Let all ranks join a group, the first one as `address.rank`; returns when all members have met."""
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
        """Receive the tensors that are being broadcast into the session; returns the reply's body."""
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
        """Send a control request, such as "end_weight_update"; returns the reply's body.

        Args:
            wait_s: limit of a server's answer.
        """

    @abstractmethod
    def _server_info(self) -> Mapping[str, Any]: ...


class EngineTarget(Target):
    """An engine in this process, which chooses how tensors get to its ranks."""

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
        url: such as "http://HOST:PORT".
        transport: "memory": requests refer to memory of this host; "body": they contain the tensors; "auto":
            "memory" if the address is one of this host. Give "body" if a container or tunnel behind such an
            address does not share this host's memory. With "broadcast", `stage` is not called.
        api_key: sent with each request; None: none.
        keep_mapped: see `WeightSender`.
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
        # Without the proxies of the environment, which are not for traffic to servers of the job.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._encoder: PayloadEncoder | None = None
        # Devices of the ranks and `tp_size`, as the encoder was made with; None: it shares no memory.
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
        """The encoder for this server: shares memory if `transport` allows it and it is on one host."""
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
        """Send a POST request with these fields, or a GET request if None; returns the answer's JSON."""
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
    """Headers that make the engine's spans children of the trainer's current one; {} without tracing."""
    headers: dict[str, str] = {}
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry import propagate

        propagate.inject(headers)
    return headers


def outcomes_of(calls: Mapping[str, Future[Any]]) -> Outcomes:
    """Wait for all calls; returns the outcome of each. Raises an error that is not an `EbbtideError`."""
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
    # 503 is a refusal too: its queue is full, or it starts or shuts down.
    is_refusal = answer.code < 500 or answer.code == http.HTTPStatus.SERVICE_UNAVAILABLE
    return read_error(body, answer.code, f"HTTP status {answer.code}", is_refusal=is_refusal)


def devices_of(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """The devices of a server's ranks, such as "cuda:0", numbered as in this process.

    Args:
        ranks: as `/memory_occupation` lists them.

    Returns "cpu" for a GPU that this process does not see, since it cannot share memory there either.
    """
    # A trainer on the CPU should not initialize CUDA just for this.
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    indices = range(torch.cuda.device_count() if is_used else 0)
    own = {_bare(uuid_of(torch.device("cuda", index))): f"cuda:{index}" for index in indices}
    in_order = sorted(ranks, key=lambda rank: (rank["dp_rank"], rank["tp_rank"]))
    return [own.get(_bare(rank["uuid"]), "cpu") for rank in in_order]


def _bare(uuid: str | None) -> str:
    return (uuid or "").lower().removeprefix("gpu-")


def _is_this_host(host: str) -> bool:
    """Whether all addresses of a host name are this host's: only those can be bound."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
    except OSError:
        return False
    return True
