"""The error classes: rejected requests (nothing was changed), lack of memory, and failures of the engine."""

import traceback
from collections.abc import Sequence
from typing import Any, Final

# Exit status of a process that its watchdog has ended. The launcher then logs the stacks of the others.
HUNG_EXIT_STATUS: Final = 70
# Keys in the body of an error, ours or a gateway's, that are not further fields.
_NOT_FIELDS: Final = ("success", "message", "error", "status")
# How many items of a list a message names.
MAX_NAMED: Final = 10


class EbbtideError(Exception):
    """Base of every error that Ebbtide raises on purpose."""


class ConfigurationError(EbbtideError):
    """The engine cannot start with these arguments, this checkpoint or this machine."""


class _Told(EbbtideError):
    """Base of the errors that answer a request. `fields`: further fields of the error body."""

    status: int = 500

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    @property
    def body(self) -> dict[str, Any]:
        """The JSON error body, the same over HTTP and in Python."""
        return error_body(self.message, self.status, **self.fields)


class RequestRejected(_Told):
    """A request that was refused: it is malformed, or the state does not allow it. Nothing was changed.

    Args:
        message: what was wrong, what was expected, and (for a refusal by state) what would make it legal.
        status: the HTTP status, 400 (malformed) or 409 (refused by state) as a rule.
        **fields: further fields of the error body, e.g. `needed_bytes`.

    Source: control_semantics section 0, wire_api section 1.
    """

    def __init__(self, message: str, status: int = 400, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.status = status


class EngineError(_Told):
    """The engine itself failed: a process died, or a handler raised. The message names the rank.

    Args:
        message: what failed, and where.
        **fields: further fields of the error body, e.g. `replicas`: what each of them serves now.

    Attributes:
        status: the HTTP status.
    """


class EngineDown(EngineError):
    """A process of the engine died, or the engine ends. All waiting and later requests get this error."""

    status = 503


class OutOfDeviceMemory(EbbtideError):
    """There is not enough device memory. The failed call has given back what it had taken."""

    def __init__(self, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(f"needed {needed_bytes} bytes of device memory, {free_bytes} are free")
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes

    def refusal(self, message: str) -> RequestRejected:
        """Make the error for the request that needed the memory: 409, with both figures."""
        return RequestRejected(message, 409, needed_bytes=self.needed_bytes, free_bytes=self.free_bytes)


ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "NotFoundError",
    409: "ConflictError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


def error_body(
    message: str, status: int, param: str | None = None, kind: str | None = None, **fields: Any
) -> dict[str, Any]:
    """Make the body of an error. It suits clients that read `message` and those that read `error.message`.

    Args:
        param: the wrong parameter, such as `query.mode` or `body.update_info`; None: no particular one.
        kind: the error's type; None: the usual one of the status.
    """
    kind = kind or ERROR_TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return {
        "success": False,
        "message": message,
        **fields,
        "error": {"message": message, "type": kind, "param": param, "code": status},
    }


def read_error(body: Any, status: int, otherwise: str, *, is_refusal: bool) -> RequestRejected | EngineError:
    """Make an error from the body of an answer. `otherwise`: its message if the body has none."""
    message, fields = otherwise, dict[str, Any]()
    match body:
        case {"message": str(message)} | {"error": {"message": str(message)}}:
            fields = {name: value for name, value in body.items() if name not in _NOT_FIELDS}
    if is_refusal:
        return RequestRejected(message, status, **fields)
    return EngineDown(message, **fields) if status == 503 else EngineError(message, **fields)


def first_few(names: Sequence[str], separator: str = ", ") -> str:
    """Join the first few names for a message, and say how many more there are."""
    more = len(names) - MAX_NAMED
    return separator.join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def drop_frames(error: BaseException | None) -> None:
    """Clear the stack frames of an error and its contexts, which may keep a sender's tensors alive."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
