"""Routes, declared at the methods that answer them: the application and the document read the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from ebbtide.srt.entrypoints import bodies

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Route:
    """One path, or several that mean the same.

    Attributes:
        tag: its chapter in the document; None: it is for people, and not in there.
        takes: type of the body, or of the query of a GET; None if there is neither.
        reply: type of the answer with status 200; None if its body is empty.
        event: type of an event, where a stream may be asked for; or what the events are, in words.
        media_type: of an answer that is no JSON.
        error: type of the body of a refusal or failure.
    """

    methods: tuple[str, ...]
    paths: tuple[str, ...]
    summary: str
    tag: str | None = None
    takes: Any = None
    reply: Any = None
    event: Any = None
    media_type: str = "application/json"
    error: Any = bodies.Error


def route(methods: str, *paths: str, **about: Any) -> Callable[[F], F]:
    """Declare what a method answers, by `methods` such as "POST PUT"; `about`: see `Route`.

    Its docstring begins with the summary.
    """

    def declare(method: F) -> F:
        summary = (method.__doc__ or "").partition("\n")[0]
        method.route = Route(tuple(methods.split()), paths, summary, **about)  # type: ignore[attr-defined]
        return method

    return declare


def declared(owner: type) -> dict[str, Route]:
    """The routes of a class by the names of their methods."""
    return {name: member.route for name, member in vars(owner).items() if hasattr(member, "route")}


def endpoints(part: object) -> Iterator[tuple[Route, Any]]:
    """The routes of an object, each with the method that answers it."""
    for name, known in declared(type(part)).items():
        yield known, getattr(part, name)
