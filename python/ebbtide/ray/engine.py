"""An engine whose ranks Ray places."""

from __future__ import annotations

import asyncio
import threading
import uuid
import weakref
from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from ebbtide.ray.continuation import OutputSoFar
from ebbtide.ray.errors import translated
from ebbtide.ray.joint_engine import Answered, FleetCall
from ebbtide.ray.launch import (
    OWN_ARGUMENTS,
    NodeSeats,
    RankShare,
    Room,
    default_bundles,
    kill_engine,
    make_room,
    start_engine,
    stop_engine,
    take_seats,
    wait_for_room,
)
from ebbtide.srt.entrypoints.engine_methods import EngineMethods
from ebbtide.srt.entrypoints.loop_thread import LoopThread
from ebbtide.srt.errors import ConfigurationError, EbbtideError
from ebbtide.srt.managers.io_struct import ControlRequest, Prepared

if TYPE_CHECKING:
    from ebbtide.trainer.payload_encoding import PayloadEncoder

PLACEMENT_TIMEOUT_S = 60.0


class RemoteMethods(EngineMethods):
    """The methods of `Engine`, for one or more engines in actors."""

    _finalizer: weakref.finalize[..., Any]

    @abstractmethod
    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any: ...

    def shutdown(self) -> None:
        """End the processes, actors, and the bundles that were created. Waiting calls raise EngineError.

        Idempotent.
        """
        self._finalizer()

    async def async_shutdown(self) -> None:
        await asyncio.to_thread(self.shutdown)

    def _end(self) -> None:
        self.shutdown()

    async def _read(self, what: str, **query: Any) -> dict[str, Any]:
        body: dict[str, Any] = await self.ask(what, **query)
        return body

    async def _transition(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = await self.ask("transition", **fields)
        return body

    async def _new_encoder(self) -> PayloadEncoder:
        from ebbtide.ray.node_loans import StoreEncoder  # Here, since it imports torch.

        return StoreEncoder()


class RayEngine(RemoteMethods):
    """An engine whose ranks are Ray actors in the bundles of a placement group.

    The constructor returns when the engine is ready. Calls and results travel through Ray; messages between
    the engine's own processes do not. Tensors are passed by value: a trainer on the same GPUs should send
    references made by `ebbtide.trainer.payload_encoding.serialize_bucket`.

    Args:
        placement_group: the group to use. Each bundle holds the ranks of a whole node, or as many as fit.
        bundle_indices: which bundles, in the order of the ranks; None: from the first on.
        bundles: resources of bundles to create instead of using a group; None: one for each node.
        tp, dp: tensor-parallel ranks per replica, and data-parallel replicas.
        nnodes: how many nodes the ranks are divided into; None: one for each machine.
        gpus_per_rank: default 1. Less than 1 leaves the rest of each GPU to a colocated trainer, and needs
            bundles of one GPU. 0 with `device="cpu"`.
        cpus_per_rank: CPUs reserved with Ray per rank; default 0, and 1 with `device="cpu"`.
        placement_timeout_s: seconds to wait until the cluster has room.
        runtime_env: the actors' Ray runtime environment.
        name: the engine's name in messages.
        abandoned: an event that, once set, ends the start with an `EngineError`.
        **arguments: fields of `ServerArgs`.

    Attributes:
        num_ranks: ranks of all replicas and nodes.

    Raises:
        ConfigurationError: the placement group is too small, or the engine cannot start so.
        EngineError: a process failed, or an actor died; none is left.
    """

    def __init__(
        self,
        *,
        placement_group: PlacementGroup | None = None,
        bundle_indices: Sequence[int] | None = None,
        bundles: Sequence[Mapping[str, float]] | None = None,
        tp: int = 1,
        dp: int = 1,
        nnodes: int | None = None,
        gpus_per_rank: float | None = None,
        cpus_per_rank: float | None = None,
        placement_timeout_s: float = PLACEMENT_TIMEOUT_S,
        runtime_env: Mapping[str, Any] | None = None,
        name: str = "the engine",
        abandoned: threading.Event | None = None,
        **arguments: Any,
    ) -> None:
        num_ranks = _checked_ranks(tp, dp, nnodes, arguments)
        on_cpu = arguments.get("device") == "cpu"
        share = RankShare(
            num_gpus=(0 if on_cpu else 1) if gpus_per_rank is None else gpus_per_rank,
            num_cpus=(1 if on_cpu else 0) if cpus_per_rank is None else cpus_per_rank,
        )
        if placement_group is None:
            wanted = default_bundles(num_ranks, nnodes or 1, share) if bundles is None else bundles
            strategy = "STRICT_SPREAD" if bundles is None and (nnodes or 1) > 1 else "PACK"
            room = make_room(wanted, strategy, placement_timeout_s)
        elif bundles is not None:
            raise TypeError("bundles: expected a placement group or bundles, not both")
        else:
            room = Room(placement_group, bundle_indices, is_own=False)
            wait_for_room(room, placement_timeout_s)
        self.name = name
        self.num_ranks = num_ranks
        self._nodes: list[NodeSeats] = []
        try:
            self._nodes = take_seats(room, num_ranks, nnodes, share, runtime_env, placement_timeout_s)
            # With reserved GPUs, ranks must not fall back to the CPU.
            device = {"device": "cuda"} if share.num_gpus > 0 else {}
            together = {"log_level": "error", **device, **arguments, "tp_size": tp, "dp_size": dp}
            start_engine(self._nodes, together, abandoned or threading.Event())
            self._room = room
            self._runner = LoopThread("ray-engine")
            self._finalizer = weakref.finalize(
                self, self._runner.end, _nothing, partial(_stop, self._nodes, [room])
            )
        except BaseException:
            kill_engine(self._nodes)
            room.give_back()
            raise

    # ---------------------------------------------------------------------------------------------- methods

    @property
    def actor(self) -> Any:
        """The actor of node 0, for other actors and tasks: `actor.generate.remote(...)`."""
        return self._nodes[0].seats[0].actor

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return await getattr(self.actor, method).remote(*args, **kwargs)
        except RayError as error:
            raise translated(error, self._described) from None

    def propose(self, call: FleetCall) -> AsyncGenerator[Prepared | Answered, None]:
        """Carry out a control request that other engines carry out too; see `JointEngine.propose`."""
        return self._words("propose", call)

    async def answer(self, fields: Mapping[str, Any]) -> Any:
        """Generate; returns the whole answer. If the caller is cancelled, the request is aborted."""
        try:
            return await self.ask("answer", fields)
        except asyncio.CancelledError:
            self.actor.abort_request.remote(fields["rid"])
            raise

    async def stream(
        self, so_far: OutputSoFar | None, fields: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Generate; yields chunks. If the stream is closed early, the request is aborted.

        Args:
            so_far: the output of another engine to continue; None: begin a new one.
        """
        has_ended = False
        try:
            async for chunk in self._words("stream", so_far, fields):
                yield chunk
            has_ended = True
        except EbbtideError:
            has_ended = True
            raise
        finally:
            if not has_ended:
                self.actor.abort_request.remote(fields["rid"])

    async def _words(self, method: str, *args: Any) -> AsyncGenerator[Any, None]:
        """Yield what a method of the actor yields."""
        try:
            async for word in getattr(self.actor, method).options(num_returns="streaming").remote(*args):
                yield await word
        except RayError as error:
            raise translated(error, self._described) from None

    async def _generate(self, fields: Mapping[str, Any]) -> Any:
        rid = fields.get("rid")
        given = {**fields, "rid": uuid.uuid4().hex if rid is None else rid}
        return self.stream(None, given) if fields.get("stream") else await self.answer(given)

    async def _carry_out(self, kind: type[ControlRequest], fields: Mapping[str, Any]) -> Any:
        return await self.ask("carry_out", kind, fields)

    async def async_ended(self) -> str:
        """Wait until the engine has failed or one of its actors has died; returns what happened."""
        watches = {node.seats[0].actor.hold.remote(): str(node) for node in self._nodes[1:]}
        watches |= {
            seat.actor.hold.remote(): f"node {node.rank}, {seat}"
            for node in self._nodes
            for seat in node.seats[1:]
        }
        watches[self.actor.ended.remote()] = str(self._nodes[0])
        waiting = {asyncio.ensure_future(_result(ref)): who for ref, who in watches.items()}
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            [first, *_] = done
            error = first.exception()
            if isinstance(error, RayError):
                return str(translated(error, waiting[first]))
            return first.result()
        finally:
            for one in waiting:
                one.cancel()

    # --------------------------------------------------------------------------------------------- lifetime

    def kill(self) -> None:
        """Kill the actors and their processes at once, and remove the bundles that were created."""
        self._finalizer.detach()
        kill_engine(self._nodes)
        self._room.give_back()
        self._runner.end(_nothing, lambda: None)

    @property
    def _described(self) -> str:
        return f"{self.name} ({self._nodes[0]})"


async def _result(reference: Any) -> str:
    reason: str = await reference
    return reason


def _checked_ranks(tp: int, dp: int, nnodes: int | None, arguments: Mapping[str, Any]) -> int:
    """The number of ranks. ConfigurationError: an argument is out of range, or Ray decides it."""
    for name in OWN_ARGUMENTS:
        if name in arguments:
            raise ConfigurationError(f"{name}: not with Ray, which places the ranks")
    for name, value in {"tp": tp, "dp": dp, "nnodes": 1 if nnodes is None else nnodes}.items():
        if value < 1:
            raise ConfigurationError(f"{name}: expected 1 or more, got {value}")
    if nnodes is not None and tp * dp % nnodes:
        raise ConfigurationError(
            f"nnodes: expected a divisor of the {tp * dp} ranks (tp={tp}, dp={dp}), got {nnodes}"
        )
    return tp * dp


def shut_down(engines: Sequence[RayEngine]) -> None:
    """Shut down several engines at once, except those that were shut down already."""
    alive = [engine for engine in engines if engine._finalizer.detach() is not None]
    _stop([node for engine in alive for node in engine._nodes], [engine._room for engine in alive])
    for engine in alive:
        engine._runner.end(_nothing, lambda: None)


async def _nothing() -> None:
    """Does nothing: there is nothing to close in the event loop."""


def _stop(nodes: Sequence[NodeSeats], rooms: Sequence[Room]) -> None:
    if ray.is_initialized():
        stop_engine(nodes)
        for room in rooms:
            room.give_back()
