"""The groups of a rank through which trainers broadcast weights, by name."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ebbtide.formats.rendezvous import GroupAddress, Member, abort, connect
from ebbtide.formats.weight_group import GroupLeft, InThread, Leaving, WeightGroup
from ebbtide.srt.config import ONE_RANK, Place
from ebbtide.srt.errors import RequestRejected


@dataclass
class Joining:
    """A group that is being joined; `poll` until it is true, and `close`."""

    groups: Memberships
    address: GroupAddress
    _timeout_s: float
    replaced: bool
    _given_up: str | None = field(default=None, init=False)
    _group: WeightGroup | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._thread = InThread(f"join-{self.address.name}", self._join)

    def poll(self) -> bool:
        """Whether the group has been joined; RequestRejected (400) where it cannot be in time."""
        if self._given_up is not None:
            raise RequestRejected(f"group {self.address.name!r} was not joined: {self._given_up}")
        if not self._thread.is_done:
            return False
        try:
            member = self._thread.result()
        except Exception as error:
            raise RequestRejected(
                f"group {self.address.name!r} at {self.address.url} was not joined as rank "
                f"{self.address.rank} of {self.address.world_size} within {self._timeout_s:g} s: "
                f"{type(error).__name__}: {error}"[:1000]
            ) from error
        if self._group is None:
            device = self.groups.buffer_device(self.address)
            self._group = WeightGroup(self.address.name, member, device)
            self.groups.add(self._group)
        return True

    def close(self, why: str = "the request ended") -> None:
        """Give it up, unless it has been joined. The thread ends when its time is up."""
        if self._group is None and self._given_up is None:
            self._given_up = why
        self.groups.forget(self)

    def _join(self) -> Member:
        member = connect(self.address, self._timeout_s, self.groups.buffer_device(self.address))
        if self._given_up is not None:
            abort([member])
            raise GroupLeft(self._given_up)
        return member


@dataclass
class Memberships:
    """The weight groups of this rank, by name. NCCL receives on `device`, gloo in host memory."""

    _device: torch.device
    _place: Place = ONE_RANK
    # The closed ones too, until others of their names are joined.
    groups: dict[str, WeightGroup] = field(default_factory=dict, init=False)
    _joining: dict[str, Joining] = field(default_factory=dict, init=False)

    @property
    def names(self) -> list[str]:
        return sorted(name for name, group in self.groups.items() if not group.is_closed)

    def join(self, address: GroupAddress, timeout_s: float) -> Joining:
        """Begin to join. A live group of that name is left first, then those whose trainers have ended."""
        self._check(address, timeout_s)
        if address.name in self._joining:
            raise RequestRejected(
                f"a group {address.name!r} is just being joined: wait, or destroy_weights_update_group first",
                409,
            )
        replaced = self.leave(address.name, "another group of that name is joined") is not None
        for group in self.groups.values():
            group.leave_if_abandoned()
        joining = self._joining[address.name] = Joining(self, address, timeout_s, replaced)
        return joining

    def get(self, name: str) -> WeightGroup:
        """The live group of this name; RequestRejected (400) if there is none."""
        group = self.groups.get(name)
        if group is not None and not group.is_closed:
            return group
        why = f" (left: {group.why_closed})" if group is not None else ""
        known = ", ".join(map(repr, self.names)) or "none"
        raise RequestRejected(
            f"group_name: there is no group {name!r}{why}; known: {known}. init_weights_update_group first"
        )

    def leave(self, name: str, why: str) -> Leaving | None:
        """Leave the group of that name, or stop joining it; None if there is none."""
        joining = self._joining.get(name)
        if joining is not None:
            joining.close(why)
        group = self.groups.get(name)
        if group is None or group.is_closed:
            return None if joining is None else Leaving(name, lambda: None)
        return group.close(why)

    def add(self, group: WeightGroup) -> None:
        self.groups[group.name] = group

    def forget(self, joining: Joining) -> None:
        if self._joining.get(joining.address.name) is joining:
            del self._joining[joining.address.name]

    def buffer_device(self, address: GroupAddress) -> torch.device:
        return torch.device("cpu") if address.backend == "gloo" else self._device

    def _check(self, address: GroupAddress, timeout_s: float) -> None:
        if not address.name:
            raise RequestRejected("group_name: expected a name, got an empty one")
        is_met_by_id = address.unique_id is not None
        if not address.host and not is_met_by_id:
            raise RequestRejected("master_address: expected an address, got an empty one")
        if not 0 < address.port < 1 << 16 and not is_met_by_id:
            raise RequestRejected(f"master_port: expected 1..65535, got {address.port}")
        num_ranks = self._place.num_ranks
        rank_offset = address.rank - self._place.rank
        if not 0 < rank_offset <= address.world_size - num_ranks:
            raise RequestRejected(
                f"rank_offset: expected 1..{address.world_size - num_ranks} (rank 0 is the trainer's, the "
                f"engine has {num_ranks}, world_size is {address.world_size}), got {rank_offset}"
            )
        if not timeout_s > 0:
            raise RequestRejected(f"timeout_s: expected more than 0 seconds, got {timeout_s}")
        if address.backend != "gloo" and self._device.type != "cuda":
            raise RequestRejected(
                f"backend {address.backend!r}: this engine runs on the CPU, expected 'gloo'"
            )
