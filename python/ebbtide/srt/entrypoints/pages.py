"""What a browser is shown: links at `/`, and the HTTP reference at `/docs`. Neither needs another site."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Final

from fastapi.openapi.docs import get_swagger_ui_html
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response

from ebbtide.srt.entrypoints.http_answers import Endpoint

_LINKS = (
    ("dashboard", "memory, weights and requests, live"),
    ("docs", "every path, its fields and answers; a form to try it"),
    ("openapi.json", "the same for programs"),
    ("model_info", "the model and the version of its weights"),
    ("memory_occupation", "memory by tag"),
    ("v1/models", "what OpenAI clients ask first"),
    ("v1/loads", "what there is to do"),
    ("metrics", "for Prometheus, with --enable-metrics"),
    ("health", "whether all processes live"),
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
# Swagger's page begins with a script of its own, and has images within its style.
_FROM_HERE_ONLY: Final = {
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'"
}


def pages() -> dict[str, Endpoint]:
    """The pages by path, all of them GET. None shows anything of the engine."""
    return {"/": _root, "/docs": _reference, "/docs/{name}": _asset}


async def _root(request: Request) -> Response:
    return HTMLResponse(_ROOT, headers=_FROM_HERE_ONLY)


async def _reference(request: Request) -> Response:
    page = get_swagger_ui_html(
        # Relative: the server may be below another path of a proxy.
        openapi_url="openapi.json",
        title="Ebbtide",
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon.png",
    )
    page.headers.update(_FROM_HERE_ONLY)
    return page


async def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _ASSETS:
        raise HTTPException(404)
    # The package's files alone are used.
    return FileResponse(Path(str(resources.files("fastapi_offline"))) / "static" / name)
