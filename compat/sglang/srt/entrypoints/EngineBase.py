"""SGLang's base class of engines, for frameworks that implement one over a network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class EngineBase(ABC):
    """An engine, in this process or elsewhere."""

    @abstractmethod
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate."""

    @abstractmethod
    def flush_cache(self) -> Any:
        """Empty the prefix cache."""

    @abstractmethod
    def update_weights_from_tensor(self, *args: Any, **kwargs: Any) -> Any:
        """Update the weights."""

    @abstractmethod
    def release_memory_occupation(self, *args: Any, **kwargs: Any) -> Any:
        """Give memory back to the system."""

    @abstractmethod
    def resume_memory_occupation(self, *args: Any, **kwargs: Any) -> Any:
        """Take released memory again."""

    @abstractmethod
    def shutdown(self) -> Any:
        """End the engine."""
