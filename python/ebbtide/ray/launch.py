"""Which bundle of a placement group each rank takes, which ranks share a node, and the actors of these."""

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
    """What one rank takes of a bundle. A fraction of a GPU leaves the rest of it to a colocated trainer."""

    num_gpus: float
    num_cpus: float

    def __post_init__(self) -> None:
        if self.num_gpus > 1 or self.num_gpus < 0:
            raise ConfigurationError(f"gpus_per_rank: expected 0 (a CPU rank) to 1, got {self.num_gpus:g}")
        if self.num_cpus < 0:
            raise ConfigurationError(f"cpus_per_rank: expected 0 or more, got {self.num_cpus:g}")

    def num_in(self, bundle: Mapping[str, float]) -> int:
        """How many ranks a bundle has room for.

        Of fractions it is one: Ray would give two of them the same GPU.
        """
        room = [
            int((bundle.get(name, 0) + _RESOLUTION) / amount)
            for name, amount in self.times(1).items()
            if amount > 0
        ]
        most = min(room, default=1)
        return min(most, 1) if 0 < self.num_gpus < 1 else most

    def times(self, num_ranks: int) -> dict[str, float]:
        """What so many ranks take."""
        return {"GPU": self.num_gpus * num_ranks, "CPU": self.num_cpus * num_ranks}

    def __str__(self) -> str:
        return f"{self.num_gpus:g} GPU and {self.num_cpus:g} CPU"


@dataclass(frozen=True)
class Seating:
    """How many ranks a bundle holds."""

    bundle: int
    num_ranks: int


def seat_ranks(
    bundles: Sequence[Mapping[str, float]],
    indices: Sequence[int] | None,
    num_ranks: int,
    share: RankShare,
    ranks_per_node: int | None = None,
) -> list[Seating]:
    """Fill bundles with ranks, in order, and leave the rest of them to others.

    Args:
        bundles: the resources of all bundles of the group.
        indices: which of them may be used; None: any, from the first on.
        ranks_per_node: the most ranks that go into a bundle.

    Raises ConfigurationError: there is no room for all; it says what is needed and what there is.
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
    """The places in `seatings` that make up each node of the engine, in the order of its ranks.

    Args:
        node_ids: the machine of each seating, as Ray names it.
        nnodes: into how many nodes they are to be divided; None: one for each machine.

    Raises:
        ConfigurationError: the machines do not hold equally many ranks, or a node would lie on two of them.
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
    """A bundle for each node, or for each rank where it takes a fraction of a GPU."""
    num_bundles = num_ranks if 0 < share.num_gpus < 1 else nnodes
    wanted = share.times(num_ranks // num_bundles)
    return [{name: amount for name, amount in wanted.items() if amount > 0}] * num_bundles


def _described(bundle: Mapping[str, float]) -> str:
    return " ".join(f"{amount:g} {name}" for name, amount in bundle.items()) or "nothing"


# How many requests may be in flight in one engine.
MAX_CALLS: Final = 100_000
# What makes one node fail makes the others fail too, maybe sooner: that long the first failure is not taken
# for the cause.
CAUSE_S: Final = 2.0
SHUTDOWN_S: Final = 15.0
LOOK_S: Final = 0.2

# Arguments that say where ranks are: here the placement group does.
OWN_ARGUMENTS: Final = ("nnodes", "node_rank", "dist_init_addr", "base_gpu_id", "gpu_id_step")


@dataclass(frozen=True)
class Room:
    """Bundles that an engine may use.

    Attributes:
        indices: which of the group's; None: any.
        is_own: the group was made for this, and is removed with it.
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
    """The seats of one node of an engine; the first of them holds its processes."""

    rank: int
    seats: list[Seat]

    @property
    def gpu_ids(self) -> list[str]:
        return [gpu_id for seat in self.seats for gpu_id in seat.facts.gpu_ids]

    def __str__(self) -> str:
        return f"node {self.rank}, {self.seats[0]}"


def make_room(bundles: Sequence[Mapping[str, float]], strategy: str, timeout_s: float) -> Room:
    """Reserve bundles for an engine.

    Raises ConfigurationError: the cluster has no room for them; it says what is needed and what there is.
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
    """Return when the group has been placed. Raises ConfigurationError if that takes longer."""
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
    """Arguments of each replica's `RayEngine` that say where it is. Raises ConfigurationError."""
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

    Raises ConfigurationError: the bundles have no room for the ranks; EngineError: an actor did not start. In
    either case none is left.
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

    `abandoned`: when it is set, the start is given up. Raises ConfigurationError: the engine cannot start so;
    EngineError: a process failed, or an actor or its node has gone; it is named. No actor is left.
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
    """End the processes of all these nodes, and then the actors. What has died already is no error."""
    stopping = [node.seats[0].actor.shutdown.remote() for node in nodes]
    if stopping:
        ray.wait(stopping, num_returns=len(stopping), timeout=SHUTDOWN_S)
    kill_engine(nodes)


def kill_engine(nodes: Sequence[NodeSeats]) -> None:
    """End all actors of an engine, whatever they are doing; their processes end with them."""
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
    # An engine is not what it was when its process is another one: whoever owns it starts a new one.
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
    """What is likelier to have made the others fail comes first."""
    if isinstance(failure, ActorDied):
        return 0
    return 2 if type(failure) is EngineError else 1


def _fits(bundle: Mapping[str, float], machine: Mapping[str, float]) -> bool:
    return all(machine.get(name, 0) >= amount for name, amount in bundle.items())


def _counted(resources: Mapping[str, float]) -> dict[str, float]:
    """The resources that are asked for by number: not the names of machines."""
    return {
        name: amount
        for name, amount in sorted(resources.items())
        if ":" not in name and "_group_" not in name and name not in ("memory", "object_store_memory")
    }
