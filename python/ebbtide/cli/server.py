"""The server that a command asks, and how its refusals and failures are shown."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console

from ebbtide.client import DEFAULT_URL, Client
from ebbtide.srt.errors import EbbtideError

Url: TypeAlias = Annotated[
    str,
    typer.Option("--url", "-u", envvar="EBBTIDE_URL", help="Where the server is.", rich_help_panel="Server"),
]
Key: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar=["EBBTIDE_ADMIN_API_KEY", "EBBTIDE_API_KEY"],
        help="Its key, if it has one: the admin key for control.",
        rich_help_panel="Server",
    ),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]

console = Console(highlight=False)


@contextmanager
def asking(url: str, key: str | None) -> Generator[Client, None, None]:
    """A client of the server; what it refuses, or how it fails, ends the command with one line."""
    try:
        with Client(url, api_key=key) as client:
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
