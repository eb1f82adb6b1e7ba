"""Compares greedy bfloat16 output with transformers in bfloat16 on the same GPU.

The model is a Qwen3 with seeded random weights, 8 layers and hidden size 1,024. Each engine answers 16
prompts with 128 tokens. transformers then gets prompt and answer in one pass: a token agrees if it has
transformers' highest logit; the difference of logprobs is measured for every token. The limit of both is the
error of bfloat16 itself: the same comparison of transformers in bfloat16 and in float32, on the first
engine's tokens.

`in_flight`: a Llama with 0.85 B parameters, 64 streams of 600 tokens, and an update to other weights while
they run. Their logprobs are compared with transformers in float32, which gets the tokens of each span with
the weights, and with the KV of the update's mode: kept (in_place), or computed anew (retract). Results also
have transformers in bfloat16 with the same KV, and the difference with the KV of the other mode.

`precision`, only if requested: the effect of FP8 on logprobs, compared with transformers in bfloat16 and in
float32. Each engine samples answers at temperature 1. With Δ = transformers' logprob - engine's logprob,
KL(engine | transformers) per token is the mean of exp(Δ) - 1 - Δ over the sampled tokens. `reference` is
transformers in bfloat16 with weights and activations rounded to 8 bits by plain torch: the effect of FP8 in
any engine. The model is the first one above, or one that `ebbtide demo` has trained (`--demo-model`), which
is small. With `--device cpu`, FP8 is emulated: the same rounding, with products in another order. These
results have their own file.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import write_result
from gpu_common import Report, empty_cache, engine_args, parse, parser_of
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ebbtide import Engine
from ebbtide.demo.trainer import MAX_ANSWER_TOKENS, ProblemSet, encode

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
LLAMA_SHAPE = SHAPE | {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
NUM_STREAMS, STREAM_LEN = 64, 600
# Standard deviation of the relative change to the second weights: so small that texts stay likely.
STEP = 0.05


@torch.inference_mode()
def make_model(folder: Path, shape: dict[str, Any], device: str, *, is_llama: bool = False) -> Any:
    """Make and save a model with random weights whose logits are as distinct as those of a trained model."""
    torch.manual_seed(0)
    with torch.device(device):
        config, kind = (LlamaConfig, LlamaForCausalLM) if is_llama else (Qwen3Config, Qwen3ForCausalLM)
        model: Any = kind(config(**shape))
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        parameter.data = 1 + 0.1 * noise if "norm" in name else noise * (1.5 / parameter.shape[-1] ** 0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    return model


def answers(
    arguments: dict[str, Any], prompts: list[list[int]], num_tokens: int, **changes: Any
) -> list[dict[str, Any]]:
    params = {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True, **changes}
    with Engine(**arguments) as engine:
        outputs: list[dict[str, Any]] = engine.generate(
            input_ids=prompts, sampling_params=params, return_logprob=True
        )
    return outputs


@torch.inference_mode()
def logprobs_of(model: Any, prompt: list[int], output_ids: list[int]) -> torch.Tensor:
    """transformers' logprobs at the places of the output tokens: float32 [output, vocabulary]."""
    token_ids = torch.tensor([[*prompt, *output_ids]], device=model.device)
    logits = model(token_ids).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1)


def compare(
    model: Any, prompts: list[list[int]], outputs: list[dict[str, Any]]
) -> tuple[float, float, float]:
    """Share of tokens that agree, and mean and maximum |Δlogprob|, between transformers and an engine."""
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
    """Share of tokens that agree, and mean |Δlogprob|, between transformers in two precisions."""
    agreeing, differences = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        one, other = (logprobs_of(model, prompt, output["output_ids"]) for model in (bf16, float32))
        chosen = torch.tensor(output["output_ids"], device=one.device)[:, None]
        agreeing.append((one.argmax(-1) == other.argmax(-1)).cpu().numpy())
        differences.append((one.gather(1, chosen) - other.gather(1, chosen)).abs()[:, 0].cpu().numpy())
    return float(np.concatenate(agreeing).mean()), float(np.concatenate(differences).mean())


def prepared(args: argparse.Namespace, folder: Path) -> tuple[list[list[int]], int]:
    """Write the model; returns the prompts, and the number of tokens of each answer."""
    num_prompts, num_tokens = (4, 16) if args.tiny else (NUM_PROMPTS, OUTPUT_LEN)
    shape = TINY_SHAPE if args.tiny else SHAPE
    make_model(folder, shape, args.device)
    rng = np.random.default_rng(0)
    lens = rng.integers(16, 128, num_prompts)
    return [rng.integers(0, shape["vocab_size"], length).tolist() for length in lens], num_tokens


def measure(report: Report, args: argparse.Namespace, folder: Path) -> None:
    prompts, num_tokens = prepared(args, folder)
    outputs: dict[str, list[dict[str, Any]]] = {}
    for variant, options in VARIANTS.items():
        if args.device != "cuda" and variant in ("no_graph", "no_overlap"):
            continue
        with report.attempt(f"parity.{variant}.agreement", f"parity.{variant}.logprob"):
            sizes = {"load_format": "auto", "max_total_tokens": 8192}
            arguments = engine_args(args, folder, **sizes, **options)
            outputs[variant] = answers(arguments, prompts, num_tokens)
    dtypes = (torch.bfloat16, torch.float32)
    bf16, float32 = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(args.device) for dtype in dtypes
    )
    first = next(iter(outputs.values()))
    reference = compare_references(bf16, float32, prompts, first)
    basis = "transformers in bfloat16 against float32"
    for variant, those in outputs.items():
        with report.attempt(f"parity.{variant}.agreement", f"parity.{variant}.logprob"):
            agreement, mean, largest = compare(bf16, prompts, those)
            same = [one["output_ids"] == other["output_ids"] for one, other in zip(those, first, strict=True)]
            report.add(
                f"parity.{variant}.agreement",
                [agreement],
                limit=reference[0],
                limit_basis=basis,
                share_of_outputs_equal_to_first=float(np.mean(same)),
                num_tokens=len(prompts) * num_tokens,
            )
            report.add(
                f"parity.{variant}.logprob",
                [mean],
                limit=reference[1],
                limit_basis=basis,
                largest=largest,
                against_float32=compare(float32, prompts, those)[1],
            )
    del bf16, float32
    empty_cache(args.device)


# ---------------------------------------------------------------------------------------------- in flight


async def streamed(
    engine: Engine, prompts: list[list[int]], num_tokens: int, update: Callable[[], Awaitable[Any]]
) -> list[dict[str, Any]]:
    """Run streams, with an update when a third of their tokens is there; returns the outputs."""
    params = {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True}
    begun = asyncio.Event()

    async def stream(prompt: list[int]) -> dict[str, Any]:
        last: dict[str, Any] = {}
        async for last in await engine.async_generate(
            input_ids=prompt, sampling_params=params, return_logprob=True, stream=True
        ):
            if len(last["output_ids"]) > num_tokens // 3:
                begun.set()
        return last

    streams = [asyncio.ensure_future(stream(prompt)) for prompt in prompts]
    await begun.wait()
    await update()
    return await asyncio.gather(*streams)


@torch.inference_mode()
def forced(
    models: Mapping[str, Any], prompt: list[int], output: dict[str, Any], *, anew: bool
) -> torch.Tensor:
    """Logprobs of an output's tokens, each by the weights of its span.

    Args:
        models: by weight version.
        anew: whether all KV is computed again by the weights of each span; else it is kept.
    """
    spans = output["meta_info"]["weight_versions"]
    tokens = [*prompt, *output["output_ids"]]
    cache, num_cached, found = DynamicCache(), 0, []
    for span in spans:
        model = models[span["version"]]
        if anew:
            cache, num_cached = DynamicCache(), 0
        # The token before a span is computed with the weights that sample the span's first token.
        first, end = len(prompt) + span["start"] - 1, len(prompt) + span["end"] - 1
        ids = torch.tensor([tokens[num_cached:end]], device=model.device)
        rows = model(ids, past_key_values=cache).logits[0, first - num_cached :].float().log_softmax(-1)
        chosen = torch.tensor(tokens[first + 1 : end + 1], device=model.device)
        found.append(rows.gather(1, chosen[:, None])[:, 0].cpu())
        num_cached = end
    return torch.cat(found)


def measure_in_flight(report: Report, args: argparse.Namespace, folder: Path) -> None:
    shape = TINY_SHAPE if args.tiny else LLAMA_SHAPE
    num_streams, num_tokens = (4, 30) if args.tiny else (NUM_STREAMS, STREAM_LEN)
    model = make_model(folder, shape, args.device, is_llama=True)
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    noise = {name: 1 + STEP * torch.randn_like(tensor) for name, tensor in old.items()}
    new = {name: tensor * noise[name] for name, tensor in old.items()}
    prompts = np.random.default_rng(0).integers(0, shape["vocab_size"], (num_streams, 32)).tolist()
    outputs: dict[str, list[dict[str, Any]]] = {}
    sizes = {"load_format": "auto", "max_total_tokens": num_streams * (num_tokens + 64)}
    with Engine(**engine_args(args, folder, **sizes)) as engine:
        for mode in ("in_place", "retract"):
            engine.update_weights_from_tensor(list(old.items()), weight_version="old")
            update = partial(
                engine.async_update_weights_from_tensor,
                list(new.items()),
                pause_mode=mode,
                flush_cache=mode == "retract",
                weight_version="new",
            )
            outputs[mode] = asyncio.run(streamed(engine, prompts, num_tokens, update))
    kind = type(model)
    models: dict[torch.dtype, dict[str, Any]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        models[dtype] = {}
        for version, weights in (("old", old), ("new", new)):
            with torch.device(args.device):
                one = kind(model.config).to(dtype)
            # Rounded to bfloat16, as in the engine.
            one.load_state_dict({name: tensor.bfloat16().to(dtype) for name, tensor in weights.items()})
            models[dtype][version] = one
    for mode, those in outputs.items():
        key = f"parity.{mode}.logprob"
        with report.attempt(key):
            differences: dict[str, list[torch.Tensor]] = {"engine": [], "bf16": [], "other_kv": []}
            for prompt, output in zip(prompts, those, strict=True):
                assert len(output["meta_info"]["weight_versions"]) == 2, "the update came too late"
                right = forced(models[torch.float32], prompt, output, anew=mode == "retract")
                other = forced(models[torch.float32], prompt, output, anew=mode != "retract")
                bf16 = forced(models[torch.bfloat16], prompt, output, anew=mode == "retract")
                ours = torch.tensor([row[0] for row in output["meta_info"]["output_token_logprobs"]])
                differences["engine"].append((ours - right).abs())
                differences["bf16"].append((bf16 - right).abs())
                start = output["meta_info"]["weight_versions"][1]["start"]
                differences["other_kv"].append((other - right).abs()[start:])
            spread = {name: torch.cat(all_of) for name, all_of in differences.items()}
            report.add(
                key,
                [float(spread["engine"].mean())],
                largest={name: float(one.max()) for name, one in spread.items()},
                mean={name: float(one.mean()) for name, one in spread.items()},
                p99={name: float(np.percentile(one.numpy(), 99)) for name, one in spread.items()},
                num_tokens=len(spread["engine"]),
            )
            print(f"    {report.rows[key]['mean']} largest {report.rows[key]['largest']}", flush=True)
    del models, model
    empty_cache(args.device)


# -------------------------------------------------------------------------------------------------- precision


PRECISIONS: dict[str, dict[str, Any]] = {
    "as_served": {},
    "fp8_kv": {"kv_cache_dtype": "fp8_e4m3"},
    "fp8_weights": {"quantization": "fp8"},
    "fp8_rows": {"quantization": "w8a8_fp8"},
    "fp8_both": {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"},
}
BLOCK = 128
NUM_QUESTIONS = 1024


def differences(model: Any, prompts: list[list[int]], outputs: list[dict[str, Any]]) -> NDArray[np.float64]:
    """transformers' logprob minus the engine's, for every token."""
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
    """Round a model's layers to FP8: weights once, and activations before each product. Returns the model.

    Args:
        block: size of the blocks that have a scale; None: one scale per row of a matrix, and per token.
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


def measure_variants(
    args: argparse.Namespace, folder: Path, prompts: list[list[int]], num_tokens: int
) -> dict[str, Any]:
    references = {
        dtype: AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(args.device)
        for dtype in ("bfloat16", "float32")
    }
    rows: dict[str, Any] = {}
    for variant, options in PRECISIONS.items():
        sizes = {"load_format": "auto", "max_total_tokens": 65_536, "dtype": "bfloat16", "random_seed": 0}
        arguments = engine_args(args, folder, **sizes, **options)
        may_end = num_tokens <= MAX_ANSWER_TOKENS
        outputs = answers(arguments, prompts, num_tokens, temperature=1.0, ignore_eos=not may_end)
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


def measure_precision(report: Report, args: argparse.Namespace, folder: Path) -> None:
    if args.demo_model is not None:
        folder, num_tokens = args.demo_model, MAX_ANSWER_TOKENS
        questions = ProblemSet(1).draw(16 if args.tiny else NUM_QUESTIONS)
        prompts = [encode(problem.question) for problem in questions]
    else:
        prompts, num_tokens = prepared(args, folder)
    rows = measure_variants(args, folder, prompts, num_tokens)
    if not args.tiny:
        model = "demo" if args.demo_model is not None else "seeded"
        name = "gpu_precision" if args.device == "cuda" else "precision_emulated"
        print(write_result(f"{name}_{model}", {"device": args.device, "model": model, "rows": rows}))


PARTS = {"greedy": measure, "in_flight": measure_in_flight, "precision": measure_precision}


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=["greedy", "in_flight"])
    parser.add_argument("--demo-model", type=Path, help="of the part precision: demo_out/model")
    args = parse(parser, argv)
    report = Report("gpu_parity", args)
    report.facts["model"] = {"greedy": SHAPE, "in_flight": LLAMA_SHAPE}
    for part in args.parts:
        key = "parity.in_place.logprob" if part == "in_flight" else "parity.default.agreement"
        with tempfile.TemporaryDirectory(prefix="eb-") as folder, report.attempt(key):
            PARTS[part](report, args, Path(folder))
    report.finish()


if __name__ == "__main__":
    main()
