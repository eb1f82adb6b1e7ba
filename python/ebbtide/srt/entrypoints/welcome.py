"""What a server says once it is ready, to somebody at a terminal."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.version import __version__

MB = 1e6


def show_welcome(service: EngineService) -> None:
    """Print model, device, memory by tag and addresses to standard error, if that is a terminal."""
    if sys.stderr.isatty():
        Console(stderr=True).print(welcome(service))


def welcome(service: EngineService) -> Panel:
    """The model that is served, where it is, and what to do next."""
    config, state = service.config, service.state
    url = config.server_args.url()
    memory = ", ".join(
        f"{tag} {sum(rank.tags[tag].resident_bytes for rank in state.ranks) / MB:,.0f} MB"
        for tag in state.ranks[0].tags
        if any(rank.tags[tag].virtual_bytes for rank in state.ranks)
    )
    parallel = config.parallel
    device = config.runtime.device.partition(":")[0]
    table = Table.grid(padding=(0, 2))
    for name, value in (
        ("model", f"{config.model.served_model_name} (weights {state.weight_version}, {config.model.dtype})"),
        ("device", device if parallel.num_ranks == 1 else f"{parallel.num_ranks} x {device}"),
        ("memory", memory),
        ("server", url),
        ("dashboard", f"{url}/dashboard"),
        ("HTTP API", f"{url}/docs"),
        ("try", "ebbtide chat · ebbtide status · ebbtide top"),
    ):
        table.add_row(f"[dim]{name}[/]", value)
    return Panel.fit(table, title=f"Ebbtide {__version__}", border_style="cyan")
