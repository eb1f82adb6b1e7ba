"""Which numbers of rows a start goes through, so that no kernel is loaded first beside requests."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures.checkpoints import make_checkpoint
from fixtures.model_runs import RunnerDriver
from torch import Tensor

from ebbtide.srt.distributed.parallel_group import ParallelGroup
from ebbtide.srt.layers.attention.base import AttentionShape
from ebbtide.srt.layers.linear import Inputs, Linear, VocabEmbedding
from ebbtide.srt.layers.step import Kernels
from ebbtide.srt.model_executor import rehearsal
from ebbtide.srt.models.dense import DenseCausalLM


class NoAttention:
    """Every head's output is its query."""

    def __init__(self, shape: AttentionShape, *_: Any) -> None:
        self._num_heads = shape.num_q_heads

    def forward(self, layer: Any, qkv_TNH: Tensor, *_: Any) -> Tensor:
        return qkv_TNH[:, : self._num_heads]


def test_a_start_launches_products_of_all_sizes_in_a_layer_of_each_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"num_hidden_layers": 4, "mlp_only_layers": [1]}
    driver = RunnerDriver(make_checkpoint(tmp_path, "Qwen3MoeForCausalLM", **options))
    model = driver.runner.model
    assert isinstance(model, DenseCausalLM)
    shape: Any = SimpleNamespace(num_q_heads=model.config.q_size // model.config.head_dim)
    layers = list(model.model.layers)
    rows: dict[Linear, set[int]] = {}
    logits_rows: set[int] = set()
    multiply, logits = Linear.multiply, VocabEmbedding.logits

    def noting(layer: Linear, x: Inputs, *others: Any) -> Tensor:
        rows.setdefault(layer, set()).add(len(x.x_TD))
        return multiply(layer, x, *others)

    def noting_logits(layer: VocabEmbedding, x_TD: Tensor, kernels: Kernels) -> Tensor:
        logits_rows.add(len(x_TD))
        return logits(layer, x_TD, kernels)

    monkeypatch.setattr(Linear, "multiply", noting)
    monkeypatch.setattr(VocabEmbedding, "logits", noting_logits)
    monkeypatch.setattr(rehearsal, "_WithoutAttention", NoAttention)
    monkeypatch.setattr(rehearsal, "_EACH_UP_TO", 320)
    rehearsal.load_kernels(model, Kernels(), shape, 900, 300, torch.device("cpu"))

    def are_met(sizes: set[int], most: int) -> bool:
        """Whether these stand for all numbers of rows: multiples of eight for themselves, and then for those
        that are 3 % less; the rows behind a multiple of eight for all up to the next."""
        firsts = [size if size % 8 == 0 else size - size % 8 + 1 for size in range(65, most + 1)]
        return all(
            any(
                first <= one <= (first if first <= 320 else first * 1.03 + 1)
                for one in sizes
                if one % 8 == first % 8
            )
            for first in firsts
        )

    gated = [layer.mlp.gate_up_proj for layer in layers if hasattr(layer.mlp, "gate_up_proj")]
    assert are_met(rows[gated[0]], 896)
    projections = [layer.self_attn.qkv_proj for layer in layers]
    assert [projection in rows for projection in projections].count(True) == 2
    assert are_met(logits_rows, 296)
    assert max(logits_rows) <= 300
    assert {1, 2, 4, 8, 16, 32, 64} < logits_rows
    assert list(model.model.layers) == layers
    assert all(type(layer.group) is ParallelGroup for layer in model.modules() if isinstance(layer, Linear))
