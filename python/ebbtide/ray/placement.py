"""Which bundle of a placement group each rank takes, and which ranks share a node. Knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ebbtide.srt.errors import ConfigurationError

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
        wanted = {"GPU": self.num_gpus, "CPU": self.num_cpus}
        room = [
            int((bundle.get(name, 0) + _RESOLUTION) / amount) for name, amount in wanted.items() if amount > 0
        ]
        most = min(room, default=1)
        return min(most, 1) if 0 < self.num_gpus < 1 else most

    def times(self, num_ranks: int) -> dict[str, float]:
        """Options of an actor that holds this many ranks."""
        return {"num_gpus": self.num_gpus * num_ranks, "num_cpus": self.num_cpus * num_ranks}

    def __str__(self) -> str:
        return f"{self.num_gpus:g} GPU and {self.num_cpus:g} CPU"


@dataclass(frozen=True)
class Seating:
    """So many ranks in one bundle."""

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
        ranks_per_node: at most so many go into a bundle.

    Raises:
        ConfigurationError: there is no room for all; it says what is needed and what there is.
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
    if 0 < share.num_gpus < 1:
        return [_bundle(share, 1)] * num_ranks
    return [_bundle(share, num_ranks // nnodes)] * nnodes


def _bundle(share: RankShare, num_ranks: int) -> dict[str, float]:
    wanted = {"GPU": share.num_gpus * num_ranks, "CPU": share.num_cpus * num_ranks}
    return {name: amount for name, amount in wanted.items() if amount > 0}


def _described(bundle: Mapping[str, float]) -> str:
    return " ".join(f"{amount:g} {name}" for name, amount in bundle.items()) or "nothing"
