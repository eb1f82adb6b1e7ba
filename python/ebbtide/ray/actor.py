"""The actor that holds a node's share of an engine: its launcher, and on node 0 its door.

The ranks are processes of the actor, started, watched and ended as by any other launcher, and speak to each
other over their own channels. They end with the actor, even if it is killed.
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

# What the actors of an engine answer to, by the coroutines that do it: `actor.generate.remote(...)`.
FORWARDED = {
    name.removeprefix("async_"): name
    for name in dir(JointEngine)
    if name.startswith("async_") and name != "async_shutdown"
} | {"answer": "_generate", **{name: name for name in ("carry_out", "decide", "read_weights")}}
# How often an engine is asked whether it lives; that costs no message.
LOOK_S = 0.2


@dataclass(frozen=True)
class SeatFacts:
    """Where an actor has been placed.

    Attributes:
        node_id: the machine, as Ray names it.
        gpu_ids: those that Ray has given it, as CUDA_VISIBLE_DEVICES spells them.
    """

    node_id: str
    host: str
    pid: int
    gpu_ids: tuple[str, ...]


class EngineActor:
    """One bundle's seat. The first seat of each node starts the processes of all of them.

    Its further methods are those of `Engine`, on the actor of node 0: `generate`, `pause_generation`, …
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
        """The address where the other nodes will find this one, kept free for it until it has started."""
        host = ray.util.get_node_ip_address()
        self._reserved = ReservedPorts(host, 1)
        return f"[{host}]:{self._reserved.ports[0]}" if ":" in host else f"{host}:{self._reserved.ports[0]}"

    async def start(
        self, arguments: Mapping[str, Any], gpu_ids: Sequence[str], others: Sequence[Any]
    ) -> None:
        """Start the processes of this node; returns when they are ready.

        Args:
            gpu_ids: of all seats of this node, in the order of their ranks.
            others: the actors that hold the processes of the other nodes, in order; for node 0.
        """
        if gpu_ids:
            # The ranks see the GPUs of their whole node, as their copies between GPUs need it.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)
        if arguments["node_rank"] == 0:
            self._engine = await asyncio.to_thread(partial(JointEngine, others, **arguments))
        else:
            await asyncio.to_thread(self._join, ServerArgs(**arguments))
        if self._reserved is not None:
            self._reserved.close()

    def _join(self, server_args: ServerArgs) -> None:
        """What `launch_server` does on a node that lends its ranks."""
        self._node = NodeProcesses(resolve(server_args))
        self._node.wait_ready()
        self._node.watch(lambda reason: None)

    async def ended(self) -> str:
        """Return, with the reason, when the engine of this actor has failed."""
        engine = self._running
        while not engine.is_down:
            await asyncio.sleep(LOOK_S)
        try:
            await engine.async_loads()
        except EngineError as error:
            return str(error)
        return "the engine has ended"

    async def hold(self) -> None:
        """Never return: who waits for it hears when this actor has died."""
        await asyncio.Event().wait()

    async def propose(self, call: FleetCall) -> AsyncGenerator[Prepared | Answered, None]:
        """Call `JointEngine.propose`."""
        async for word in self._running.propose(call):
            yield word

    async def take_weights(self, peer: Any, weight_version: str) -> int:
        """Serve the weights of another engine like this one, by the actor of its node 0; their bytes."""
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
        """As `answer`, in chunks, behind an output of another engine; None: from the beginning."""
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
    """The actor's method for a coroutine of its engine."""

    async def method(self: EngineActor, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self._running, target)(*args, **kwargs)

    method.__name__ = name
    method.__qualname__ = f"EngineActor.{name}"
    method.__doc__ = getattr(JointEngine, target).__doc__
    return method


for _name, _target in FORWARDED.items():
    setattr(EngineActor, _name, _forwarding(_name, _target))
