"""How ranks divide units among themselves: heads, columns, rows of a vocabulary."""

from enum import Enum, auto

from ebbtide.srt.errors import ConfigurationError


class Division(Enum):
    """How units are divided among ranks. Each rank holds consecutive units."""

    # Every rank holds the same number.
    EQUAL = auto()
    # As EQUAL; with more ranks than units, neighbouring ranks hold the same unit.
    SHARED = auto()
    # Works for any number of units; the first ranks hold one more where it does not divide evenly.
    SPREAD = auto()


def part_of(rank: int, size: int, units: int, division: Division, what: str) -> tuple[int, int]:
    """The first unit that a rank of `size` ranks holds, and how many it holds.

    `what`: how config.json calls the number of units. ConfigurationError: they cannot be divided.
    """
    if division is Division.SPREAD:
        count, more = divmod(units, size)
        return rank * count + min(rank, more), count + (rank < more)
    if units % size == 0:
        return rank * (units // size), units // size
    if division is Division.SHARED and size % units == 0:
        return rank // (size // units), 1
    expected = "a divisor" if division is Division.EQUAL else "a divisor or a multiple"
    raise ConfigurationError(f"tp_size: expected {expected} of {what}={units}, got {size}")
