"""What a soak has seen, and what the processes hold."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil
from rich.console import Console
from rich.table import Table

# Idle connections come and go with clients. Of any other kind of descriptor there may not be one more.
SOCKETS: Final = "socket"
ALLOWED_SOCKETS: Final = 16
_NUMBERS: Final = re.compile(r":?\[\d+\]$")


@dataclass
class Tally:
    """What was seen. `problems` holds the first few, in words."""

    requests: int = 0
    hung_up: int = 0
    aborted: int = 0
    lost: int = 0
    wrong: int = 0
    failures: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def note(self, problem: str) -> None:
        if len(self.problems) < 20:
            self.problems.append(problem[:500])


def shared_objects(pids: Sequence[int]) -> list[Path]:
    """The shared memory that torch made in these processes, as far as it is still there."""
    return [path for pid in pids for path in Path("/dev/shm").glob(f"torch_{pid}_*")]


@dataclass(frozen=True)
class Holdings:
    """What a server's processes hold, and the shared memory that their senders left behind.

    Attributes:
        descriptors: how many there are of each kind: a file's path, or what else it is.
    """

    rss_bytes: int
    descriptors: Counter[str]
    threads: int
    processes: int
    shared_memory: int

    @staticmethod
    def of(process: psutil.Process, senders: Sequence[int] = ()) -> Holdings:
        # What lends shared memory has torch start a manager for it, which stays.
        children = [one for one in process.children(recursive=True) if one.name() != "torch_shm_manager"]
        family = [process, *children]
        return Holdings(
            rss_bytes=sum(one.memory_info().rss for one in family),
            descriptors=sum((_descriptors(one.pid) for one in family), Counter()),
            threads=sum(one.num_threads() for one in family),
            processes=len(family),
            shared_memory=len(shared_objects(senders)),
        )

    def grown_since(self, before: Holdings) -> dict[str, int]:
        """The kinds of descriptors that there are more of, and how many more."""
        more = self.descriptors - before.descriptors
        return {kind: num for kind, num in more.items() if kind != SOCKETS or num > ALLOWED_SOCKETS}


def _descriptors(pid: int) -> Counter[str]:
    """The kinds of a process's descriptors; those that are closed meanwhile do not count."""
    kinds: Counter[str] = Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            # "socket:[4711]" and "pipe:[4712]" are numbered; a file's path stays as it is.
            kinds[_NUMBERS.sub("", str(link.readlink()))] += 1
    return kinds


def report(tally: Tally, before: Holdings, after: Holdings) -> bool:
    """Print the table; whether all is well."""
    grown = after.grown_since(before)
    leaked = bool(grown) or after.processes != before.processes or after.shared_memory > before.shared_memory
    console = Console()
    for problem in tally.problems:
        console.print(problem, markup=False)
    table = Table("", "before", "after", title="soak")
    table.add_row("requests", "", f"{tally.requests:,}")
    table.add_row("  hung up by the client", "", f"{tally.hung_up:,}")
    table.add_row("  aborted on request", "", f"{tally.aborted:,}")
    table.add_row("  lost", "", str(tally.lost))
    table.add_row("  wrong", "", str(tally.wrong))
    for name, count in sorted(tally.operations.items()):
        table.add_row(name, "", f"{count:,}")
    for name, count in sorted(tally.refusals.items()):
        table.add_row(f"refused: {name}", "", f"{count:,}")
    table.add_row("failures", "", str(tally.failures))
    table.add_row("memory, MB", f"{before.rss_bytes / 1e6:,.0f}", f"{after.rss_bytes / 1e6:,.0f}")
    table.add_row("descriptors", str(before.descriptors.total()), str(after.descriptors.total()))
    for kind, num_more in sorted(grown.items()):
        table.add_row(f"  {kind}", "", f"{num_more} more")
    for name in ("threads", "processes", "shared_memory"):
        table.add_row(name.replace("_", " "), str(getattr(before, name)), str(getattr(after, name)))
    console.print(table)
    return not (tally.lost or tally.wrong or tally.failures or leaked)
