"""`ebbtide top`: a server as it is now, redrawn each second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ebbtide.cli.server import DEFAULT_URL, Key, Url, asking, console, fail, size

NUM_OPERATIONS = 12
BAR_WIDTH = 30


def top(
    url: Url = DEFAULT_URL,
    key: Key = None,
    once: Annotated[bool, typer.Option("--once", help="Print one picture, and end.")] = False,
) -> None:
    """Watch a server live: requests, memory by tag, versions, the last operations. Ctrl-C ends it."""
    picture = Picture()
    with asking(url, key) as client, Live(console=console, screen=not once, auto_refresh=False) as live:
        for event in client.events():
            picture.take(event)
            if picture.sample:
                live.update(picture.draw(client.url), refresh=True)
                if once:
                    return
        fail("the server has ended")


class Picture:
    """What the events of the dashboard have come to. `sample`: the latest; empty as long as there is none."""

    def __init__(self) -> None:
        self.sample: dict[str, Any] = {}
        self._largest: dict[str, int] = {}
        self._operations: deque[dict[str, Any]] = deque(maxlen=NUM_OPERATIONS)

    def take(self, event: Mapping[str, Any]) -> None:
        """Take an event of `/dashboard/events`."""
        history = event.get("history", {})
        self._operations.extend(history.get("operations", ()))
        for sample in (*history.get("samples", ())[-1:], *filter(None, [event.get("sample")])):
            self.sample = sample
            for tag, num_bytes in sample["resident_bytes"].items():
                self._largest[tag] = max(num_bytes, self._largest.get(tag, 1))
        if "operation" in event:
            self._operations.append(event["operation"])

    def draw(self, url: str) -> Group:
        """The whole screen."""
        sample = self.sample
        load, reason = sample["load"], sample["reason"]
        state = Text("serving", "green") if not reason else Text(f"waiting: {reason}", "yellow")
        head = Text.assemble((f"{url}  ", "bold"), state, f"  weights {sample['weight_version']}")
        requests = (
            f"requests {load['num_running_reqs']} running, {load['num_waiting_reqs']} waiting, "
            f"{load['num_paused_reqs']} paused   {load['gen_throughput']:.0f} tokens/s   "
            f"KV {load['num_used_tokens']} of {load['max_total_num_tokens']} tokens"
            if load
            else "the ranks do not answer"
        )
        tokens = sample["tokens_by_version"]
        versions = ", ".join(f"{version}: {count}" for version, count in tokens.items()) or "none"
        return Group(
            head,
            requests,
            f"tokens of outputs that ended, by version  {versions}",
            self._memory(),
            self._past(),
        )

    def _memory(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for heading in ("memory", "", "resident", "in host memory"):
            table.add_column(heading, justify="right" if heading and heading != "memory" else "left")
        for tag, num_bytes in self.sample["resident_bytes"].items():
            width = round(BAR_WIDTH * num_bytes / self._largest[tag])
            bar = Text("█" * width, "cyan") + Text("░" * (BAR_WIDTH - width), "dim")
            table.add_row(tag, bar, size(num_bytes), size(self.sample["backup_bytes"][tag]))
        return table

    def _past(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for heading in ("ago", "operation", "took", "stall", "outcome"):
            table.add_column(heading, justify="right" if heading in ("ago", "took", "stall") else "left")
        for one in reversed(self._operations):
            ago_s = max(0.0, time.time() - one["started_s"])
            stall = f"{one['stall_ms']:.1f} ms" if "stall_ms" in one else ""
            outcome = one["outcome"] if one["outcome"] == "done" else f"{one['outcome']}: {one['message']}"
            table.add_row(
                f"{ago_s:.0f} s", one["operation"], f"{1000 * one['duration_s']:.1f} ms", stall, outcome
            )
        return table
