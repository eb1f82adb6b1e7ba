"""Token embeddings, and the projection back to the vocabulary."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ebbtide.srt.layers.fused import norm_linear


class VocabEmbedding(nn.Module):
    """One row per token id; the same rows serve as the output projection of a tied model."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(vocab_size, hidden_size, dtype=dtype, device="meta"), requires_grad=False
        )

    def forward(self, input_ids_T: Tensor) -> Tensor:
        return F.embedding(input_ids_T, self.weight)

    def logits(self, x_TD: Tensor) -> Tensor:
        """Scores of every token of the vocabulary, [T, V] in the parameters' dtype."""
        return norm_linear(x_TD, None, 0.0, self.weight, None)
