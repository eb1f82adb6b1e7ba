"""The memory tags: what can be released and resumed on its own."""

from enum import StrEnum


class MemoryTag(StrEnum):
    """A kind of device memory with its own lifetime."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    CUDA_GRAPH = "cuda_graph"
