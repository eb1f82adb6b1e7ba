"""The trainer of the demo: log-probabilities are the model's, and learning moves them as rewards say."""

import math
from dataclasses import replace

import pytest
import torch

from ebbtide.demo.trainer import EOS_ID, Problem, ProblemSet, Sample, Trainer, encode

PROBLEM = Problem(37, 58)


def answered(trainer: Trainer, *answers: tuple[str, float]) -> list[Sample]:
    """Samples of `PROBLEM`: each answer with its advantage, and the trainer's own logprobs."""
    samples = [
        Sample(PROBLEM, [*encode(text), EOS_ID], logprobs=[], reward=0.0, advantage=advantage)
        for text, advantage in answers
    ]
    return [
        Sample(PROBLEM, sample.output_ids, logprobs, sample.reward, sample.advantage)
        for sample, logprobs in zip(samples, trainer.logprobs(samples), strict=True)
    ]


def test_logprobs_of_a_padded_batch_are_those_of_each_alone():
    trainer = Trainer(num_steps=1, seed=0)
    samples = answered(trainer, ("59", 0.0), ("123", 0.0), ("", 0.0))
    for sample in samples:
        ids = torch.tensor([encode(PROBLEM.question) + sample.output_ids])
        with torch.inference_mode():
            logprobs = trainer.model(input_ids=ids[:, :-1]).logits[0].log_softmax(-1)
        start = len(PROBLEM.question) - 1
        expected = [logprobs[start + place, token].item() for place, token in enumerate(sample.output_ids)]
        assert sample.logprobs == pytest.approx(expected, abs=1e-5)


def test_learning_raises_good_answers_and_lowers_bad_ones():
    trainer = Trainer(num_steps=4, seed=0)
    for _ in range(4):
        samples = answered(trainer, *[("59", 0.5), ("95", -0.5)] * 4)
        trainer.learn(samples)
    good, bad = (sum(logprobs) for logprobs in trainer.logprobs(samples[:2]))
    good_before, bad_before = (sum(sample.logprobs) for sample in samples[:2])
    assert good > good_before
    assert bad < bad_before


def test_a_token_weighs_as_much_as_the_engine_thought_it_too_unlikely_but_no_more_than_twice():
    """By the size of the very first step, which the clipping does not touch."""
    gradients = []
    for off in (0.0, 0.5, 5.0):
        trainer = Trainer(num_steps=1, seed=0)
        [sample] = answered(trainer, ("59", 0.5))
        rounded = replace(sample, logprobs=[logprob - off for logprob in sample.logprobs])
        trainer._loss([rounded], [sample.logprobs]).backward()
        gradients.append(trainer.model.lm_head.weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0] * math.exp(0.5))
    torch.testing.assert_close(gradients[2], gradients[0] * 2.0)


def test_warm_up_ends_at_its_goal():
    probabilities = list(Trainer(num_steps=1, seed=0).warm_up(ProblemSet(seed=0), goal=0.0003))
    assert len(probabilities) > 1
    assert all(probability < 0.0003 for probability in probabilities[:-1])
    assert probabilities[-1] >= 0.0003
