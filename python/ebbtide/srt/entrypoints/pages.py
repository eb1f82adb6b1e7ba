"""Pages for browsers, which load nothing from other sites: `/`, the API reference `/docs`, the dashboard."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from importlib import resources
from pathlib import Path
from typing import Final

from fastapi.openapi.docs import get_swagger_ui_html
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response, StreamingResponse

from ebbtide.srt.entrypoints.http_answers import Json, server_event
from ebbtide.srt.entrypoints.openapi import openapi_document
from ebbtide.srt.entrypoints.routing import route
from ebbtide.srt.entrypoints.service import EngineService

_LINKS = (
    ("dashboard", "memory, weights and requests, live"),
    ("docs", "the API reference: every path with its fields and answers, and forms to try them"),
    ("openapi.json", "the same as an OpenAPI document"),
    ("model_info", "the model and the version of its weights"),
    ("memory_occupation", "memory by tag"),
    ("v1/models", "the model and its adapters, for OpenAI clients"),
    ("v1/loads", "the load of every replica"),
    ("metrics", "for Prometheus, with --enable-metrics"),
    ("health", "whether all processes are alive"),
)
_ITEMS = "\n".join(f'<li><a href="{path}">/{path}</a>: {what}</li>' for path, what in _LINKS)
_ROOT = f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Ebbtide</title>
<style>body {{ font: 16px/1.6 sans-serif; max-width: 40em; margin: 3em auto; padding: 0 1em }}</style>
<h1>Ebbtide</h1>
<p>This is a server of Ebbtide, an inference engine for reinforcement learning.</p>
<ul>
{_ITEMS}
</ul>
</html>
"""

_ASSETS: Final = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")
# Swagger's page has an inline script, and its style contains images as data URLs.
_FROM_HERE_ONLY: Final = {
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'"
}
# The dashboard's script and style are inline, and it only connects to its own server.
_NOTHING_FROM_OUTSIDE: Final = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "frame-ancestors 'none'"
)


class StaticPages:
    """Pages without data of the engine, and the OpenAPI document that `/docs` shows."""

    def __init__(self, service: EngineService) -> None:
        self._service = service

    @route("GET", "/")
    async def root(self, request: Request) -> Response:
        return HTMLResponse(_ROOT, headers=_FROM_HERE_ONLY)

    @route("GET", "/docs")
    async def reference(self, request: Request) -> Response:
        page = get_swagger_ui_html(
            # Relative, since a proxy may serve this below another path.
            openapi_url="openapi.json",
            title="Ebbtide",
            swagger_js_url="docs/swagger-ui-bundle.js",
            swagger_css_url="docs/swagger-ui.css",
            swagger_favicon_url="docs/favicon.png",
        )
        page.headers.update(_FROM_HERE_ONLY)
        return page

    @route("GET", "/docs/{name}")
    async def asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _ASSETS:
            raise HTTPException(404)
        # Only the files of this package are used, not its application.
        return FileResponse(Path(str(resources.files("fastapi_offline"))) / "static" / name)

    @route("GET", "/openapi.json")
    async def document(self, request: Request) -> Response:
        root = self._service.config.server_args.root_path
        return Json({**_document(), "servers": [{"url": root}]} if root else _document())


_document = functools.cache(openapi_document)


class Dashboard:
    """Serves the dashboard, and the events of the engine's timeline that it shows."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._page = resources.files(__package__).joinpath("dashboard.html").read_text(encoding="utf-8")

    @route("GET", "/dashboard")
    async def show(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers={"Content-Security-Policy": _NOTHING_FROM_OUTSIDE})

    @route("GET", "/dashboard/events")
    async def events(self, request: Request) -> Response:
        return StreamingResponse(self._encoded(), media_type="text/event-stream")

    async def _encoded(self) -> AsyncIterator[bytes]:
        async for event in self._service.timeline.events():
            yield server_event(event)
