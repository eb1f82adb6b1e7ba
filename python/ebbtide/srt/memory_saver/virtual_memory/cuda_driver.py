"""Calls of the CUDA driver that raise: the driver answers with codes, and none of them ends the process."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ebbtide.srt.errors import ConfigurationError, EngineError


class DriverError(EngineError):
    """A call of the CUDA driver failed.

    `is_out_of_memory`: the device, or the driver's tables, had no room.
    """

    def __init__(self, call: str, text: str, is_out_of_memory: bool) -> None:
        super().__init__(f"{call}: {text}")
        self.is_out_of_memory = is_out_of_memory


class CudaDriver:
    """The driver's functions by name, as `cuda.bindings.driver` offers them: each returns its status, then
    values.

    ConfigurationError: the package cuda-bindings is not installed.
    """

    def __init__(self, bindings: Any = None) -> None:
        self.bindings = bindings if bindings is not None else _load_bindings()
        self._success = self.bindings.CUresult.CUDA_SUCCESS
        self._out_of_memory = self.bindings.CUresult.CUDA_ERROR_OUT_OF_MEMORY

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function; its value, if it has one, or DriverError with the driver's own words."""
        status, *values = getattr(self.bindings, name)(*arguments)
        if status != self._success:
            raise DriverError(name, self._text(status), status == self._out_of_memory)
        return values[0] if values else None

    def _text(self, status: Any) -> str:
        answer, text = self.bindings.cuGetErrorString(status)
        return text.decode() if answer == self._success and text else f"error {int(status)}"


def _load_bindings() -> Any:
    try:
        return import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ConfigurationError(
            "device=cuda needs the package cuda-bindings: pip install 'ebbtide[cuda]'"
        ) from error
