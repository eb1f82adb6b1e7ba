"""What a request may ask of the weights that serve it, held against those that do.

Source: control_semantics section 2, "What a request may ask for".
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from ebbtide.srt.managers.wire.generation import VersionContract

NO_CONTRACT: Final = VersionContract()


class Standing(Enum):
    """How a contract stands to the weights that serve now."""

    HOLDS = auto()
    NOT_YET = auto()
    PASSED = auto()


class ServedVersions:
    """The versions that have served so far, and which of two comes first.

    Whole numbers are ordered as such. Of other versions one comes before those that served after it.

    Attributes:
        current: serves now.
    """

    def __init__(self, version: str) -> None:
        self.current = version
        self._served = {version}

    def note(self, version: str) -> None:
        """This version serves from now on."""
        self.current = version
        self._served.add(version)

    def standing(self, contract: VersionContract) -> Standing:
        """Whether a request of this contract may begin now, later, or never."""
        exact, minimum = contract.exact_version, contract.min_version
        if exact is not None and exact != self.current:
            is_past = exact in self._served or self._is_before(exact, self.current)
            return Standing.PASSED if is_past else Standing.NOT_YET
        if minimum is None or minimum in self._served or self._is_before(minimum, self.current):
            return Standing.HOLDS
        return Standing.NOT_YET

    @staticmethod
    def _is_before(version: str, other: str) -> bool:
        return version.isdecimal() and other.isdecimal() and int(version) < int(other)
