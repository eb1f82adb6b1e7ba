"""Routes, declared at the methods that answer them. The application and the OpenAPI document read them."""

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
        methods: the HTTP methods.
        summary: the first line of the method's docstring, for the OpenAPI document.
        tag: its section in the OpenAPI document; None: for pages of a browser, which are not in there.
        takes: type of the body, or of the query of a GET; None: there is neither.
        reply: type of the answer with status 200; None: its body is empty.
        event: type of a stream's events, or a description of them; None: there is no stream.
        media_type: of the answer.
        error: type of the body of errors.
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
    """Declare the route that a method answers. The first line of its docstring is the summary.

    `methods`: separated by spaces, such as "POST PUT". `about`: the other fields of `Route`.
    """

    def declare(method: F) -> F:
        summary = (method.__doc__ or "").partition("\n")[0]
        method.route = Route(tuple(methods.split()), paths, summary, **about)  # type: ignore[attr-defined]
        return method

    return declare


def declared(owner: type) -> dict[str, Route]:
    """The routes of a class, by the name of the method."""
    return {name: member.route for name, member in vars(owner).items() if hasattr(member, "route")}


def endpoints(part: object) -> Iterator[tuple[Route, Any]]:
    """The routes of an object, each with the method that answers it."""
    for name, known in declared(type(part)).items():
        yield known, getattr(part, name)
