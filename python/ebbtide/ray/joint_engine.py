"""An engine of a fleet: commits together with others, and gives its weights to a new one."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import ray
from msgspec.structs import replace
from numpy.typing import NDArray

from ebbtide.ray.continuation import OutputSoFar
from ebbtide.srt.entrypoints.engine import Engine
from ebbtide.srt.entrypoints.service import ControlAnswer
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.io_struct import (
    AnyReply,
    ControlRequest,
    GivenUp,
    Prepared,
    ReadWeightsReqInput,
    ReadWeightsReqOutput,
    Refusal,
    TokenizedGenerateReqInput,
    WeightPiece,
)

if TYPE_CHECKING:
    import torch

    from ebbtide.ray.node_loans import NodeLoans
    from ebbtide.trainer.payload_encoding import PayloadEncoder

# Bytes that a rank reads between two forward passes at most, and bytes that are sent at once.
PIECE_BYTES: Final = 32 << 20
BUCKET_BYTES: Final = 256 << 20

# The field with the tensors of an update.
TENSORS: Final = "serialized_named_tensors"
CHANGED: Final = "the weights changed while they were read: ask again"


@dataclass(frozen=True)
class StoredParameter:
    """A parameter of a rank: its own part, as bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def tensor(self) -> torch.Tensor:
        import torch  # Here, since most engines never need it.

        # A copy, since memory of Ray's store is read-only, and torch needs writable memory.
        flat = torch.frombuffer(bytearray(self.data), dtype=getattr(torch, self.dtype))
        return flat.view(self.shape)


@dataclass(frozen=True)
class WeightBucket:
    """Consecutive parameters of every rank.

    Attributes:
        by_rank: parameters by tp_rank.
        next_index: index of the first parameter after these; None: these are the last.
        generation: of the weights, by tp_rank. It changes when the weights do.
    """

    by_rank: list[list[StoredParameter]]
    next_index: int | None
    generation: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all ranks."""
        return sum(len(parameter.data) for rank in self.by_rank for parameter in rank)


@dataclass(frozen=True)
class FleetCall:
    """A control request for several engines.

    Attributes:
        is_joint: whether the engines commit together: each prepares, and waits for the verdict.
        number: calls are carried out in the order of these; None: the order is free.
    """

    id: str
    kind: type[ControlRequest]
    fields: Mapping[str, Any]
    is_joint: bool
    number: int | None


@dataclass(frozen=True)
class Answered:
    """The answer of one of several engines.

    Attributes:
        body: of the answer; None: it is a refusal.
        has_session: whether a weight update session is open there now.
    """

    reply: AnyReply
    body: Any
    has_session: bool


class JointEngine(Engine):
    """An `Engine` that can commit together with others. `others`: the actors of its other nodes, in order."""

    def __init__(self, others: Sequence[Any] = (), **arguments: Any) -> None:
        self._verdicts: dict[str, concurrent.futures.Future[str | None]] = {}
        self._others = others
        # Number of numbered calls that were given to the engine.
        self._num_taken = 0
        self._taken = asyncio.Condition()
        super().__init__(**arguments)

    async def carry_out(self, kind: type[ControlRequest], fields: Mapping[str, Any]) -> Any:
        """Carry out a control request; returns the reply's body.

        Args:
            fields: of the request. Tensors may be given as (name, tensor) pairs, also in Ray's store.
        """
        async with self._as_sent(fields) as sent:
            return await self._carry_out(kind, sent)

    async def propose(self, call: FleetCall) -> AsyncGenerator[Prepared | Answered, None]:
        """Carry out a call; yields `Prepared` if it must wait for `decide`, and then the answer."""
        verdict: concurrent.futures.Future[str | None] = concurrent.futures.Future()
        prepared = asyncio.Event()
        loop = asyncio.get_running_loop()

        async def vote() -> str | None:
            loop.call_soon_threadsafe(prepared.set)
            return await asyncio.wrap_future(verdict)

        self._verdicts[call.id] = verdict
        try:
            async with self._as_sent(call.fields) as sent:
                await self._take(call.number)
                work = self._service.answer(call.kind, sent, vote if call.is_joint else None)
                answering = asyncio.wrap_future(self._runner.submit(work))
                waiting = asyncio.create_task(prepared.wait())
                either: list[asyncio.Future[Any]] = [answering, waiting]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if not answering.done():
                    yield Prepared()
                yield await self._answered(answering, verdict)
        finally:
            del self._verdicts[call.id]

    async def decide(self, call_id: str, refusal: str | None) -> None:
        """Commit a prepared call. `refusal`: why it is given up instead; None: it is committed."""
        verdict = self._verdicts.get(call_id)
        if verdict is not None and not verdict.done():
            verdict.set_result(refusal)

    async def _take(self, number: int | None) -> None:
        """Wait until the calls with lower numbers were given to the engine."""
        if number is not None:
            async with self._taken:
                await self._taken.wait_for(lambda: self._num_taken == number)
                self._num_taken += 1
                self._taken.notify_all()

    async def _answered(
        self, answering: asyncio.Future[ControlAnswer], verdict: concurrent.futures.Future[str | None]
    ) -> Answered:
        reply: AnyReply
        body: Any = None
        try:
            answer = await answering
            reply, body = cast("AnyReply", answer.reply), answer.body
        except RequestRejected as error:
            was_given_up = verdict.done() and verdict.result() is not None
            refusal = GivenUp if was_given_up else Refusal
            reply = refusal(status=error.status, message=error.message, fields=error.fields)
        return Answered(reply, body, self._service.state.session is not None)

    @asynccontextmanager
    async def _as_sent(self, fields: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any], None]:
        """Replace (name, tensor) pairs, or a reference to these in Ray's store, by a payload.

        The payload's memory lives as long as the context.
        """
        match tensors := fields.get(TENSORS):
            case None:
                yield fields
                return
            case [ray.ObjectRef() as stored]:
                tensors = await stored
        async with self._as_payload(fields, tensors) as sent:
            yield sent

    async def go_on(self, so_far: OutputSoFar, fields: Mapping[str, Any]) -> Any:
        """As `_generate`, but continue the output of another engine."""
        params = so_far.params
        assert params.sampling_seed is not None, "whoever goes on draws by the same seed"
        request = TokenizedGenerateReqInput(
            rid=so_far.rid,
            input_ids=so_far.prompt_ids,
            sampling_params=params,
            max_new_tokens=0,
            seed=params.sampling_seed,
        )

        async def start() -> Any:
            # Stored and used at once: when a replica dies, thousands of outputs displace each other.
            self._service.manager.ended.keep(request, so_far.output_ids)
            return await self._start_or_finish({**fields, "continue_from": so_far.rid})

        return await self._runner.run(start())

    async def read_weights(self, first_index: int) -> WeightBucket:
        """Read parameters from an index on, up to about `BUCKET_BYTES` on all ranks.

        Raises:
            RequestRejected: 409, the weights are stale, or changed while they were read.
        """
        by_rank: list[list[StoredParameter]] = [[] for _ in range(self.server_args.tp_size)]
        index, num_bytes, num_parameters = first_index, 0, first_index + 1
        generations: set[tuple[int, ...]] = set()
        is_open = True
        while index < num_parameters and (is_open or num_bytes < BUCKET_BYTES):
            runs = await self._read_run(index)
            for parameters, run in zip(by_rank, runs, strict=True):
                for piece in run:
                    data = np.frombuffer(piece.data, dtype=np.uint8)
                    parameters.append(StoredParameter(piece.name, piece.dtype, piece.shape, data))
                    num_bytes += len(data)
            last = [run[-1] for run in runs]
            num_parameters = last[0].num_parameters
            generations.add(tuple(piece.generation for piece in last))
            if len(generations) > 1:
                raise RequestRejected(CHANGED, 409)
            index += len(runs[0])
            # FP8 weights must be in one bucket with their scales, which come next.
            is_open = last[0].dtype.startswith("float8")
        [generation] = generations
        return WeightBucket(by_rank, index if index < num_parameters else None, generation)

    async def _read_run(self, index: int) -> list[list[WeightPiece]]:
        """Read whole parameters from an index on, the same ones on every rank, as many as one request gives.

        A request for each parameter would take minutes on a busy replica: each waits for the running forward
        pass, and for its turn among the answers to running requests.
        """
        runs = await self._read_pieces(index, 0)
        heads = [[run[0]] for run in runs]
        while any(len(pieces[-1].data) == PIECE_BYTES for pieces in heads):
            for pieces, run in zip(
                heads, await self._read_pieces(index, PIECE_BYTES * len(heads[0])), strict=True
            ):
                pieces.append(run[0])
        if any(len({piece.generation for piece in pieces}) > 1 for pieces in heads):
            raise RequestRejected(CHANGED, 409)
        # If ranks have parts of different sizes, they may return different numbers of parameters.
        num_common = min(map(len, runs))
        return [
            [replace(run[0], data=b"".join(piece.data for piece in pieces)), *run[1:num_common]]
            for pieces, run in zip(heads, runs, strict=True)
        ]

    async def _read_pieces(self, index: int, first_byte: int) -> list[list[WeightPiece]]:
        """Read pieces of parameters from an index and a byte on, on every rank."""
        request = ReadWeightsReqInput(index=index, first_byte=first_byte, num_bytes=PIECE_BYTES)
        reply = await self._runner.run(self._service.manager.control.call(request))
        assert isinstance(reply, ReadWeightsReqOutput)
        return reply.pieces

    async def take_weights(self, read: Callable[[int], Awaitable[WeightBucket]], weight_version: str) -> int:
        """Take over the weights of another engine with the same arguments; returns the bytes of all ranks.

        Args:
            read: calls the other engine's `read_weights`.
            weight_version: of these weights.

        Raises:
            RequestRejected: 409, its weights changed meanwhile. This engine keeps its old ones.
        """
        await self.async_begin_weight_update()
        num_bytes, generation = 0, None
        reading: asyncio.Future[WeightBucket] | None = asyncio.ensure_future(read(0))
        try:
            while reading is not None:
                bucket = await reading
                if generation not in (None, bucket.generation):
                    raise RequestRejected(CHANGED, 409)
                generation, index = bucket.generation, bucket.next_index
                # The next bucket is read while this one is staged.
                reading = None if index is None else asyncio.ensure_future(read(index))
                await self._stage(bucket)
                num_bytes += bucket.num_bytes
            await self.async_end_weight_update(weight_version=weight_version, pause_mode="retract")
        except BaseException:
            if reading is not None:
                reading.cancel()
            await self.async_abort_weight_update()
            raise
        return num_bytes

    async def _stage(self, bucket: WeightBucket) -> None:
        by_rank = [[(one.name, one.tensor()) for one in parameters] for parameters in bucket.by_rank]
        with await asyncio.to_thread(self._loans.encode_each, by_rank) as payload:
            await self.async_update_weights_from_tensor(payload.entries, load_format="direct")

    async def _new_encoder(self) -> PayloadEncoder:
        return self._loans if self._others else await super()._new_encoder()

    @cached_property
    def _loans(self) -> NodeLoans:
        from ebbtide.ray.node_loans import NodeLender, NodeLoans

        args = self.server_args
        return NodeLoans(NodeLender(), self._others, args.tp_size * args.dp_size)
