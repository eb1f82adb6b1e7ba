"""What FP8 does to logprobs: |Δlogprob| and KL of an engine against transformers, in bfloat16 and in float32.

Each engine samples answers at temperature 1; transformers then gets prompt and answer at once. With Δ the
logprob there minus the engine's, KL(engine | transformers) per token is the mean of exp(Δ) − 1 − Δ over the
sampled tokens. `reference` is transformers in bfloat16 whose weights, and activations too, were in 8 bits
by plain torch: what such a model does to logprobs, whoever serves it. The model is seeded, 8 layers of 1,024
hidden numbers, or the one that `ebbtide demo` has left (`--demo-model`), which is small but trained. With
`--device cpu` FP8 is emulated: the same numbers in weights and KV cache, products in another order.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import write_result
from gpu_common import engine_args, parse, parser_of
from gpu_parity import SHAPE, TINY_SHAPE, logprobs_of, make_model
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from ebbtide import Engine
from ebbtide.demo.trainer import MAX_ANSWER_TOKENS, ProblemSet, encode

VARIANTS: dict[str, dict[str, Any]] = {
    "as_served": {},
    "fp8_kv": {"kv_cache_dtype": "fp8_e4m3"},
    "fp8_weights": {"quantization": "fp8"},
    "fp8_rows": {"quantization": "w8a8_fp8"},
    "fp8_both": {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"},
}
BLOCK = 128
NUM_PROMPTS, OUTPUT_LEN, NUM_QUESTIONS = 16, 128, 1024


def answers(arguments: dict[str, Any], prompts: list[list[int]], num_tokens: int) -> list[dict[str, Any]]:
    params = {"temperature": 1.0, "max_new_tokens": num_tokens, "ignore_eos": num_tokens > MAX_ANSWER_TOKENS}
    with Engine(**arguments) as engine:
        outputs: list[dict[str, Any]] = engine.generate(
            input_ids=prompts, sampling_params=params, return_logprob=True
        )
    return outputs


def differences(model: Any, prompts: list[list[int]], outputs: list[dict[str, Any]]) -> NDArray[np.float64]:
    """Of every token: transformers' logprob minus the engine's."""
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = logprobs_of(model, prompt, output["output_ids"])
        chosen = torch.tensor(output["output_ids"], device=expected.device)[:, None]
        theirs = expected.gather(1, chosen)[:, 0].double().cpu().numpy()
        ours = [triple[0] for triple in output["meta_info"]["output_token_logprobs"]]
        found.append(theirs - np.array(ours))
    return np.concatenate(found)


def summary(delta: NDArray[np.float64]) -> dict[str, float]:
    size = np.abs(delta)
    return {
        "mean": float(size.mean()),
        "p99": float(np.percentile(size, 99)),
        "largest": float(size.max()),
        "kl": float((np.expm1(delta) - delta).mean()),
        "num_tokens": len(delta),
    }


def in_eight_bits(model: Any, block: int | None = BLOCK) -> Any:
    """The same model with matrices of layers as they are in 8 bits, and with what they multiply quantised.

    Args:
        block: None: a row of a matrix has one scale, and so has a token.
    """

    def fake(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (x / scale).to(torch.float8_e4m3fn).to(torch.float32) * scale

    def quantize_tokens(module: torch.nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        groups = given[0].float().unflatten(-1, (-1, given[0].shape[-1] if block is None else block))
        scale = (groups.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-30)
        return (fake(groups, scale).flatten(-2).to(given[0].dtype),)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            rows, columns = module.weight.shape
            height, width = (1, columns) if block is None else (block, block)
            blocks = module.weight.data.float().view(rows // height, height, columns // width, width)
            scale = (blocks.abs().amax((1, 3), keepdim=True) / 448).clamp(min=1e-30)
            module.weight.data = fake(blocks, scale).view(rows, columns).to(module.weight.dtype)
            module.register_forward_pre_hook(quantize_tokens)
    return model


def measure(
    args: argparse.Namespace, folder: Path, prompts: list[list[int]], num_tokens: int
) -> dict[str, Any]:
    references = {
        dtype: AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(args.device)
        for dtype in ("bfloat16", "float32")
    }
    rows: dict[str, Any] = {}
    for variant, options in VARIANTS.items():
        sizes = {"load_format": "auto", "max_total_tokens": 65_536, "dtype": "bfloat16", "random_seed": 0}
        outputs = answers(engine_args(args, folder, **sizes, **options), prompts, num_tokens)
        precision = outputs[0]["meta_info"]["precision"]
        rows[variant] = {"precision": precision} | {
            dtype: summary(differences(model, prompts, outputs)) for dtype, model in references.items()
        }
        print(f"{variant:12}", *(_line(dtype, rows[variant][dtype]) for dtype in references), flush=True)
        if variant == "as_served":
            both = [differences(model, prompts, outputs) for model in references.values()]
            rows["transformers_bfloat16"] = {"float32": summary(both[1] - both[0])}
            print("transformers", _line("float32", rows["transformers_bfloat16"]["float32"]), flush=True)
            for name, block in (("fp8_weights", BLOCK), ("fp8_rows", None)):
                plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(args.device)
                theirs = differences(in_eight_bits(plain, block), prompts, outputs)
                row = {dtype: summary(delta - theirs) for dtype, delta in zip(references, both, strict=True)}
                rows[f"reference_{name}"] = row
                print(f"reference {name}", *(_line(dtype, row[dtype]) for dtype in references), flush=True)
    return rows


def _line(dtype: str, row: dict[str, float]) -> str:
    return f"| {dtype}: mean {row['mean']:.4f} p99 {row['p99']:.4f} KL {row['kl']:.2e}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--demo-model", type=Path, help="demo_out/model")
    args = parse(parser, argv)
    with tempfile.TemporaryDirectory(prefix="eb-") as temporary:
        if args.demo_model is not None:
            folder, num_tokens = args.demo_model, MAX_ANSWER_TOKENS
            questions = ProblemSet(1).draw(16 if args.tiny else NUM_QUESTIONS)
            prompts = [encode(problem.question) for problem in questions]
        else:
            folder, num_tokens = Path(temporary), 16 if args.tiny else OUTPUT_LEN
            shape = TINY_SHAPE if args.tiny else SHAPE
            make_model(folder, shape, args.device)
            rng = np.random.default_rng(0)
            lens = rng.integers(16, 128, 4 if args.tiny else NUM_PROMPTS)
            prompts = [rng.integers(0, shape["vocab_size"], length).tolist() for length in lens]
        rows = measure(args, folder, prompts, num_tokens)
    if not args.tiny:
        model = "demo" if args.demo_model is not None else "seeded"
        name = "gpu_precision" if args.device == "cuda" else "precision_emulated"
        print(write_result(f"{name}_{model}", {"device": args.device, "model": model, "rows": rows}))


if __name__ == "__main__":
    main()
