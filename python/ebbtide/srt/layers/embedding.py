"""Token embeddings, and the projection back to the vocabulary.

Shapes: T tokens, D hidden, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ebbtide.srt.distributed.division import Division, part_of
from ebbtide.srt.layers.linear import Inputs, Linear
from ebbtide.srt.layers.step import Kernels


class VocabEmbedding(Linear):
    """One row per token id; the same rows serve as the output projection of a tied model.

    Ranks divide the rows among them.

    Attributes:
        has_float32_logits: whether the products are rounded to float32 rather than to the parameters' dtype.
    """

    is_quantizable = False
    may_be_adapted = False

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__(hidden_size, vocab_size, bias=False, dtype=dtype)
        self._vocab_size = vocab_size
        self.has_float32_logits = False

    def embed(self, input_ids_T: Tensor) -> Tensor:
        """The rows of these tokens, [T, D]."""
        if self.group.size == 1:
            return F.embedding(input_ids_T, self.weight)
        first, count = self._rows_of(self.group.rank)
        rows_T = input_ids_T - first
        others_T = (rows_T < 0) | (rows_T >= count)
        # Nothing but zeros is added to a row of the rank that holds it.
        x_TD = F.embedding(rows_T.clamp_(0, count - 1), self.weight)
        return self.group.all_reduce_(x_TD.masked_fill_(others_T.unsqueeze(1), 0.0))

    def logits(self, x_TD: Tensor, kernels: Kernels) -> Tensor:
        """Scores of every token of the vocabulary, [T, V] in the parameters' dtype, or in float32."""
        if self.has_float32_logits:
            scores = self._float32_product(x_TD)
        else:
            scores = self.project(Inputs(x_TD), None, kernels)
        return scores if self.group.size == 1 else self._gather(scores)

    def _float32_product(self, x_TD: Tensor) -> Tensor:
        if x_TD.is_cuda and self.weight.dtype != torch.float32:
            # Products of 16-bit numbers are added up in float32 anyway: here they stay so. No copy of the
            # weights is made for it.
            return torch.mm(x_TD, self.weight.t(), out_dtype=torch.float32)
        return F.linear(x_TD.float(), self.weight.float())

    def _gather(self, scores: Tensor) -> Tensor:
        """All ranks' columns. The ranks that hold one row less fill up: they send alike."""
        _, most = self._rows_of(0)
        if self._vocab_size % self.group.size == 0:
            return self.group.all_gather(scores, 1)
        padded = self.group.all_gather(F.pad(scores, (0, most - scores.shape[1])), 1)
        counts = [self._rows_of(rank)[1] for rank in range(self.group.size)]
        parts = zip(torch.split(padded, most, dim=1), counts, strict=True)
        return torch.cat([part[:, :count] for part, count in parts], dim=1)

    def _rows_of(self, rank: int) -> tuple[int, int]:
        """The first id whose row the rank holds, and how many it holds."""
        return part_of(rank, self.group.size, self._vocab_size, Division.SPREAD, "vocab_size")
