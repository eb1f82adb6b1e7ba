"""What `mkdocs` asks while it builds the site: files from outside docs/, and pages made from the code."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from ebbtide.srt.entrypoints.middleware import access_of
from ebbtide.srt.entrypoints.openapi import openapi_document
from ebbtide.srt.server_args import SECTIONS, argument_specs

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(\]\()([^)\s:#]+)((?:#[^)\s]*)?\))")
MARKER = re.compile(r"^<!-- made: (\w+) -->$", re.M)
SOURCE = re.compile(r"\s*(?:Source: )?wire_api section [\d.]*\d\.?")
CODE = re.compile(r"^```.*?^```$", re.M | re.S)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages link to elsewhere in the repository, at the same places beneath the site."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    while pages:
        page = pages.pop()
        for target in _targets(page):
            if ROOT / "docs" not in target.parents:
                added = File.generated(config, _place(target), abs_src_path=str(target))
                if files.get_file_from_path(added.src_uri) is None:
                    files.append(added)
                    pages += [target] if target.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to where the site has their targets, and fill in what is made from the code."""
    here = Path(str(page.file.abs_src_path))

    def moved(match: re.Match[str]) -> str:
        target = _target(here, match[2])
        if target is None:
            return match[0]
        place = os.path.relpath(_place(target), Path(page.file.src_uri).parent)
        return match[1] + place + match[3]

    linked = _outside_code(markdown, lambda text: LINK.sub(moved, text))
    return MARKER.sub(lambda match: "\n".join(MADE[match[1]]()), linked)


def _outside_code(markdown: str, change: Any) -> str:
    """Change the text between blocks of code."""
    done, at = [], 0
    for block in CODE.finditer(markdown):
        done += [change(markdown[at : block.start()]), block[0]]
        at = block.end()
    return "".join([*done, change(markdown[at:])])


def _targets(page: Path) -> Iterator[Path]:
    for match in LINK.finditer(CODE.sub("", page.read_text(encoding="utf-8"))):
        target = _target(page, match[2])
        if target is not None:
            yield target


def _target(page: Path, link: str) -> Path | None:
    """The file that a link of a page leads to; None: there is none, and mkdocs says so."""
    target = (page.parent / link).resolve()
    if target.is_dir():
        target /= "README.md"
    return target if target.is_file() else None


def _place(file: Path) -> str:
    """Where the site has a file of the repository."""
    path = file.relative_to(ROOT).as_posix()
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def _http() -> Iterator[str]:
    """Every path by the kind of its requests, with its fields and answers."""
    document = openapi_document()
    schemas = document["components"]["schemas"]
    by_tag: dict[str, list[tuple[str, str, Any]]] = {}
    for path, item in document["paths"].items():
        for method, operation in item.items():
            by_tag.setdefault(operation["tags"][0], []).append((path, method.upper(), operation))
    for tag, operations in by_tag.items():
        yield f"## {tag[0].upper()}{tag[1:]}\n"
        for path, method, operation in operations:
            yield f"### `{method} {path}`\n"
            yield f"{_described(operation['summary'])} Key: {access_of(path).value}.\n"
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            yield from _fields("Body", body.get("schema", {}))
            query = {one["name"]: one["schema"] for one in operation.get("parameters", ())}
            yield from _fields("Parameter", {"properties": query})
            answer = operation["responses"]["200"].get("content", {}).get("application/json", {})
            yield from _fields("Answer", answer.get("schema", {}))
    yield "## Objects\n"
    for name, schema in sorted(schemas.items()):
        yield f"### {name}\n"
        yield f"{_described(schema.get('description', ''))}\n"
        yield from _fields("Field", schema)


def _described(docstring: str) -> str:
    """A docstring as Markdown: what is indented in it is a list, and what it was specified by is left out."""
    text = SOURCE.sub("", inspect.cleandoc(docstring))
    return re.sub(r"^    (?=\S)", "- ", text.replace(":\n    ", ":\n\n    "), flags=re.M)


def _fields(heading: str, schema: Any) -> Iterator[str]:
    """A table of an object's fields; one line for what is no object, or has a name."""
    if not schema.get("properties"):
        # An answer may have no body.
        if schema and "properties" not in schema:
            yield f"{heading}: {_type(schema)}\n"
        return
    yield f"| {heading} | type | default |\n|---|---|---|"
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        default = (
            "required"
            if name in required
            else f"`{json.dumps(field['default'])}`"
            if "default" in field
            else ""
        )
        yield f"| `{name}` | {_type(field)} | {default} |"
    yield ""


def _type(schema: Any) -> str:
    """A schema in one line."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        parts = [part for one in schema["anyOf"] for part in _type(one).split(" or ")]
        return " or ".join(dict.fromkeys(parts))
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array" and isinstance(schema.get("items"), dict):
        return f"list of {_type(schema['items'])}".replace(" or ", "/")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _arguments() -> Iterator[str]:
    """Every argument of a server, by section."""
    for spec in argument_specs():
        if spec.name in SECTIONS:
            yield f"\n## {SECTIONS[spec.name]}\n\n| | |\n|---|---|"
        flags = ", ".join(f"`{flag}`" for flag in spec.flags)
        choices = (
            f" One of {', '.join(f'`{choice}`' for choice in spec.arg.choices)}." if spec.arg.choices else ""
        )
        text = (spec.shown_help + choices).replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")
        yield f"| {flags} | {text} |"


MADE = {"http": _http, "arguments": _arguments}
