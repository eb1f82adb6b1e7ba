"""How a field of `ServerArgs` is described, and how it becomes a flag of the command line."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import UnionType
from typing import Any, get_args, get_origin


@dataclass(frozen=True, slots=True)
class Arg:
    """What the command line and the checks need to know of a field beyond its type and default.

    Attributes:
        help: one line.
        aliases: further flags.
        choices: the only values taken.
        minimum: the least number taken.
        also: a number below `minimum` that is taken too.
    """

    help: str
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    also: int | None = None


@dataclass(frozen=True, slots=True)
class ArgumentSpec:
    """A field of Ebbtide's own as the command line and the checks see it.

    Attributes:
        types: the plain types a value may have; a list's item type for lists.
        is_list: whether a list is taken.
        optional: whether None is taken.
        default: `dataclasses.MISSING` where the field is required.
    """

    name: str
    arg: Arg
    types: tuple[type, ...]
    is_list: bool
    optional: bool
    default: Any

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        return (self.flag, *self.arg.aliases)

    @property
    def shown_help(self) -> str:
        """The help, with the default where the text does not give it."""
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
            return {**options, "action": "store_true"}
        options["type"] = self.types[0]
        if self.is_list:
            options["nargs"] = "+"
        if self.arg.choices:
            options["choices"] = list(self.arg.choices)
        return options


def argument_spec(entry: dataclasses.Field[Any], hint: Any) -> ArgumentSpec:
    """The argument of a field with this annotation, `Annotated[type, Arg(...)]`."""
    plain, arg = get_args(hint)
    members = get_args(plain) if isinstance(plain, UnionType) else (plain,)
    lists = [member for member in members if get_origin(member) is list]
    scalars = tuple(member for member in members if member is not type(None) and member not in lists)
    items = tuple(get_args(member)[0] for member in lists)
    return ArgumentSpec(
        name=entry.name,
        arg=arg,
        types=scalars or items,
        is_list=bool(lists),
        optional=type(None) in members,
        default=entry.default,
    )
