"""Places ranks in the bundles of a placement group, groups them by node, and starts and ends their actors."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ebbtide.ray.actor import EngineActor, SeatFacts
from ebbtide.ray.errors import ActorDied, translated
from ebbtide.srt.errors import ConfigurationError, EngineError

# Ray counts resources in ten-thousandths.
_RESOLUTION = 1e-4


@dataclass(frozen=True)
class RankShare:
    """Resources of a rank. A fraction of a GPU leaves the rest of it to a colocated trainer."""

    num_gpus: float
    num_cpus: float

    def __post_init__(self) -> None:
        if self.num_gpus > 1 or self.num_gpus < 0:
            raise ConfigurationError(f"gpus_per_rank: expected 0 (a CPU rank) to 1, got {self.num_gpus:g}")
        if self.num_cpus < 0:
            raise ConfigurationError(f"cpus_per_rank: expected 0 or more, got {self.num_cpus:g}")

    def num_in(self, bundle: Mapping[str, float]) -> int:
        """Number of ranks for which a bundle has room.

        At most one with a fraction of a GPU, since Ray could give two of them the same GPU.
        """
        room = [
            int((bundle.get(name, 0) + _RESOLUTION) / amount)
            for name, amount in self.times(1).items()
            if amount > 0
        ]
        most = min(room, default=1)
        return min(most, 1) if 0 < self.num_gpus < 1 else most

    def times(self, num_ranks: int) -> dict[str, float]:
        """Resources of this many ranks."""
        return {"GPU": self.num_gpus * num_ranks, "CPU": self.num_cpus * num_ranks}

    def __str__(self) -> str:
        return f"{self.num_gpus:g} GPU and {self.num_cpus:g} CPU"


@dataclass(frozen=True)
class Seating:
    """Number of ranks in a bundle."""

    bundle: int
    num_ranks: int


def seat_ranks(
    bundles: Sequence[Mapping[str, float]],
    indices: Sequence[int] | None,
    num_ranks: int,
    share: RankShare,
    ranks_per_node: int | None = None,
) -> list[Seating]:
    """Fill bundles with ranks, in order; bundles that are not needed stay free.

    Args:
        bundles: resources of all bundles of the group.
        indices: of the bundles to use; None: from the first on.
        ranks_per_node: the most ranks in a bundle; None: no such limit.

    Raises:
        ConfigurationError: an index does not exist, or there is no room for all ranks.
    """
    usable = list(range(len(bundles))) if indices is None else list(indices)
    unknown = [index for index in usable if not 0 <= index < len(bundles)]
    if unknown:
        raise ConfigurationError(
            f"bundle_indices: the placement group has bundles 0 to {len(bundles) - 1}, got {unknown}"
        )
    seatings: list[Seating] = []
    left = num_ranks
    for index in usable:
        taken = min(left, share.num_in(bundles[index]), ranks_per_node or num_ranks)
        if taken > 0:
            seatings.append(Seating(index, taken))
            left -= taken
    if left > 0:
        there = ", ".join(f"{index}: {_described(bundles[index])}" for index in usable)
        raise ConfigurationError(
            f"the placement group is too small: {num_ranks} ranks need {share} each, and its bundles "
            f"({there}) have room for {num_ranks - left}"
            + (": a fraction of a GPU takes a bundle of its own" if 0 < share.num_gpus < 1 else "")
        )
    return seatings


def group_by_node(
    seatings: Sequence[Seating], node_ids: Sequence[str], nnodes: int | None
) -> list[list[int]]:
    """Group seatings by node of the engine; returns indices of `seatings` for each node, in order of ranks.

    Args:
        node_ids: Ray's id of the machine of each seating.
        nnodes: number of nodes; None: one for each machine.

    Raises:
        ConfigurationError: nodes would have different numbers of ranks, or a node would be on two machines.
    """
    machines: dict[str, list[int]] = {}
    for place, node_id in enumerate(node_ids):
        machines.setdefault(node_id, []).append(place)
    in_order = [place for places in machines.values() for place in places]
    num_ranks = sum(seating.num_ranks for seating in seatings)
    if nnodes is None:
        nnodes = len(machines)
    held = {
        node_id: sum(seatings[place].num_ranks for place in places) for node_id, places in machines.items()
    }
    ranks_per_node, rest = divmod(num_ranks, nnodes)
    groups: list[list[int]] = []
    room = 0
    for place in in_order:
        if room == 0:
            groups.append([])
            room = ranks_per_node
        room -= seatings[place].num_ranks
        groups[-1].append(place)
        if room < 0:
            break
    whole = rest == 0 and room == 0 and len(groups) == nnodes
    if not whole or any(len({node_ids[place] for place in group}) > 1 for group in groups):
        there = ", ".join(f"{number} on {node_id[:8]}" for node_id, number in held.items())
        raise ConfigurationError(
            f"nnodes={nnodes}: every node takes {num_ranks}/{nnodes} ranks of one machine, and the bundles "
            f"have room for {there}: give each machine an equal share, or other bundle_indices"
        )
    return groups


def default_bundles(num_ranks: int, nnodes: int, share: RankShare) -> list[dict[str, float]]:
    """One bundle for each node; with fractions of a GPU, one for each rank."""
    num_bundles = num_ranks if 0 < share.num_gpus < 1 else nnodes
    wanted = share.times(num_ranks // num_bundles)
    return [{name: amount for name, amount in wanted.items() if amount > 0}] * num_bundles


def _described(bundle: Mapping[str, float]) -> str:
    return " ".join(f"{amount:g} {name}" for name, amount in bundle.items()) or "nothing"


# The most requests in flight in an engine.
MAX_CALLS: Final = 100_000
# How long to wait for more failures after the first. A cause on one node makes others fail too, maybe sooner,
# so the first failure need not be the cause.
CAUSE_S: Final = 2.0
SHUTDOWN_S: Final = 15.0
LOOK_S: Final = 0.2

# Arguments about the placement of ranks, which the placement group decides here.
OWN_ARGUMENTS: Final = ("nnodes", "node_rank", "dist_init_addr", "base_gpu_id", "gpu_id_step")


@dataclass(frozen=True)
class Room:
    """Bundles that an engine may use.

    Attributes:
        indices: of the group's bundles; None: all.
        is_own: whether the group was created for the engine, and is removed with it.
    """

    group: PlacementGroup
    indices: Sequence[int] | None
    is_own: bool

    def give_back(self) -> None:
        if self.is_own:
            remove_placement_group(self.group)


@dataclass(frozen=True)
class Seat:
    """An actor in a bundle."""

    actor: Any
    bundle: int
    facts: SeatFacts

    def __str__(self) -> str:
        return f"bundle {self.bundle} (process {self.facts.pid} on {self.facts.host})"


@dataclass(frozen=True)
class NodeSeats:
    """The actors of a node of an engine. The first one starts the node's processes."""

    rank: int
    seats: list[Seat]

    @property
    def gpu_ids(self) -> list[str]:
        return [gpu_id for seat in self.seats for gpu_id in seat.facts.gpu_ids]

    def __str__(self) -> str:
        return f"node {self.rank}, {self.seats[0]}"


def make_room(bundles: Sequence[Mapping[str, float]], strategy: str, timeout_s: float) -> Room:
    """Create bundles for an engine, and wait for them.

    Raises:
        ConfigurationError: the cluster has no room for them. The message says what it has.
    """
    group = placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
    room = Room(group, None, is_own=True)
    try:
        wait_for_room(room, timeout_s)
    except BaseException:
        room.give_back()
        raise
    return room


def wait_for_room(room: Room, timeout_s: float) -> None:
    """Wait until the group is placed. ConfigurationError: it never can be, or the time is up."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    never = [bundle for bundle in room.group.bundle_specs if not any(_fits(bundle, one) for one in machines)]
    if not never and room.group.wait(timeout_s):
        return
    needed = never[0] if never else room.group.bundle_specs
    there = [_counted(one) for one in machines] if never else _counted(ray.available_resources())
    raise ConfigurationError(
        f"the placement group cannot be placed: it needs {needed}, "
        + (f"and the machines have {there}" if never else f"and {timeout_s:g} s later {there} are free")
    )


def places_of_replicas(
    group: PlacementGroup | None, indices: Sequence[Sequence[int]] | None, num_replicas: int
) -> list[dict[str, Any]]:
    """Arguments about placement for each replica's `RayEngine`.

    Args:
        group: None: each replica creates its own bundles.
        indices: of each replica's bundles; None: equal parts of the group, in order.

    Raises:
        ConfigurationError: the bundles cannot be divided equally, or there is not a list for each replica.
        TypeError: `indices` without `group`.
    """
    if group is None:
        if indices is not None:
            raise TypeError("bundle_indices: expected a placement group with them")
        return [{} for _ in range(num_replicas)]
    if indices is None:
        per_replica, rest = divmod(len(group.bundle_specs), num_replicas)
        if per_replica == 0 or rest:
            raise ConfigurationError(
                f"the placement group has {len(group.bundle_specs)} bundles, which are no equal runs for "
                f"{num_replicas} replicas: say which by bundle_indices"
            )
        indices = [range(slot * per_replica, (slot + 1) * per_replica) for slot in range(num_replicas)]
    if len(indices) != num_replicas:
        raise ConfigurationError(
            f"bundle_indices: expected a list for each of {num_replicas} replicas, got {len(indices)}"
        )
    return [{"placement_group": group, "bundle_indices": list(own)} for own in indices]


def take_seats(
    room: Room,
    num_ranks: int,
    nnodes: int | None,
    share: RankShare,
    runtime_env: Mapping[str, Any] | None,
    timeout_s: float,
) -> list[NodeSeats]:
    """Start an actor in each bundle that is needed, and group them by node.

    Raises:
        ConfigurationError: the bundles have no room for the ranks. No actor is left.
        EngineError: an actor did not start. No actor is left.
    """
    ranks_per_node = None if nnodes is None else max(1, num_ranks // nnodes)
    seatings = seat_ranks(room.group.bundle_specs, room.indices, num_ranks, share, ranks_per_node)
    actors = [_start_actor(room.group, seating, share, runtime_env) for seating in seatings]
    try:
        facts = _all_facts(actors, seatings, timeout_s)
        seats = [
            Seat(actor, seating.bundle, fact)
            for actor, seating, fact in zip(actors, seatings, facts, strict=True)
        ]
        groups = group_by_node(seatings, [fact.node_id for fact in facts], nnodes)
    except BaseException:
        _kill(actors)
        raise
    return [NodeSeats(rank, [seats[place] for place in group]) for rank, group in enumerate(groups)]


def start_engine(
    nodes: Sequence[NodeSeats], arguments: Mapping[str, Any], abandoned: threading.Event
) -> None:
    """Start the processes of all nodes; returns when the engine is ready.

    If this raises, no actor is left.

    Args:
        arguments: fields of `ServerArgs`.
        abandoned: when set, the start is given up.

    Raises:
        ConfigurationError: the engine cannot start with these arguments.
        EngineError: a process failed, an actor or its machine died, or the start was given up.
    """
    together: dict[str, Any] = {**arguments, "nnodes": len(nodes)}
    try:
        if len(nodes) > 1:
            together["dist_init_addr"] = ray.get(nodes[0].seats[0].actor.reserve_address.remote())
        first, *others = [node.seats[0].actor for node in nodes]
        starting = {
            actor.start.remote(
                {**together, "node_rank": node.rank}, node.gpu_ids, others if actor is first else []
            ): node
            for actor, node in zip([first, *others], nodes, strict=True)
        }
        _wait_for_all(starting, abandoned)
    except BaseException as error:
        kill_engine(nodes)
        if isinstance(error, RayError):
            raise translated(error, str(nodes[0])) from None
        raise


def stop_engine(nodes: Sequence[NodeSeats]) -> None:
    """End the processes of these nodes, and then the actors. Actors that have died are no error."""
    stopping = [node.seats[0].actor.shutdown.remote() for node in nodes]
    if stopping:
        ray.wait(stopping, num_returns=len(stopping), timeout=SHUTDOWN_S)
    kill_engine(nodes)


def kill_engine(nodes: Sequence[NodeSeats]) -> None:
    """Kill all actors of an engine at once. Their processes end with them."""
    _kill(seat.actor for node in nodes for seat in node.seats)


def _kill(actors: Iterable[Any]) -> None:
    for actor in actors:
        ray.kill(actor, no_restart=True)


def _all_facts(actors: Sequence[Any], seatings: Sequence[Seating], timeout_s: float) -> list[SeatFacts]:
    asked = [actor.facts.remote() for actor in actors]
    deadline_s = time.monotonic() + timeout_s
    facts: list[SeatFacts] = []
    for answer, seating in zip(asked, seatings, strict=True):
        try:
            facts.append(ray.get(answer, timeout=max(0.0, deadline_s - time.monotonic())))
        except GetTimeoutError:
            raise EngineError(
                f"the actor in bundle {seating.bundle} has not started within {timeout_s:g} s "
                "(placement_timeout_s)"
            ) from None
        except RayError as error:
            raise translated(error, f"the actor in bundle {seating.bundle}") from None
    return facts


def _start_actor(
    group: PlacementGroup, seating: Seating, share: RankShare, runtime_env: Mapping[str, Any] | None
) -> Any:
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=seating.bundle
    )
    taken = share.times(seating.num_ranks)
    options: dict[str, Any] = {"num_gpus": taken["GPU"], "num_cpus": taken["CPU"]}
    if runtime_env is not None:
        options["runtime_env"] = dict(runtime_env)
    # Without restarts: a new process would not have the engine's state. The owner starts a new engine.
    return (
        ray.remote(EngineActor)
        .options(scheduling_strategy=strategy, max_restarts=0, max_concurrency=MAX_CALLS, **options)
        .remote()
    )


def _wait_for_all(starting: Mapping[Any, NodeSeats], abandoned: threading.Event) -> None:
    left = list(starting)
    failures: list[Exception] = []
    until_s: float | None = None
    while left and (until_s is None or time.monotonic() < until_s):
        if abandoned.is_set():
            raise EngineError("the start was given up")
        done, left = ray.wait(left, num_returns=1, timeout=LOOK_S)
        for one in done:
            try:
                ray.get(one)
            except RayError as error:
                failures.append(translated(error, str(starting[one])))
        if failures and until_s is None:
            until_s = time.monotonic() + CAUSE_S
    if failures:
        raise min(failures, key=rank_as_cause)


def rank_as_cause(failure: BaseException) -> int:
    """A sort key by which the likeliest cause of other failures comes first."""
    if isinstance(failure, ActorDied):
        return 0
    return 2 if type(failure) is EngineError else 1


def _fits(bundle: Mapping[str, float], machine: Mapping[str, float]) -> bool:
    return all(machine.get(name, 0) >= amount for name, amount in bundle.items())


def _counted(resources: Mapping[str, float]) -> dict[str, float]:
    """CPUs, GPUs and custom resources, without memory and Ray's own names of machines and groups."""
    return {
        name: amount
        for name, amount in sorted(resources.items())
        if ":" not in name and "_group_" not in name and name not in ("memory", "object_store_memory")
    }
