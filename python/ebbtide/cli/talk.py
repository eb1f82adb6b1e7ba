"""Commands that have a server generate."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ebbtide.cli.server import DEFAULT_URL, AsJson, Key, Url, asking, console

# One for each version of the weights, in the order in which they are met.
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
    with asking(url, key) as client:
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
    """Talk with the model. Each colour is a version of the weights; Ctrl-D ends it."""
    said: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    with asking(url, key) as client:
        model = client.model_info()
        server = f"{model['served_model_name']}, weights {model['weight_version']}"
        # Not where the answers go.
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
                text = answer.show(client.generate(input_ids=prompt_ids, sampling_params=params, stream=True))
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
    """Shows a stream, each token in the colour of the weights that sampled it."""

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
