"""Which units of something each rank holds: heads, columns, rows of a vocabulary."""

from enum import Enum, auto

from ebbtide.srt.errors import ConfigurationError


class Division(Enum):
    """How units are divided among ranks: each holds a run of them."""

    # Every rank holds as many.
    EQUAL = auto()
    # As EQUAL; where there are more ranks than units, neighbours hold the same one.
    SHARED = auto()
    # Any number of units; the first ranks hold one more where it does not come out even.
    SPREAD = auto()


def part_of(rank: int, size: int, units: int, division: Division, what: str) -> tuple[int, int]:
    """The first unit that a rank of `size` holds, and how many; ConfigurationError where they cannot be
    divided.

    `what`: the units, as config.json calls their number.
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
