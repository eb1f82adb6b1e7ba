"""Descriptions of the fields of `ServerArgs` and their flags, and the table of SGLang's arguments.

A row of `sglang_arguments.tsv` has an argument's name, its kind (`Kind`), the type of its values on a command
line, SGLang's default as JSON, and further flags. Source: wire_api section 7; SGLang 0.5.23, and older names
that RL frameworks still pass.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from enum import StrEnum
from importlib import resources
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin


@dataclass(frozen=True, slots=True)
class Arg:
    """Facts about a field, besides its type and default, for the command line and the checks.

    Attributes:
        help: one line.
        aliases: further flags.
        choices: the allowed values; empty: any.
        minimum: the smallest allowed number; None: no limit.
        also: a number below `minimum` that is allowed too; None: there is none.
    """

    help: str
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    also: int | None = None


def arg(default: Any, help: str, **facts: Any) -> Any:
    """Make a field of `ServerArgs` with this default. `facts`: further attributes of its `Arg`."""
    return field(default=default, metadata={"arg": Arg(help, **facts)})


@dataclass(frozen=True, slots=True)
class ArgumentSpec:
    """One of Ebbtide's own arguments, for the command line and the checks.

    Attributes:
        types: the types that a value, or an item of a list, may have.
        is_list: whether a list is allowed.
        optional: whether None is allowed.
        default: `dataclasses.MISSING`: the argument is required.
    """

    name: str
    arg: Arg
    types: tuple[type, ...]
    is_list: bool
    optional: bool
    default: Any
    flags: tuple[str, ...]

    @property
    def shown_help(self) -> str:
        """The help, with the default if the text does not contain it."""
        says_nothing = self.default in (None, dataclasses.MISSING) or bool in self.types
        if says_nothing or "(default" in self.arg.help:
            return self.arg.help
        return f"{self.arg.help.removesuffix('.')} (default: {self.default})."

    def argparse_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"help": self.shown_help}
        if self.default is dataclasses.MISSING:
            options["required"] = True
        else:
            options["default"] = self.default
        if bool in self.types:
            # Flags that are on by default also get a `--no-...` form.
            action = argparse.BooleanOptionalAction if self.default else "store_true"
            return {**options, "action": action}
        options["type"] = self.types[0]
        if self.is_list:
            options["nargs"] = "+"
        if self.arg.choices:
            options["choices"] = list(self.arg.choices)
        return options


def argument_spec(entry: dataclasses.Field[Any], hint: Any) -> ArgumentSpec:
    """Make the spec of a field. `hint`: its annotation."""
    members = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    lists = [member for member in members if get_origin(member) is list]
    scalars = tuple(member for member in members if member is not type(None) and member not in lists)
    items = tuple(get_args(member)[0] for member in lists)
    return ArgumentSpec(
        name=entry.name,
        arg=entry.metadata["arg"],
        types=scalars or items,
        is_list=bool(lists),
        optional=type(None) in members,
        default=entry.default,
        flags=(_flag(entry.name), *entry.metadata["arg"].aliases),
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class Kind(StrEnum):
    """How a value other than the default is treated."""

    # It sets one of Ebbtide's own arguments.
    ALIAS = "alias"
    # It is rejected, since ignoring it would change results or memory, or hang a client.
    DEFAULT_ONLY = "default_only"
    # It is ignored, with one warning.
    NO_EFFECT = "no_effect"
    # It is accepted, since Ebbtide always does what it asks for.
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class SglangArgument:
    """A row of the table.

    Attributes:
        stands_for: the argument that an alias is another name of; empty for the other kinds.
        value_type: `bool` and `switch` are flags without a value, a switch also as `--no-...`; else `int`,
            `float`, `str`, or a list of those as `list[int]`.
    """

    name: str
    kind: Kind
    stands_for: str
    value_type: str
    default: Any
    flags: tuple[str, ...]

    def argparse_options(self) -> dict[str, Any]:
        # Hidden: `--help` shows only Ebbtide's own arguments.
        options: dict[str, Any] = {"default": self.default, "help": argparse.SUPPRESS}
        if self.value_type == "bool":
            return {**options, "action": "store_true"}
        if self.value_type == "switch":
            return {**options, "action": argparse.BooleanOptionalAction}
        item_type = self.value_type.removeprefix("list[").removesuffix("]")
        if item_type != self.value_type:
            options["nargs"] = "*"
        return {**options, "type": {"int": int, "float": float, "str": str}[item_type]}


@functools.cache
def sglang_arguments() -> Mapping[str, SglangArgument]:
    """Read the table: name → argument."""
    _, *rows = resources.files(__package__).joinpath("sglang_arguments.tsv").read_text("utf-8").splitlines()
    return {argument.name: argument for argument in map(_parsed, rows)}


def _parsed(row: str) -> SglangArgument:
    name, becomes, value_type, default, *aliases = row.split("\t")
    kind, _, stands_for = becomes.partition(":")
    return SglangArgument(
        name=name,
        kind=Kind(kind),
        stands_for=stands_for,
        value_type=value_type,
        default=json.loads(default),
        flags=(_flag(name), *" ".join(aliases).split()),
    )


def _field_of(argument: SglangArgument) -> Any:
    if isinstance(argument.default, list):
        return field(default_factory=argument.default.copy, kw_only=True)
    return field(default=argument.default, kw_only=True)


if TYPE_CHECKING:

    class SglangArguments:
        """Has a keyword field for each row. Types are not checked, since frameworks pass various ones."""

else:
    SglangArguments = make_dataclass(
        "SglangArguments",
        [(argument.name, Any, _field_of(argument)) for argument in sglang_arguments().values()],
        namespace={"__module__": __name__, "__doc__": "A keyword field for each row, of any type."},
    )
