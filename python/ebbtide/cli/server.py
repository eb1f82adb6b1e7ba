"""The server that commands ask, and those that look at its memory, weights and requests, and change them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from ebbtide.client import DEFAULT_URL, Client
from ebbtide.srt.errors import EbbtideError
from ebbtide.srt.managers.io_struct import PauseMode
from ebbtide.srt.memory_saver import MemoryTag

Url: TypeAlias = Annotated[
    str,
    typer.Option("--url", "-u", envvar="EBBTIDE_URL", help="Where the server is.", rich_help_panel="Server"),
]
Key: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar="EBBTIDE_API_KEY",
        help="Its key, if it has one; EBBTIDE_ADMIN_API_KEY has that for control, if it is another.",
        rich_help_panel="Server",
    ),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]

console = Console(highlight=False)


@contextmanager
def asking(url: str, key: str | None) -> Generator[Client, None, None]:
    """A client of the server; what it refuses, or how it fails, ends the command with one line."""
    try:
        admin_key = os.environ.get("EBBTIDE_ADMIN_API_KEY", key)
        with Client(url, api_key=admin_key if key is None else key, admin_api_key=admin_key) as client:
            yield client
    except (EbbtideError, ValueError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def fail(message: str, status: int = 1) -> None:
    """End the command with this line."""
    print(f"ebbtide: {message}", file=sys.stderr)
    raise typer.Exit(status)


def size(num_bytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KB", "MB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


def sizes(by_tag: dict[str, Any]) -> str:
    """Bytes of each tag, and nothing of those that have none."""
    return (
        ", ".join(f"{tag} {size(num_bytes)}" for tag, num_bytes in by_tag.items() if num_bytes) or "nothing"
    )


__all__ = ["DEFAULT_URL", "AsJson", "Key", "Url", "asking", "console", "fail", "size", "sizes"]


Tags = Annotated[list[MemoryTag] | None, typer.Argument(help="Which memory; none: all of it.")]


def _show(answer: dict[str, Any], line: str, as_json: bool) -> None:
    console.print_json(json.dumps(answer)) if as_json else console.print(line, soft_wrap=True)


def status(url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Show the model, its memory by tag, the version that serves, and what there is to do."""
    with asking(url, key) as client:
        model, memory, loads = client.model_info(), client.memory_occupation(), client.loads()
        if as_json:
            console.print_json(json.dumps({"model": model, "memory": memory, "loads": loads}))
            return
        state = "[green]serving[/]" if memory["can_run"] else f"[yellow]waiting[/]: {memory['reason']}"
        console.print(f"[bold]{model['served_model_name']}[/] at {client.url}: {state}")
        console.print(f"weights [bold]{model['weight_version']}[/] from {model['model_path']}")
        totals = loads["loads"]
        running, waiting = (sum(one[f"num_{kind}_reqs"] for one in totals) for kind in ("running", "waiting"))
        console.print(f"requests {running} running, {waiting} waiting")
        table = Table(box=None, pad_edge=False)
        for heading in ("memory", "state", "resident", "in host memory"):
            table.add_column(
                heading, justify="right" if heading in ("resident", "in host memory") else "left"
            )
        for tag, report in memory["tags"].items():
            resident = report["resident_bytes"]
            state = "resident" if resident else "released" if report["virtual_bytes"] else "none"
            table.add_row(tag, state, size(resident), size(report["backup_bytes"]))
        console.print(table)


def release(
    tags: Tags = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
    backup: Annotated[bool | None, typer.Option(help="Keep the weights in host memory.")] = None,
) -> None:
    """Give memory back to the system. Running requests wait, and lose nothing."""
    with asking(url, key) as client:
        answer = client.release_memory_occupation(tags, backup=backup)
        line = f"freed {sizes(answer['freed_bytes'])} in {answer['duration_ms']:.1f} ms"
        waiting = answer["num_retracted"] + answer["num_parked"]
        _show(answer, line + (f"; {waiting} requests wait" if waiting else ""), as_json)


def park(url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Release the KV cache and keep that of running requests in host memory, from which they go on."""
    with asking(url, key) as client:
        answer = client.release_memory_occupation([MemoryTag.KV_CACHE], preserve="live")
        line = f"freed {sizes(answer['freed_bytes'])}; parked {answer['num_parked']} requests"
        _show(answer, f"{line} in {size(answer['parked_bytes'])} of host memory", as_json)


def resume(tags: Tags = None, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Take memory again, at the same addresses."""
    with asking(url, key) as client:
        answer = client.resume_memory_occupation(tags)
        line = f"mapped {sizes(answer['mapped_bytes'])} in {answer['duration_ms']:.1f} ms"
        weights = answer["weights"]
        if weights["content"] != "valid":
            line += f"; {weights['num_missing']} parameters are stale: `ebbtide update FOLDER` writes them"
        _show(answer, line, as_json)


def pause(
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
    mode: Annotated[PauseMode, typer.Option(help="What becomes of running requests.")] = PauseMode.IN_PLACE,
) -> None:
    """Stop forward passes until `ebbtide continue`."""
    with asking(url, key) as client:
        answer = client.pause_generation(mode)
        kept = answer["num_running"] + answer["num_retracted"] + answer["num_queued"]
        _show(answer, f"paused ({mode}): {kept} requests wait, {answer['num_aborted']} ended", as_json)


def go_on(url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """End a pause."""
    with asking(url, key) as client:
        answer = client.continue_generation()
        _show(answer, "generation goes on" if answer["changed"] else "generation was not paused", as_json)


def update(
    folder: Annotated[
        str, typer.Argument(help="A checkpoint folder that the server can read, or `tiny-storm`.")
    ],
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
    version: Annotated[
        str | None, typer.Option(help="Name of the new weights; unless given, the folder's.")
    ] = None,
    mode: Annotated[
        PauseMode, typer.Option(help="What becomes of running requests meanwhile.")
    ] = PauseMode.IN_PLACE,
    keep_cache: Annotated[bool, typer.Option(help="Keep prefixes that the old weights computed.")] = False,
) -> None:
    """Replace the weights under running requests by those of a folder."""
    path = str(Path(folder).resolve()) if Path(folder).exists() else folder
    with asking(url, key) as client:
        answer = client.update_weights_from_disk(
            path,
            weight_version=version or Path(path).name,
            pause_mode=mode,
            flush_cache=not keep_cache and mode is not PauseMode.IN_PLACE,
        )
        line = f"weights {answer['weight_version']}: {answer['num_tensors']} tensors"
        _show(
            answer,
            f"{line}, {size(answer['num_bytes'])}; requests stalled {answer['stall_ms']:.1f} ms",
            as_json,
        )
