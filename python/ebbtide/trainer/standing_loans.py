"""Tensors that stay where they are from update to update: engines keep their memory mapped in between.

Mapping and unmapping hundreds of allocations takes an engine longer than copying what is in them. In return
memory that the trainer frees meanwhile is the device's again only when it is told of: by the next update, in
which the same names lie elsewhere, or when the loans are closed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from ebbtide.trainer.lending import Allocations, LentTensors, Loan, Places

NamedTensors: TypeAlias = Sequence[tuple[str, torch.Tensor]]

# Buckets of one update, and some more.
MAX_LOANS: Final = 192


@dataclass(frozen=True, eq=False)
class _Standing:
    """A loan, and where its tensors lay: they themselves may be freed."""

    loan: Loan
    names: tuple[str, ...]
    allocations: Allocations


class StandingLoans:
    """What is lent for longer than an update.

    Args:
        num_readers: of each loan.
        keep: as `Lender` has it.
    """

    def __init__(self, num_readers: int, keep: Callable[[LentTensors], None]) -> None:
        self._num_readers = num_readers
        self._keep = keep
        # The first of a name's loans is the only one.
        self._by_name: dict[str, _Standing] = {}

    def lend(self, tensors: NamedTensors) -> LentTensors:
        """As `Lender.lend`. What was lent before under one of these names, and lies elsewhere, no longer is.

        Raises RuntimeError for memory that the driver does not share.
        """
        places = Places(tensors)
        standing = self._by_name.get(tensors[0][0])
        if (
            standing is None
            or standing.allocations.places != places
            or not standing.allocations.are_there
            or not standing.loan.counts.are_zero
        ):
            standing = self._new(tensors, places)
        else:
            standing.loan.counts.refill()
        return LentTensors(
            standing.loan.entries,
            tensors,
            standing.loan.counts,
            lambda lent: self._give_up(standing, lent),
            owns_counts=False,
        )

    def close(self) -> None:
        """Lend nothing any more. Idempotent."""
        for standing in list(dict.fromkeys(self._by_name.values())):
            self._end(standing)

    def _new(self, tensors: NamedTensors, places: Places) -> _Standing:
        names = tuple(name for name, _ in tensors)
        for name in names:
            if (former := self._by_name.get(name)) is not None:
                self._end(former)
        loans = list(dict.fromkeys(self._by_name.values()))
        for oldest in loans[: max(0, len(loans) + 1 - MAX_LOANS)]:
            self._end(oldest)
        allocations = Allocations.of(tensors, places)
        loan = allocations.lent(self._num_readers, stays=True)
        loan.counts.hold(stays=True)
        standing = _Standing(loan, names, allocations)
        self._by_name.update(dict.fromkeys(names, standing))
        return standing

    def _give_up(self, standing: _Standing, lent: LentTensors) -> None:
        """It may be read still: whoever keeps the tensors ends it when it is not."""
        self._forget(standing)
        standing.loan.counts.hold(stays=False)
        lent.owns_counts = True
        self._keep(lent)

    def _end(self, standing: _Standing) -> None:
        self._forget(standing)
        standing.loan.counts.close()

    def _forget(self, standing: _Standing) -> None:
        for name in standing.names:
            if self._by_name.get(name) is standing:
                del self._by_name[name]
