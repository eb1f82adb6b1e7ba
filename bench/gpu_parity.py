"""Greedy bfloat16 output against transformers in bfloat16 on the same GPU.

A seeded Qwen3 of 8 layers and 1,024 hidden numbers. Each engine answers 16 prompts with 128 tokens.
transformers then gets prompt and answer at once: a token agrees if it has transformers' highest logit; of
every token the difference of the logprobs counts. The limit of both is what bfloat16 itself does: the same
comparison of transformers in bfloat16 with transformers in float32, on the tokens of the first engine.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_common import Report, engine_args, parse, parser_of
from gpu_machine import empty_cache
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ebbtide import Engine

SHAPE: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
TINY_SHAPE = SHAPE | {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "head_dim": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "no_graph": {"disable_cuda_graph": True},
    "no_overlap": {"disable_overlap_schedule": True},
    "torch_native": {"attention_backend": "torch_native"},
}
NUM_PROMPTS, OUTPUT_LEN = 16, 128


def make_model(folder: Path, shape: dict[str, Any]) -> None:
    """Random weights whose logits stand out from each other, as those of a trained model do."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**shape))
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        parameter.data = 1 + 0.1 * noise if "norm" in name else noise * (1.5 / parameter.shape[-1] ** 0.5)
    model.to(torch.bfloat16).save_pretrained(folder)


def answers(arguments: dict[str, Any], prompts: list[list[int]], num_tokens: int) -> list[dict[str, Any]]:
    params = {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True}
    with Engine(**arguments) as engine:
        outputs: list[dict[str, Any]] = engine.generate(
            input_ids=prompts, sampling_params=params, return_logprob=True
        )
    return outputs


@torch.inference_mode()
def logprobs_of(model: Any, prompt: list[int], output_ids: list[int]) -> torch.Tensor:
    """[output, vocabulary], float32: of the tokens that transformers would put at each place."""
    token_ids = torch.tensor([[*prompt, *output_ids]], device=model.device)
    logits = model(token_ids).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1)


def compare(
    model: Any, prompts: list[list[int]], outputs: list[dict[str, Any]]
) -> tuple[float, float, float]:
    """The share of tokens that agree, the mean |Δlogprob| and the largest."""
    agreeing, differences = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = logprobs_of(model, prompt, output["output_ids"])
        chosen = torch.tensor(output["output_ids"], device=expected.device)
        theirs = expected.gather(1, chosen[:, None])[:, 0].cpu().numpy()
        ours = np.array([triple[0] for triple in output["meta_info"]["output_token_logprobs"]])
        agreeing.append((expected.argmax(-1) == chosen).cpu().numpy())
        differences.append(np.abs(theirs - ours))
    spread = np.concatenate(differences)
    return float(np.concatenate(agreeing).mean()), float(spread.mean()), float(spread.max())


def compare_references(
    bf16: Any, float32: Any, prompts: list[list[int]], outputs: list[dict[str, Any]]
) -> tuple[float, float]:
    """The same of transformers in two precisions."""
    agreeing, differences = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        one, other = (logprobs_of(model, prompt, output["output_ids"]) for model in (bf16, float32))
        chosen = torch.tensor(output["output_ids"], device=one.device)[:, None]
        agreeing.append((one.argmax(-1) == other.argmax(-1)).cpu().numpy())
        differences.append((one.gather(1, chosen) - other.gather(1, chosen)).abs()[:, 0].cpu().numpy())
    return float(np.concatenate(agreeing).mean()), float(np.concatenate(differences).mean())


def measure(report: Report, args: argparse.Namespace, folder: Path) -> None:
    num_prompts, num_tokens = (4, 16) if args.tiny else (NUM_PROMPTS, OUTPUT_LEN)
    shape = TINY_SHAPE if args.tiny else SHAPE
    make_model(folder, shape)
    rng = np.random.default_rng(0)
    lens = rng.integers(16, 128, num_prompts)
    prompts = [rng.integers(0, shape["vocab_size"], length).tolist() for length in lens]
    outputs: dict[str, list[dict[str, Any]]] = {}
    for variant, options in VARIANTS.items():
        if args.device != "cuda" and variant in ("no_graph", "no_overlap"):
            continue
        with report.attempt(f"parity.{variant}.agreement", f"parity.{variant}.logprob"):
            sizes = {"load_format": "auto", "max_total_tokens": 8192}
            arguments = engine_args(args, folder, **sizes, **options)
            outputs[variant] = answers(arguments, prompts, num_tokens)
    dtypes = (torch.bfloat16, torch.float32)
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(args.device) for dtype in dtypes]
    first = next(iter(outputs.values()))
    reference = compare_references(*models, prompts, first)
    basis = "transformers in bfloat16 against float32"
    for variant, those in outputs.items():
        with report.attempt(f"parity.{variant}.agreement", f"parity.{variant}.logprob"):
            agreement, mean, largest = compare(models[0], prompts, those)
            same = [one["output_ids"] == other["output_ids"] for one, other in zip(those, first, strict=True)]
            report.add(
                f"parity.{variant}.agreement",
                [agreement],
                limit=reference[0],
                limit_basis=basis,
                share_of_outputs_equal_to_first=float(np.mean(same)),
                num_tokens=num_prompts * num_tokens,
            )
            report.add(
                f"parity.{variant}.logprob",
                [mean],
                limit=reference[1],
                limit_basis=basis,
                largest=largest,
                against_float32=compare(models[1], prompts, those)[1],
            )
    del models
    empty_cache(args.device)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(parser_of(__doc__), argv)
    report = Report("gpu_parity", args)
    report.facts["model"] = SHAPE
    with tempfile.TemporaryDirectory(prefix="eb-") as folder, report.attempt("parity.default.agreement"):
        measure(report, args, Path(folder))
    report.finish()


if __name__ == "__main__":
    main()
