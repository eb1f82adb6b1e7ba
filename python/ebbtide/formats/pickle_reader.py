"""Reads pickles safely: nothing that a pickle names is imported or called.

Weight payloads need containers, numbers, strings, a few globals, and calls that rebuild tensors. This reader
accepts only these. The caller's `resolve` function decides what globals and their calls stand for.
"""

import pickletools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.slices import Slices, finish

# A tensor takes about 40 opcodes, so this is enough for 100,000 tensors. It bounds the time and memory for
# hostile payloads, such as those of many empty containers.
MAX_OPCODES: Final = 4_000_000
MAX_PROTOCOL: Final = 5
# Opcodes of a slice: about half a millisecond of work.
SLICE_OPCODES: Final = 256

# SETITEMS and STOP: the opcodes after the last value of a pickled dictionary.
_LAST: Final = b"u."

_OPCODE_NAMES: Final = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}


@dataclass(frozen=True, slots=True)
class Global:
    """A global that a payload may use.

    Attributes:
        call: called with the arguments when the payload calls it; None: it may only be an argument.
        is_record: whether instances may be made by `cls.__new__(cls)` and one state dictionary, which is how
            dataclasses are pickled.
        is_pure: whether `call` has no side effects, and its result depends on the arguments only.
    """

    name: str
    call: Callable[[tuple[object, ...]], object] | None = None
    is_record: bool = False
    is_pure: bool = False


@dataclass(slots=True, eq=False)
class Record:
    """An instance of a record class. `fields`: as pickled, unchecked; None: not read yet."""

    name: str
    fields: dict[str, object] | None = None


@dataclass(slots=True)
class Budget:
    """Number of opcodes that may still be read, in all pickles of a payload, which may be nested."""

    num_opcodes: int = MAX_OPCODES


class Tails(Protocol):
    """A cache of lists at the end of pickles, each the last value of a dictionary.

    Only lists made by pure calls are cached, so that the same bytes with an equal memo give the same list.
    """

    def find(self, data: bytes, memo: Mapping[int, object]) -> object | None:
        """Look up the cached object for the list that `data` begins with; None: the list must be read.

        Args:
            data: the rest of the pickle.
            memo: the pickle's memo before it.
        """

    def keep(self, data: bytes, memo: Mapping[int, object], read: set[int], items: list[object]) -> object:
        """Cache a list; returns the object that replaces it in the pickle's value.

        Args:
            data, memo: as of `find`.
            read: the indices of the memo that the list refers to.
            items: of the list.
        """


def read_pickle(data: bytes, resolve: Callable[[str, str], object]) -> object:
    """Read a pickle; nothing that it names is imported or called. Source: wire_api section 4.4.

    The value consists of None, bool, int, float, str, bytes, list, tuple, dict, `Record`, and what `resolve`
    and the `Global.call`s return.

    Args:
        resolve: called with module and name of each global; returns what it stands for.

    Raises:
        RequestRejected: the pickle is broken, or has an opcode or a global that is not accepted.
    """
    return finish(read_by_slices(data, resolve))


def read_by_slices(
    data: bytes,
    resolve: Callable[[str, str], object],
    budget: Budget | None = None,
    tails: Tails | None = None,
) -> Slices[object]:
    """As `read_pickle`, in slices: yields the number of bytes read after each `SLICE_OPCODES` opcodes.

    Args:
        budget: of opcodes, shared with other pickles; None: a new one.
        tails: cache of lists at the end; None: none.
    """
    return _Reader(data, resolve, tails).read(budget if budget is not None else Budget())


class _Stop(Exception):
    """The STOP opcode was reached."""


@dataclass(slots=True, eq=False)
class _OpenList:
    """The first list of a pickle with items; it is cached if it turns out to be at the end.

    Attributes:
        items: the items so far: the reader's stack above the list's mark.
        start: position of the first item in the data.
        memo: a copy of the memo at that position.
        read: the memo's indices that were read since.
        is_pure: whether all calls since were pure.
    """

    items: list[object]
    start: int
    memo: dict[int, object]
    read: set[int] = field(default_factory=set)
    is_pure: bool = True


class _Reader:
    __slots__ = ("data", "marks", "memo", "open_list", "position", "resolve", "stack", "tails")

    def __init__(
        self, data: bytes, resolve: Callable[[str, str], object], tails: Tails | None = None
    ) -> None:
        self.data = data
        self.resolve = resolve
        self.tails = tails
        self.open_list: _OpenList | None = None
        self.position = 0
        self.stack: list[object] = []
        self.marks: list[list[object]] = []
        # A dictionary, not a list: the sender chooses the indices, and a large one must not allocate memory.
        self.memo: dict[int, object] = {}

    def read(self, budget: Budget) -> Slices[object]:
        data, handlers = self.data, _HANDLERS
        start = yielded = num_left = 0
        try:
            while budget.num_opcodes > 0:
                # Slices end at multiples of `SLICE_OPCODES` of the shared budget, not of each short pickle.
                num_left = (budget.num_opcodes - 1) % SLICE_OPCODES + 1
                budget.num_opcodes -= num_left
                while num_left:
                    num_left -= 1
                    start = self.position
                    opcode = data[start]
                    self.position = start + 1
                    handler = handlers.get(opcode)
                    if handler is None:
                        raise RequestRejected(_unknown_opcode(opcode, start))
                    handler(self)
                yield self.position - yielded
                yielded = self.position
        except _Stop:
            budget.num_opcodes += num_left
            if num_left == 0:
                yield self.position - yielded
            return self._result()
        except (IndexError, KeyError, ValueError) as error:
            # Truncated input, an empty stack, a missing memo entry or a string that is not UTF-8.
            raise RequestRejected(f"the payload is a broken pickle: byte {start} cannot be read") from error
        raise RequestRejected(f"the payload has more than {MAX_OPCODES} pickle opcodes")

    def _result(self) -> object:
        if len(self.stack) != 1 or self.marks:
            raise RequestRejected("the payload is a broken pickle: it does not end with exactly one value")
        return self.stack[0]

    # Input. Lengths are compared with the bytes left, so that a large one cannot allocate memory.

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.data):
            raise IndexError
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def short_text(self) -> None:
        # Without calls of other methods, since payloads consist mostly of short strings.
        position = self.position
        start = position + 1
        end = self.position = start + self.data[position]
        if end > len(self.data):
            raise IndexError
        self.stack.append(str(self.data[start:end], "utf-8"))

    def byte(self) -> None:
        position = self.position
        self.position = position + 1
        self.stack.append(self.data[position])

    def memoized(self) -> None:
        position = self.position
        self.position = position + 1
        self.recall(self.data[position])

    def recall(self, index: int) -> None:
        self.stack.append(self.memo[index])
        if self.open_list is not None:
            self.open_list.read.add(index)

    def memoize_next(self) -> None:
        memo = self.memo
        memo[len(memo)] = self.stack[-1]

    def line(self) -> str:
        end = self.data.index(b"\n", self.position)
        piece = self.data[self.position : end]
        self.position = end + 1
        return piece.decode()

    def pop_to_mark(self) -> list[object]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    # Handlers with more to do than push one value.

    def proto(self) -> None:
        protocol = self.number(1)
        if protocol > MAX_PROTOCOL:
            raise RequestRejected(
                f"the payload has pickle protocol {protocol}, the highest known is {MAX_PROTOCOL}"
            )

    def frame(self) -> None:
        self.take(8)  # Frames matter only for reading a stream.

    def stop(self) -> None:
        raise _Stop

    def mark(self) -> None:
        stack = self.stack
        items: list[object] = []
        if self.tails is not None and self.open_list is None and stack and _is_empty_list(stack[-1]):
            found = self.tails.find(self.data[self.position :], self.memo)
            if found is not None:
                stack[-1] = found
                self.position = len(self.data) - len(_LAST)
                return
            self.open_list = _OpenList(items, self.position, dict(self.memo))
        self.marks.append(stack)
        self.stack = items

    def memoize(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise IndexError
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.stack.append(items)

    def append(self, items: list[object]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise RequestRejected(f"the payload appends to a {_kind(target)}; only lists may be appended to")
        target.extend(items)

    def append_marked(self) -> None:
        items = self.pop_to_mark()
        self.append(items)
        opened, tails = self.open_list, self.tails
        if tails is None or opened is None or items is not opened.items or not opened.is_pure:
            return
        if self.data[self.position :] == _LAST:
            self.stack[-1] = tails.keep(self.data[opened.start :], opened.memo, opened.read, items)

    def set_items(self, items: list[object]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise RequestRejected(
                f"the payload sets items of a {_kind(target)}; only dictionaries have pairs set"
            )
        for key, value in zip(items[::2], items[1::2], strict=True):
            # The sender could choose keys that take long to hash: nested tuples take exponential time.
            if type(key) is not str:
                raise RequestRejected(f"the payload has a dictionary key of type {_kind(key)}, expected str")
            target[key] = value

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise RequestRejected(
                f"the payload names a global by {_kind(module)} and {_kind(name)}, expected str"
            )
        self.stack.append(self.resolve(module, name))

    def reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Global):
            raise RequestRejected(f"the payload calls a {_kind(function)}, which is not a function")
        if function.call is None:
            raise RequestRejected(f"the payload calls {function.name!r}, which may only be an argument")
        if type(arguments) is not tuple:
            raise RequestRejected(
                f"the payload calls {function.name!r} with a {_kind(arguments)}, expected a tuple"
            )
        if self.open_list is not None and not function.is_pure:
            self.open_list.is_pure = False
        self.stack.append(function.call(arguments))

    def new_object(self) -> None:
        arguments, cls = self.stack.pop(), self.stack.pop()
        if not isinstance(cls, Global) or not cls.is_record:
            name = repr(cls.name) if isinstance(cls, Global) else f"a {_kind(cls)}"
            raise RequestRejected(f"the payload makes an instance of {name}, which may not be done")
        if type(arguments) is not tuple or arguments:
            raise RequestRejected(f"the payload gives {cls.name!r} positional arguments, expected fields")
        self.stack.append(Record(cls.name))

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, Record) or target.fields is not None:
            raise RequestRejected(f"the payload sets the state of a {_kind(target)}, which may not be done")
        if type(state) is not dict:
            raise RequestRejected(
                f"the payload gives {target.name!r} a {_kind(state)} as state, expected a dict"
            )
        target.fields = state


def _is_empty_list(value: object) -> bool:
    return type(value) is list and not value


def _kind(value: object) -> str:
    return repr(value.name) if isinstance(value, Global | Record) else type(value).__name__


def _unknown_opcode(opcode: int, position: int) -> str:
    name = _OPCODE_NAMES.get(opcode)
    if name is None:
        return f"the payload is not a pickle: byte {position} ({opcode:#04x}) is no opcode"
    return f"the payload uses the pickle opcode {name} (byte {position}), which weight payloads may not use"


def _push(read: Callable[[_Reader], object]) -> Callable[[_Reader], None]:
    def handler(reader: _Reader) -> None:
        # Not `reader.stack.append(read(reader))`, since `read` may replace the stack.
        value = read(reader)
        reader.stack.append(value)

    return handler


_HANDLERS: Final[dict[int, Callable[[_Reader], None]]] = {
    0x80: _Reader.proto,
    0x95: _Reader.frame,
    ord("."): _Reader.stop,
    ord("("): _Reader.mark,
    ord("N"): _push(lambda r: None),
    0x88: _push(lambda r: True),
    0x89: _push(lambda r: False),
    ord("K"): _Reader.byte,
    ord("M"): _push(lambda r: r.number(2)),
    ord("J"): _push(lambda r: int.from_bytes(r.take(4), "little", signed=True)),
    0x8A: _push(lambda r: int.from_bytes(r.take(r.number(1)), "little", signed=True)),
    ord("G"): _push(lambda r: struct.unpack(">d", r.take(8))[0]),
    0x8C: _Reader.short_text,
    ord("X"): _push(lambda r: r.take(r.number(4)).decode()),
    0x8D: _push(lambda r: r.take(r.number(8)).decode()),
    ord("C"): _push(lambda r: r.take(r.number(1))),
    ord("B"): _push(lambda r: r.take(r.number(4))),
    0x8E: _push(lambda r: r.take(r.number(8))),
    ord(")"): _push(lambda r: ()),
    0x85: lambda r: r.tuple_of(1),
    0x86: lambda r: r.tuple_of(2),
    0x87: lambda r: r.tuple_of(3),
    ord("t"): _push(lambda r: tuple(r.pop_to_mark())),
    ord("]"): _push(lambda r: []),
    ord("a"): lambda r: r.append([r.stack.pop()]),
    ord("e"): _Reader.append_marked,
    ord("}"): _push(lambda r: {}),
    ord("s"): lambda r: r.set_items([r.stack.pop(-2), r.stack.pop()]),
    ord("u"): lambda r: r.set_items(r.pop_to_mark()),
    0x94: _Reader.memoize_next,
    ord("q"): lambda r: r.memoize(r.number(1)),
    ord("r"): lambda r: r.memoize(r.number(4)),
    ord("h"): _Reader.memoized,
    ord("j"): lambda r: r.recall(r.number(4)),
    ord("c"): _push(lambda r: r.resolve(r.line(), r.line())),
    0x93: _Reader.stack_global,
    ord("R"): _Reader.reduce,
    0x81: _Reader.new_object,
    ord("b"): _Reader.build,
}
