"""The demo's task, sums of two-digit numbers, and its trainer: supervised warm-up and GRPO in plain PyTorch.

Shapes: R sequences, S tokens of the longest, T = S - 1 predicted tokens, V tokens of the vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

PAD, EOS = "<pad>", "<eos>"
VOCABULARY = (PAD, EOS, *"0123456789+=")
PAD_ID, EOS_ID = 0, 1
# Three digits and `EOS`.
MAX_ANSWER_TOKENS = 4
_NUM_HELD_OUT = 500


@dataclass(frozen=True)
class Problem:
    left: int
    right: int

    @property
    def question(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """Digits of the sum in reverse order: the answer to 37+58= is 59."""
        return str(self.left + self.right)[::-1]


class ProblemSet:
    """All sums of two-digit numbers: some are held out, the others are drawn at random."""

    def __init__(self, seed: int) -> None:
        problems = [Problem(left, right) for left in range(10, 100) for right in range(10, 100)]
        self._rng = random.Random(seed)
        self._rng.shuffle(problems)
        self.held_out = problems[:_NUM_HELD_OUT]
        self._training = problems[_NUM_HELD_OUT:]

    def draw(self, num_problems: int) -> list[Problem]:
        """Draw distinct problems that are not held out."""
        return self._rng.sample(self._training, num_problems)


def encode(text: str) -> list[int]:
    """Token ids of a text of the task, one per character."""
    return [VOCABULARY.index(character) for character in text]


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Make a tokenizer that encodes like `encode`, to be saved with a checkpoint."""
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}, PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


MODEL_SHAPE: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "dtype": "float32",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
# Keys and values of all layers in float32.
KV_BYTES_PER_TOKEN: int = (
    2 * 4 * MODEL_SHAPE["num_hidden_layers"] * MODEL_SHAPE["num_key_value_heads"] * MODEL_SHAPE["head_dim"]
)
_WARM_UP_BATCH = 256
_WARM_UP_RAMP_STEPS = 20
_WARM_UP_MAX_STEPS = 400
_GRPO_RAMP_STEPS = 5
_MINIBATCHES = 2
# The upper limit of the ratio of new to old probability is looser, so that the policy keeps exploring.
# Source: DAPO, arXiv 2503.14476, section 3.1.
_CLIP_BELOW, _CLIP_ABOVE = 0.2, 0.28
# Truncated importance sampling: a token's weight in the loss is its importance ratio, at most this.
# Source: fengyao.notion.site/off-policy-rl; the same in verl, slime and miles.
LARGEST_WEIGHT = 2.0


@dataclass(frozen=True)
class Sample:
    """An answer of the engine.

    Attributes:
        logprobs: the engine's logprobs of `output_ids`.
        reward: 1 for the exact answer, else 0.
        advantage: reward minus the mean reward of the answers to the same question.
    """

    problem: Problem
    output_ids: list[int]
    logprobs: list[float]
    reward: float
    advantage: float


class Trainer:
    """A model and its optimizers. `num_steps`: number of GRPO steps, over which the learning rates decay."""

    def __init__(self, num_steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**MODEL_SHAPE))
        self._num_steps = num_steps
        self._steps_done = 0
        self._optimizers = _Optimizers(self.model, muon_lr=0.005, adamw_lr=0.005)

    def warm_up(self, problems: ProblemSet, goal: float) -> Iterator[float]:
        """Train on sums with their answers until the probability of a right sampled answer reaches `goal`.

        Yields this probability in each step, measured on the step's batch before it is trained on.

        Raises:
            DemoFailed: the goal was not reached in `_WARM_UP_MAX_STEPS` steps.
        """
        optimizers = _Optimizers(self.model, muon_lr=0.02, adamw_lr=0.002)
        probability = 0.0
        for step in range(_WARM_UP_MAX_STEPS):
            drawn = problems.draw(_WARM_UP_BATCH)
            batch = _Batch.of([(encode(one.question), [*encode(one.answer), EOS_ID]) for one in drawn])
            logprobs_RT = self._logprobs(batch)
            probability = logprobs_RT.detach().sum(1).exp().mean().item()
            yield probability
            if probability >= goal:
                return
            optimizers.step(
                -logprobs_RT.sum() / batch.mask_RT.sum(), min(1.0, (step + 1) / _WARM_UP_RAMP_STEPS)
            )
        raise DemoFailed(f"warm-up: {_WARM_UP_MAX_STEPS} steps brought {probability:.3f}, not {goal}")

    def logprobs(self, samples: Sequence[Sample]) -> list[list[float]]:
        """The model's logprobs of the output tokens of samples."""
        batch = _Batch.of_samples(samples)
        with torch.inference_mode():
            logprobs_RT = self._logprobs(batch)
        return [row[mask].tolist() for row, mask in zip(logprobs_RT, batch.mask_RT.bool(), strict=True)]

    def learn(self, samples: Sequence[Sample], anchors: Sequence[list[float]] | None = None) -> None:
        """Do one GRPO step: two updates, each on one half of the samples.

        Advantages are not divided by the group's standard deviation, which would favour the easiest and the
        hardest questions. Source: arXiv 2503.20783.

        Args:
            anchors: this model's logprobs of the samples, if the engine computes in lower precision. Then the
                clipped ratio is relative to these, and each token is weighted by its importance ratio to the
                engine's probability, up to `LARGEST_WEIGHT`. None: the ratio is relative to the engine's.
        """
        progress = self._steps_done / self._num_steps
        scale = min(1.0, (self._steps_done + 1) / _GRPO_RAMP_STEPS) * (1.0 - 0.9 * progress)
        informative = [index for index, sample in enumerate(samples) if sample.advantage]
        order = torch.randperm(len(informative))
        for chosen in order.chunk(_MINIBATCHES) if informative else ():
            picked = [informative[index] for index in chosen.tolist()]
            those = None if anchors is None else [anchors[index] for index in picked]
            self._optimizers.step(self._loss([samples[index] for index in picked], those), scale)
        self._steps_done += 1

    def _loss(self, samples: Sequence[Sample], anchors: Sequence[list[float]] | None) -> Tensor:
        batch = _Batch.of_samples(samples)
        old_RT = batch.scatter([sample.logprobs for sample in samples])
        weight_RT = batch.mask_RT
        if anchors is not None:
            anchor_RT = batch.scatter(anchors)
            weight_RT = weight_RT * (anchor_RT - old_RT).exp().clamp(max=LARGEST_WEIGHT)
            old_RT = anchor_RT
        advantage_R1 = torch.tensor([sample.advantage for sample in samples])[:, None]
        ratio_RT = (self._logprobs(batch) - old_RT).exp()
        clipped_RT = ratio_RT.clamp(1.0 - _CLIP_BELOW, 1.0 + _CLIP_ABOVE)
        gain_RT = torch.minimum(ratio_RT * advantage_R1, clipped_RT * advantage_R1)
        return -(gain_RT * weight_RT).sum() / batch.mask_RT.sum()

    def _logprobs(self, batch: _Batch) -> Tensor:
        """Logprobs of the output tokens, [R, T]; 0 elsewhere."""
        logits_RTV: Tensor = self.model(input_ids=batch.ids_RS[:, :-1]).logits
        chosen_RT1 = batch.ids_RS[:, 1:, None]
        return logits_RTV.log_softmax(-1).gather(-1, chosen_RT1).squeeze(-1) * batch.mask_RT


@dataclass(frozen=True)
class _Batch:
    """Sequences that are padded on the right, so that no token attends to padding.

    Attributes:
        ids_RS: token ids.
        mask_RT: 1 if the predicted token is an output token, else 0.
    """

    ids_RS: Tensor
    mask_RT: Tensor

    @classmethod
    def of(cls, pairs: Sequence[tuple[list[int], list[int]]]) -> _Batch:
        """Make a batch of (prompt ids, output ids) pairs."""
        width = max(len(prompt) + len(output) for prompt, output in pairs)
        ids = torch.full((len(pairs), width), PAD_ID)
        mask = torch.zeros(len(pairs), width - 1)
        for row, (prompt, output) in enumerate(pairs):
            end = len(prompt) + len(output)
            ids[row, :end] = torch.tensor(prompt + output)
            mask[row, len(prompt) - 1 : end - 1] = 1.0
        return cls(ids, mask)

    @classmethod
    def of_samples(cls, samples: Sequence[Sample]) -> _Batch:
        return cls.of([(encode(sample.problem.question), sample.output_ids) for sample in samples])

    def scatter(self, values: Sequence[list[float]]) -> Tensor:
        """Arrange one value per output token as a matrix [R, T], with 0 elsewhere."""
        matrix_RT = torch.zeros_like(self.mask_RT)
        matrix_RT[self.mask_RT.bool()] = torch.tensor([value for row in values for value in row])
        return matrix_RT


class _Optimizers:
    """Muon for the matrices of the layers, AdamW for the rest. Source: kellerjordan.github.io/posts/muon."""

    def __init__(self, model: torch.nn.Module, *, muon_lr: float, adamw_lr: float) -> None:
        named = list(model.named_parameters())
        matrices = [tensor for name, tensor in named if tensor.ndim == 2 and "embed" not in name]
        others = [tensor for name, tensor in named if tensor.ndim != 2 or "embed" in name]
        self._parameters = matrices + others
        self._optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.0), muon_lr),
            (torch.optim.AdamW(others, lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.0), adamw_lr),
        ]

    def step(self, loss: Tensor, scale: float) -> None:
        """Update the parameters by the gradient of `loss`, at learning rates times `scale`."""
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer, lr in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * scale
            optimizer.step()
            optimizer.zero_grad()


@dataclass(frozen=True)
class Ratios:
    """Importance ratios of a step's tokens: the trainer's probability by the engine's, with the same weights.

    Attributes:
        low, high: 1st and 99th percentile.
        truncated: share of ratios above `LARGEST_WEIGHT`.
        divergence: KL(engine | trainer) per token in nats, estimated by ratio - 1 - log(ratio).
    """

    low: float
    mean: float
    high: float
    largest: float
    truncated: float
    divergence: float

    @classmethod
    def of(cls, trainer: Sequence[Sequence[float]], engine: Sequence[Sequence[float]]) -> Ratios:
        """Compute the ratios from both sides' logprobs of the same tokens, at least one."""
        logs = np.array([*chain.from_iterable(trainer)]) - np.array([*chain.from_iterable(engine)])
        ratios = np.exp(logs)
        low, high = np.percentile(ratios, (1, 99)).tolist()
        return cls(
            low=low,
            mean=float(ratios.mean()),
            high=high,
            largest=float(ratios.max()),
            truncated=float((ratios > LARGEST_WEIGHT).mean()),
            divergence=float((ratios - 1.0 - logs).mean()),
        )


class DemoFailed(RuntimeError):
    """A check of the demo failed."""
