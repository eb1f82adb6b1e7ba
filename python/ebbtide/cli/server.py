"""Commands that call a server: to show or change its memory, weights and requests, and to generate."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ebbtide.client import DEFAULT_URL, Client
from ebbtide.srt.errors import EbbtideError, RequestRejected
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
_SIZES = ("resident", "in host memory")


@contextmanager
def asking(url: str, key: str | None) -> Generator[Client, None, None]:
    """A client of the server. Errors end the command with one line on stderr."""
    try:
        admin_key = os.environ.get("EBBTIDE_ADMIN_API_KEY", key)
        with Client(url, api_key=admin_key if key is None else key, admin_api_key=admin_key) as client:
            yield client
    except RequestRejected as error:
        where = "; give it by EBBTIDE_API_KEY or --api-key, that for control by EBBTIDE_ADMIN_API_KEY"
        fail(f"{error}{where if error.status == 401 else ''}")
    except (EbbtideError, ValueError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def fail(message: str, status: int = 1) -> None:
    """End the command with a message on stderr and this exit status."""
    print(f"ebbtide: {message}", file=sys.stderr)
    raise typer.Exit(status)


def why_requests_wait(memory: Mapping[str, Any]) -> str:
    """Why no requests run, and the commands that change that, in their order.

    Args:
        memory: a reply of `memory_occupation`.
    """
    tags = memory["tags"]
    steps = {
        "`ebbtide resume`": "released" in (tags["weights"]["state"], tags["kv_cache"]["state"]),
        "`ebbtide update FOLDER`": tags["weights"]["content"] == "stale",
        "`ebbtide continue`": memory["generation"]["state"] == "paused",
    }
    commands = ", then ".join(command for command, is_needed in steps.items() if is_needed)
    return f"{memory['reason']}; to go on: {commands}" if commands else str(memory["reason"])


# Seconds of waiting before the reason is shown, and between checks of the reason.
PATIENCE_S = 2.0


@contextmanager
def telling_why_it_waits(client: Client) -> Generator[None, None, None]:
    """In this context, print on stderr why the server cannot run requests, and again when that changes."""
    ended = Event()

    def watch() -> None:
        said = ""
        while not ended.wait(PATIENCE_S):
            with suppress(EbbtideError):  # The command itself meets the error too.
                memory = client.memory_occupation()
                reason = "" if memory["can_run"] else why_requests_wait(memory)
                if reason not in ("", said) and not ended.is_set():
                    print(f"\nwaiting: {reason}", file=sys.stderr, flush=True)
                said = reason

    # Not joined: its question to a server that hangs may never be answered.
    Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def size(num_bytes: float) -> str:
    """Bytes in readable units, powers of 1000."""
    for unit in ("B", "KB", "MB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


def table_of(*headings: str, right: Collection[str] = ()) -> Table:
    """An empty table. Columns whose headings are in `right` are right-aligned."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left")
    return table


def sizes(by_tag: dict[str, Any]) -> str:
    """Bytes of each tag that has any, as text."""
    return (
        ", ".join(f"{tag} {size(num_bytes)}" for tag, num_bytes in by_tag.items() if num_bytes) or "nothing"
    )


Tags = Annotated[list[MemoryTag] | None, typer.Argument(help="Which memory; none: all of it.")]


def _show(answer: dict[str, Any], line: str, as_json: bool) -> None:
    console.print_json(json.dumps(answer)) if as_json else console.print(line, soft_wrap=True)


def status(url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Show the model, its weight version, its requests and why they wait, and its memory by tag."""
    with asking(url, key) as client:
        model, memory, loads = client.model_info(), client.memory_occupation(), client.loads()
        if as_json:
            console.print_json(json.dumps({"model": model, "memory": memory, "loads": loads}))
            return
        state = (
            "[green]serving[/]" if memory["can_run"] else f"[yellow]waiting[/]: {why_requests_wait(memory)}"
        )
        console.print(f"[bold]{model['served_model_name']}[/] at {client.url}: {state}", soft_wrap=True)
        weights = f"weights [bold]{model['weight_version']}[/] from {model['model_path']}"
        console.print(weights, soft_wrap=True)
        totals = loads["loads"]
        running, waiting = (sum(one[f"num_{kind}_reqs"] for one in totals) for kind in ("running", "waiting"))
        console.print(f"requests {running} running, {waiting} waiting")
        table = table_of("memory", "state", "resident", "in host memory", right=_SIZES)
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
    """Give memory back to the system. Running requests wait and lose nothing."""
    with asking(url, key) as client:
        answer = client.release_memory_occupation(tags, backup=backup)
        line = f"freed {sizes(answer['freed_bytes'])} in {answer['duration_ms']:.1f} ms"
        waiting = answer["num_retracted"] + answer["num_parked"]
        _show(answer, line + (f"; {waiting} requests wait" if waiting else ""), as_json)


def park(url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Release the KV cache, but keep the KV of running requests in host memory, so that they can go on."""
    with asking(url, key) as client:
        answer = client.release_memory_occupation([MemoryTag.KV_CACHE], preserve="live")
        line = f"freed {sizes(answer['freed_bytes'])}; parked {answer['num_parked']} requests"
        _show(answer, f"{line} in {size(answer['parked_bytes'])} of host memory", as_json)


def resume(tags: Tags = None, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Take released memory again, at the same addresses."""
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
    """Pause generation until `ebbtide continue`."""
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
    """Replace the weights by those of a folder, while requests run."""
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


# ---------------------------------------------------------------------------------------- chat and generate

# Colours of weight versions, in order of appearance.
COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")

MaxTokens = Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)]
Temperature = Annotated[float, typer.Option(help="0 is greedy.", min=0.0)]


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to go on from; `-` reads it from standard input.")],
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 1.0,
) -> None:
    """Continue a text."""
    text = sys.stdin.read() if prompt == "-" else prompt
    params = {"max_new_tokens": max_tokens, "temperature": temperature}
    with asking(url, key) as client, telling_why_it_waits(client):
        if as_json:
            console.print_json(json.dumps(client.generate(text, params)))
        else:
            ColouredAnswer().show(client.generate(text, params, stream=True))


def chat(
    url: Url = DEFAULT_URL,
    key: Key = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    system: Annotated[str | None, typer.Option(help="System message to begin with.")] = None,
) -> None:
    """Chat with the model. Each colour is a version of the weights. Ctrl-D ends the chat."""
    said: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    with asking(url, key) as client:
        model = client.model_info()
        server = f"{model['served_model_name']}, weights {model['weight_version']}"
        # On stderr, so that stdout has the answers only.
        note = Console(stderr=True, highlight=False)
        note.print(f"{server}. Ctrl-C ends an answer, Ctrl-D the conversation.", style="dim")
        answer = ColouredAnswer()
        while (question := _ask()) is not None:
            if not question:
                continue
            said.append({"role": "user", "content": question})
            params = {"max_new_tokens": max_tokens, "temperature": temperature}
            try:
                prompt_ids = client.tokenize(messages=said)
                chunks = client.generate(input_ids=prompt_ids, sampling_params=params, stream=True)
                with telling_why_it_waits(client):
                    text = answer.show(chunks)
            except KeyboardInterrupt:
                console.print()
                text = answer.text
            said.append({"role": "assistant", "content": text})


def _ask() -> str | None:
    try:
        return console.input("[bold]> [/]" if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


class ColouredAnswer:
    """Shows a stream, each token in the colour of its weight version."""

    def __init__(self) -> None:
        self.text = ""
        self._colours: dict[str, str] = {}

    def show(self, chunks: Iterator[Any]) -> str:
        """Print the chunks as they come; returns the whole text."""
        self.text, met = "", []
        for chunk in chunks:
            meta = chunk["meta_info"]
            new, self.text = chunk["text"][len(self.text) :], chunk["text"]
            version = meta["weight_versions"][-1]["version"] if meta["weight_versions"] else ""
            if version not in self._colours:
                self._colours[version] = COLOURS[len(self._colours) % len(COLOURS)]
            if version not in met:
                met.append(version)
            console.print(Text(new, style=self._colours[version]), end="", soft_wrap=True)
        console.print()
        legend = Text("weights ", style="dim")
        for version in met:
            legend.append(f"{version} ", style=self._colours[version])
        Console(stderr=True).print(legend)
        return self.text


# --------------------------------------------------------------------------------------------------- top

NUM_OPERATIONS = 12
BAR_WIDTH = 30


def top(
    url: Url = DEFAULT_URL,
    key: Key = None,
    once: Annotated[bool, typer.Option("--once", help="Print one picture, and end.")] = False,
) -> None:
    """Watch a server live: requests, memory by tag, versions, latest operations. Ctrl-C ends it."""
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
    """The screen of `ebbtide top`, made from dashboard events. `sample`: the latest one; empty: none yet."""

    def __init__(self) -> None:
        self.sample: dict[str, Any] = {}
        self._largest: dict[str, int] = {}
        self._operations: deque[dict[str, Any]] = deque(maxlen=NUM_OPERATIONS)

    def take(self, event: Mapping[str, Any]) -> None:
        """Take in an event of `/dashboard/events`."""
        history = event.get("history", {})
        self._operations.extend(history.get("operations", ()))
        for sample in (*history.get("samples", ())[-1:], *filter(None, [event.get("sample")])):
            self.sample = sample
            for tag, num_bytes in sample["resident_bytes"].items():
                self._largest[tag] = max(num_bytes, self._largest.get(tag, 1))
        if "operation" in event:
            self._operations.append(event["operation"])

    def draw(self, url: str) -> Group:
        """The whole screen. There must be a sample."""
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
        table = table_of("memory", "", "resident", "in host memory", right=_SIZES)
        for tag, num_bytes in self.sample["resident_bytes"].items():
            width = round(BAR_WIDTH * num_bytes / self._largest[tag])
            bar = Text("█" * width, "cyan") + Text("░" * (BAR_WIDTH - width), "dim")
            table.add_row(tag, bar, size(num_bytes), size(self.sample["backup_bytes"][tag]))
        return table

    def _past(self) -> Table:
        table = table_of("ago", "operation", "took", "stall", "outcome", right=("ago", "took", "stall"))
        for one in reversed(self._operations):
            ago_s = max(0.0, time.time() - one["started_s"])
            stall = f"{one['stall_ms']:.1f} ms" if "stall_ms" in one else ""
            outcome = one["outcome"] if one["outcome"] == "done" else f"{one['outcome']}: {one['message']}"
            table.add_row(
                f"{ago_s:.0f} s", one["operation"], f"{1000 * one['duration_s']:.1f} ms", stall, outcome
            )
        return table
