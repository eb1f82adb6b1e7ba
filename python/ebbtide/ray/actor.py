"""The Ray actor that runs a node's part of an engine, and on node 0 takes the requests.

The ranks are child processes of the actor, which starts, watches and ends them as any launcher does. They
have channels of their own to each other, and end with the actor, even if it is killed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from ebbtide.ray.continuation import OutputSoFar
from ebbtide.ray.errors import translated
from ebbtide.ray.joint_engine import Answered, FleetCall, JointEngine
from ebbtide.srt.config import resolve
from ebbtide.srt.entrypoints.launch.launcher import NodeProcesses
from ebbtide.srt.entrypoints.launch.placement import ReservedPorts
from ebbtide.srt.errors import EngineError
from ebbtide.srt.managers.io_struct import Prepared
from ebbtide.srt.server_args import ServerArgs

if TYPE_CHECKING:
    from ebbtide.ray.node_loans import NamedTensors, NodeLender

# Methods of the actor that call coroutines of its engine, such as `actor.generate.remote(...)`.
FORWARDED = {
    name.removeprefix("async_"): name
    for name in dir(JointEngine)
    if name.startswith("async_") and name != "async_shutdown"
} | {"answer": "_generate", **{name: name for name in ("carry_out", "decide", "read_weights")}}
# Interval of checks whether the engine has failed, which need no message.
LOOK_S = 0.2


@dataclass(frozen=True)
class SeatFacts:
    """Where Ray has placed an actor.

    Attributes:
        node_id: Ray's id of the machine.
        gpu_ids: the GPUs that Ray has given it, as in CUDA_VISIBLE_DEVICES.
    """

    node_id: str
    host: str
    pid: int
    gpu_ids: tuple[str, ...]


class EngineActor:
    """An actor in a bundle. A node's first actor starts the processes of all its ranks.

    The actor of node 0 also has the methods of `Engine`: `generate`, `pause_generation`, …
    """

    def __init__(self) -> None:
        self._engine: JointEngine | None = None
        self._node: NodeProcesses | None = None
        self._reserved: ReservedPorts | None = None

    async def facts(self) -> SeatFacts:
        context = ray.get_runtime_context()
        gpu_ids = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
        return SeatFacts(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid(), gpu_ids)

    async def reserve_address(self) -> str:
        """Reserve an address at which the other nodes will reach this one, until `start` has returned."""
        host = ray.util.get_node_ip_address()
        self._reserved = ReservedPorts(host, 1)
        return f"[{host}]:{self._reserved.ports[0]}" if ":" in host else f"{host}:{self._reserved.ports[0]}"

    async def start(
        self, arguments: Mapping[str, Any], gpu_ids: Sequence[str], others: Sequence[Any]
    ) -> None:
        """Start the processes of this node; returns when they are ready.

        Args:
            arguments: fields of `ServerArgs`.
            gpu_ids: the GPUs of all actors on this node, in the order of ranks.
            others: on node 0, the first actors of the other nodes, in order; else empty.

        Raises:
            ConfigurationError, EngineError: as the constructor of `Engine`.
        """
        if gpu_ids:
            # Every rank must see all GPUs of the node, for copies between GPUs.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)
        if arguments["node_rank"] == 0:
            self._engine = await asyncio.to_thread(partial(JointEngine, others, **arguments))
        else:
            await asyncio.to_thread(self._join, ServerArgs(**arguments))
        if self._reserved is not None:
            self._reserved.close()

    def _join(self, server_args: ServerArgs) -> None:
        """Start this node's ranks, as `launch_server` does on nodes other than 0."""
        self._node = NodeProcesses(resolve(server_args))
        self._node.wait_ready()
        self._node.watch(lambda reason: None)

    async def ended(self) -> str:
        """Wait until the engine of this actor has failed; returns the reason."""
        engine = self._running
        while not engine.is_down:
            await asyncio.sleep(LOOK_S)
        try:
            await engine.async_loads()
        except EngineError as error:
            return str(error)
        return "the engine has ended"

    async def hold(self) -> None:
        """Never return, so that a waiting caller gets an error when this actor dies."""
        await asyncio.Event().wait()

    async def propose(self, call: FleetCall) -> AsyncGenerator[Prepared | Answered, None]:
        """Call `JointEngine.propose`."""
        async for word in self._running.propose(call):
            yield word

    async def take_weights(self, peer: Any, weight_version: str) -> int:
        """Take over the weights of another engine with the same arguments; returns their bytes.

        Args:
            peer: the actor of the other engine's node 0.

        Raises:
            RequestRejected: 409, its weights changed meanwhile.
            ActorDied: the other engine has died.
        """
        try:
            return await self._running.take_weights(peer.read_weights.remote, weight_version)
        except RayError as error:
            raise translated(error, "the replica that gives its weights") from None

    async def lend(
        self, loan: str, tensors: Mapping[int, NamedTensors], takers: Sequence[int]
    ) -> list[bytes]:
        """Call `NodeLender.lend`."""
        return await asyncio.to_thread(self._lender.lend, loan, tensors, takers)

    async def take_back(self, loan: str) -> None:
        """Call `NodeLender.take_back`."""
        self._lender.take_back(loan)

    @cached_property
    def _lender(self) -> NodeLender:
        from ebbtide.ray.node_loans import NodeLender

        return NodeLender()

    async def stream(
        self, so_far: OutputSoFar | None, fields: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """As `answer`, but yields chunks.

        Args:
            so_far: the output of another engine to continue; None: begin a new one.
        """
        engine, given = self._running, {**fields, "stream": True}
        async for chunk in await (engine._generate(given) if so_far is None else engine.go_on(so_far, given)):
            yield chunk

    async def shutdown(self) -> None:
        if self._engine is not None:
            await self._engine.async_shutdown()
        if self._node is not None:
            await asyncio.to_thread(self._node.shutdown)

    @property
    def _running(self) -> JointEngine:
        if self._engine is None:
            raise EngineError(
                "this actor has no engine: requests go to the one of node 0, once it has started"
            )
        return self._engine


def _forwarding(name: str, target: str) -> Any:
    """Make a method of the actor that calls a coroutine of its engine."""

    async def method(self: EngineActor, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self._running, target)(*args, **kwargs)

    method.__name__ = name
    method.__qualname__ = f"EngineActor.{name}"
    method.__doc__ = getattr(JointEngine, target).__doc__
    return method


for _name, _target in FORWARDED.items():
    setattr(EngineActor, _name, _forwarding(_name, _target))
