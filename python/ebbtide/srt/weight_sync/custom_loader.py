"""Custom weight loaders: functions of the operator's, named by import path, that write what an update brings.

Source: wire_api sections 3.3 and 4.1.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Final

import torch
from torch import nn

from ebbtide.srt.errors import ConfigurationError, RequestRejected, drop_frames
from ebbtide.srt.layers.fp8 import are_scales
from ebbtide.srt.memory_saver.arena import Arena
from ebbtide.srt.model_executor.weight_store import WeightStore

logger = logging.getLogger(__name__)

NamedTensors = list[tuple[str, torch.Tensor]]

MAX_PROBLEM_CHARS: Final = 1000


class StagedModel:
    """The model that a custom weight loader gets: a staged copy of this rank's weights.

    It begins with the serving weights, and what the open session has staged.
    """

    def __init__(self, store: WeightStore, shadow: Arena) -> None:
        self._store = store
        self._shadow = shadow
        self._parameters = {
            name: nn.Parameter(tensor, requires_grad=False) for name, tensor in store.parameters(shadow)
        }
        self._addresses = {name: parameter.data_ptr() for name, parameter in self._parameters.items()}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Write whole tensors by their checkpoint names; each rank keeps its part. Returns the names.

        Raises ValueError: the model has no such tensor, or values of 8 bits come without their scales.
        Tensors before it are written.
        """
        dtypes: dict[str, torch.dtype] = {}
        for name, tensor in weights:
            problem = self._store.check(name, tensor.shape, tensor.dtype)
            if problem is not None:
                raise ValueError(f"{name}: {problem.reason}")
            if self._store.is_scales(name) and not are_scales(tensor):
                raise ValueError(f"{name}: expected scales that are finite and above zero")
            self._store.write(name, tensor, self._shadow)
            dtypes[name] = tensor.dtype
        for name, dtype in dtypes.items():
            problem = self._store.check_scales(name, dtype, dtypes)
            if problem is not None:
                raise ValueError(f"{name}: {problem.reason}")
        return set(dtypes)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The engine's own parameters: fused, and this rank's part of them. Write into them."""
        yield from self._parameters.items()

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Copies of the model's buffers, which an update does not change."""
        yield from self._store.buffers().items()

    def require_in_place(self) -> None:
        """Raise ValueError if a parameter was moved to other memory, which the engine would never read."""
        for name, parameter in self._parameters.items():
            if parameter.data_ptr() != self._addresses[name]:
                raise ValueError(f"{name}: its data was replaced; write into it, as copy_() does")


@dataclass(frozen=True)
class CustomLoader:
    """A function that writes an update's tensors, and its import path."""

    path: str
    function: Callable[[StagedModel, NamedTensors], object]

    def load(self, model: StagedModel, named_tensors: NamedTensors) -> None:
        """Call the function with the list, which is empty afterwards.

        RequestRejected: it raised an error. What it has written until then stays in the copy.
        """
        problem = None
        try:
            with torch.no_grad():
                self.function(model, named_tensors)
            model.require_in_place()
        # SystemExit too: a loader that calls sys.exit() must not end the engine.
        except (Exception, SystemExit) as error:
            logger.error("the custom weight loader %s failed", self.path, exc_info=error)
            problem = f"{type(error).__name__}: {error}"[:MAX_PROBLEM_CHARS]
            drop_frames(error)
        finally:
            named_tensors.clear()
        if problem is not None:
            raise RequestRejected(
                f"the custom weight loader {self.path} failed, the weights are unchanged: {problem}"
            )


def import_loaders(paths: Sequence[str]) -> dict[str, CustomLoader]:
    """Import functions by their paths `package.module.function`. ConfigurationError: one is missing."""
    return {path: CustomLoader(path, _imported(path)) for path in paths}


def _imported(path: str) -> Callable[[StagedModel, NamedTensors], object]:
    module, _, name = path.rpartition(".")
    if not module or not name:
        raise ConfigurationError(f"custom_weight_loader: expected package.module.function, got {path!r}")
    try:
        function = getattr(import_module(module), name)
    # Importing runs code that may raise anything.
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"custom_weight_loader: {path} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not callable(function):
        raise ConfigurationError(f"custom_weight_loader: {path} is not a function: {function!r:.200}")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise ConfigurationError(f"custom_weight_loader: {path} has to be a plain function: {function!r}")
    called: Callable[[StagedModel, NamedTensors], object] = function
    return called
