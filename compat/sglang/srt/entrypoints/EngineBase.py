"""What every engine can do, for adapters of frameworks that speak to one somewhere else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class EngineBase(ABC):
    """An engine in this process or behind a network."""

    @abstractmethod
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate."""

    @abstractmethod
    def flush_cache(self) -> Any:
        """Empty the prefix cache."""

    @abstractmethod
    def update_weights_from_tensor(self, *args: Any, **kwargs: Any) -> Any:
        """Take new weights."""

    @abstractmethod
    def release_memory_occupation(self, *args: Any, **kwargs: Any) -> Any:
        """Give memory back."""

    @abstractmethod
    def resume_memory_occupation(self, *args: Any, **kwargs: Any) -> Any:
        """Take memory again."""

    @abstractmethod
    def shutdown(self) -> Any:
        """End the engine."""
