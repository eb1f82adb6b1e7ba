"""Goals of the GPU benchmarks, by the key of the row of results.

The figures of other engines, SGLang 0.5.14 and vLLM 0.25.0, are from wall times of whole calls, with dummy
weights of the same shapes, on one NVIDIA H200.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """One row of the tables.

    Attributes:
        goal: in `unit`; None: there is no goal.
        at_least: whether larger values are better.
    """

    table: str
    title: str
    unit: str
    goal: float | None
    at_least: bool = False
    sglang: str = ""
    vllm: str = ""


TABLES = {
    "throughput": "Tokens per second",
    "rollout": "Rollouts: groups, long tails, temperature 1, logprobs (Llama-3.1-8B, default flags)",
    "occupation": "Memory given back and taken again",
    "default": "At default flags, the trainer's copy of the weights on the same card",
    "delta": "Updates of what changed, of 16 GB, from a trainer on the same GPU",
    "replay": "What requests and updates ask for (Llama-3.1-8B, default flags)",
    "lora": "LoRA adapters of rank 32 (Llama-3.1-8B, all products)",
    "start": "Start",
    "parity": "Agreement with transformers",
    "parallel": "Several GPUs",
}

WORKLOADS = {1: (128, 256), 32: (256, 256), 256: (512, 256)}
"""Tokens of prompt and output, by batch size."""

_THROUGHPUT = {
    ("llama8b", 1): (240, "205-207", "204"),
    ("llama8b", 32): (5_800, "5,051-5,066", "5,015"),
    ("llama8b", 256): (11_000, "9,538-9,994", "9,700"),
    ("qwen0.6b", 1): (1_000, "614", "608"),
    ("qwen0.6b", 32): (20_000, "14,863", "14,812"),
    ("qwen0.6b", 256): (38_000, "27,038", "30,392"),
}
SHAPE_TITLES = {
    "llama8b": "Llama-3.1-8B",
    "llama8b-fp8": "Llama-3.1-8B in FP8",
    "qwen0.6b": "Qwen3-0.6B",
    "qwen4b": "Qwen3-4B",
    "qwen8b": "Qwen3-8B",
    "qwen7b": "Qwen2.5-7B",
    "qwen32b": "Qwen2.5-32B",
    "qwen30b-a3b": "Qwen3-30B-A3B",
    "glm4.7-flash": "GLM-4.7-Flash",
    "moonlight": "Moonlight-16B-A3B",
    "gpt-oss-20b": "gpt-oss-20b",
    "qwen3.5-9b": "Qwen3.5-9B",
    "qwen3.5-35b-a3b": "Qwen3.5-35B-A3B",
    "nemotron-3-nano": "Nemotron-3-Nano-30B-A3B",
    "nemotron-h-8b": "Nemotron-H-8B",
    "llama8b-transformers": "Llama-3.1-8B by transformers' code",
}

ROLLOUT_PREFIXES = {
    "llama8b": "llama",
    "qwen30b-a3b": "moe",
    "qwen0.6b": "qwen",
    "glm4.7-flash": "glm",
    "moonlight": "moonlight",
    "qwen8b": "qwen8b",
    "qwen3.5-9b": "qwen3.5",
    "qwen3.5-35b-a3b": "qwen3.5_moe",
    "gpt-oss-20b": "gpt-oss",
}
"""Prefixes of the keys of rows, by model."""


def _throughput_goals() -> dict[str, Goal]:
    goals = {}
    for shape, title in SHAPE_TITLES.items():
        for batch_size, (prompt_len, output_len) in WORKLOADS.items():
            goal, sglang, vllm = _THROUGHPUT.get((shape, batch_size), (None, "", ""))
            goals[f"throughput.{shape}.{batch_size}"] = Goal(
                "throughput",
                f"{title}, batch {batch_size} ({prompt_len} in, {output_len} out)",
                "tok/s",
                goal,
                True,
                sglang,
                vllm,
            )
    return goals


_TP4 = {1: 562, 32: 10_802, 256: 24_404}
TP_SIZES = {"llama8b": (1, 2, 4), "llama8b-fp8": (2,), "qwen32b": (2, 4), "qwen30b-a3b": (2,)}
"""Tensor-parallel sizes, by shape."""


def _parallel_goals() -> dict[str, Goal]:
    goals = {}
    for shape, tp_sizes in TP_SIZES.items():
        for tp_size in tp_sizes:
            for batch_size, (prompt_len, output_len) in WORKLOADS.items():
                sizes = f"batch {batch_size} ({prompt_len} in, {output_len} out)"
                title = f"{SHAPE_TITLES[shape]}, tp={tp_size}, {sizes}"
                goal = _TP4[batch_size] if (shape, tp_size) == ("llama8b", 4) else None
                goals[f"parallel.{shape}.tp{tp_size}.{batch_size}"] = Goal(
                    "parallel", title, "tok/s", goal, True
                )
    for shape in ("llama8b", "qwen32b"):
        title = f"{SHAPE_TITLES[shape]}, all weights broadcast from a trainer on another GPU"
        # The goal is a share of the rate of a copy between the GPUs in the same run.
        goals[f"parallel.broadcast.{shape}"] = Goal("parallel", title, "GB/s", None, True)
        packed = f"{title}, in buffers of 1 GiB"
        goals[f"parallel.broadcast_packed.{shape}"] = Goal("parallel", packed, "GB/s", None, True)
        # The goal depends on the same run: the normal gap + 5 ms.
        goals[f"parallel.broadcast_gap.{shape}"] = Goal(
            "parallel", "the same under 64 streams, in_place: longest gap (goal: normal + 5 ms)", "ms", None
        )
    for how, what in {
        "broadcast": "broadcast from a trainer on a third GPU",
        "broadcast_packed": "broadcast from a trainer on a third GPU, in buffers of 1 GiB",
        "vllm": "broadcast from there by vLLM's protocol",
        "vllm_packed": "broadcast from there by vLLM's protocol, in buffers of 1 GiB",
        "vllm_handles": "by vLLM's handles of a buffer of 1 GiB on each of the engine's GPUs",
    }.items():
        goals[f"parallel.tp2_{how}.llama8b"] = Goal(
            "parallel", f"Llama-3.1-8B, tp=2, all weights {what}", "GB/s", None, True
        )
    goals["parallel.tp2_broadcast_gap.llama8b"] = Goal(
        "parallel", "tp=2, the first of these under 64 streams, in_place: longest gap", "ms", None
    )
    layouts = {"tp2": ("tp=2", None), "tp4": ("tp=4", 16_000), "tp2dp2": ("tp=2, dp=2", 19_200)}
    for layout, (title, goal) in layouts.items():
        goals[f"parallel.grpo.{layout}"] = Goal(
            "parallel", f"Llama-3.1-8B, {title}, 64 prompts of 512, 8 samples each", "tok/s", goal, True
        )
    return goals


def _default_goals() -> dict[str, Goal]:
    """SGLang was measured with FlashInfer attention, `mem_fraction_static` 0.85, and graphs up to 512."""
    goals = {}
    rows: list[tuple[str, str, float | None, str]] = []
    for size, stall, reply, retract, theirs in (
        (64, 15, 60, 300, ("66-68", "65-69", "312-319")),
        (256, 25, 120, 450, ("453-491", "61-64", "461-551")),
    ):
        rows += [
            (f"normal_{size}", f"{size} streams that decode, no update: longest gap", None, ""),
            (f"stall_in_place_{size}", f"{size} streams, in_place: longest gap", stall, theirs[0]),
            (f"reply_in_place_{size}", f"{size} streams, in_place: reply", reply, theirs[1]),
            (f"start_{size}", f"{size} streams from their start on, no update: longest gap", None, ""),
            (f"stall_retract_{size}", f"{size} streams, retract: longest gap", retract, theirs[2]),
            (f"reply_retract_{size}", f"{size} streams, retract: reply", None, ""),
        ]
    rows += [
        ("reply_idle", "nothing running: reply", 15, "55-60"),
        ("reply_idle_apart", "the same 0.3 s after the one before: reply", None, ""),
        ("kept_reply_idle", "memory kept mapped, nothing running: reply", 15, "55-60"),
        ("kept_stall_in_place_64", "memory kept mapped, 64 streams, in_place: longest gap", 15, "66-68"),
        ("kept_reply_in_place_64", "memory kept mapped, 64 streams, in_place: reply", 60, "65-69"),
        ("kept_stall_in_place_256", "memory kept mapped, 256 streams, in_place: longest gap", 25, "453-491"),
        ("kept_reply_in_place_256", "memory kept mapped, 256 streams, in_place: reply", 120, "61-64"),
        ("buckets_reply_idle", "512 MB buckets, nothing running: all replies", 60, "72-81"),
        ("buckets_reply_64", "512 MB buckets, 64 streams: all replies", 200, ""),
        ("buckets_stall_64", "512 MB buckets, 64 streams: longest gap", 15, ""),
        ("release_kv", "release KV", 30, "72-75"),
        ("resume_kv_first_token", "resume KV, just freed: first token", 30, ""),
        ("resume_kv_all", "resume KV, just freed: reply", None, "162-210"),
        ("driver_release_kv", "the driver's own calls: release of as much", None, ""),
        ("driver_resume_kv_all", "the driver's own calls: resume of as much, just freed", None, ""),
        ("resize_30gb_down", "30 GB of KV given back under 64 streams: reply", 100, ""),
        ("resize_30gb_down_stall", "the same: longest gap", 15, ""),
        ("resize_30gb_up", "30 GB of KV taken again under 64 streams: reply", 100, ""),
        ("resize_30gb_up_stall", "the same: longest gap", 15, ""),
        ("park_64x2k", "64 streams of 2,048 tokens parked: from resume to next token", None, ""),
        ("park_64x2k_re_prefill", "the same streams retracted", None, ""),
        ("park_64x2k_release", "the same streams parked: release", None, ""),
    ]
    own = "tensors of the process that has the engine"
    rows += [
        ("first_reply", "the first update after a start: reply", None, "48"),
        ("later_reply", "the three updates after it: reply", None, ""),
        ("own_first_reply", f"{own}, the first update after a start: reply", None, "48"),
        ("own_later_reply", f"{own}, the three updates after it: reply", None, ""),
        ("own_normal_256", f"{own}, 256 streams, no update: longest gap", None, ""),
        ("own_stall_in_place_256", f"{own}, 256 streams, in_place: longest gap", None, ""),
        ("own_reply_in_place_256", f"{own}, 256 streams, in_place: reply", None, "50"),
        ("own_start_256", f"{own}, 256 streams from their start on: longest gap", None, ""),
        ("own_stall_retract_256", f"{own}, 256 streams, retract: longest gap", None, ""),
        ("own_reply_retract_256", f"{own}, 256 streams, retract: reply", None, "79-84"),
        ("own_release_kv", f"{own}: release KV", None, "37-41"),
        ("own_resume_kv_first_token", f"{own}: resume KV, just freed: first token", None, ""),
        ("own_resume_kv_all", f"{own}: resume KV, just freed: reply", None, ""),
        ("own_driver_release_kv", "the driver's own calls: release of as much", None, ""),
        ("own_driver_resume_kv_all", "the driver's own calls: resume of as much", None, ""),
    ]
    for name, what, goal, sglang in rows:
        goals[f"default.{name}"] = Goal("default", what, "ms", goal, sglang=sglang)
    for name, what, goal in (
        ("normal_64", "64 streams, no update: longest gap", None),
        ("stall_in_place_64", "64 streams, in_place: longest gap", 25),
        ("reply_in_place_64", "64 streams, in_place: reply", 1000),
        ("reply_idle", "nothing running: reply", None),
        ("reply_idle_apart", "the same 0.3 s after the one before: reply", None),
        ("kept_stall_in_place_64", "memory kept mapped, 64 streams, in_place: longest gap", 25),
        ("kept_reply_in_place_64", "memory kept mapped, 64 streams, in_place: reply", 1000),
        ("kept_reply_idle", "memory kept mapped, nothing running: reply", None),
    ):
        goals[f"default.moe_{name}"] = Goal("default", f"Qwen3-30B-A3B, {what}", "ms", goal)
        for model, prefix in ROLLOUT_PREFIXES.items():
            if prefix not in ("llama", "moe"):
                title = f"{SHAPE_TITLES[model]}, {what}"
                goals[f"default.{prefix}_{name}"] = Goal("default", title, "ms", None)
        in_time = 15.0 if name.endswith("stall_in_place_64") else None
        divided = {"reply_idle": 25.0, "kept_reply_idle": 15.0}.get(name, in_time)
        for num_ranks in (2, 4):
            goals[f"default.tp{num_ranks}_{name}"] = Goal("default", f"tp={num_ranks}, {what}", "ms", divided)
            title = f"tp={num_ranks}, all of the trainer's tensors on the first GPU, {what}"
            goals[f"default.tp{num_ranks}_one_gpu_{name}"] = Goal("default", title, "ms", None)
    return goals


# By row: the goal, and SGLang's figure.
_ROLLOUT_GOALS = {
    "grpo_512_updated": (0.99, ""),
    "grpo_512_tok_s": (13_000, "7,350"),
    "llama_b32": (6_000, "5,066"),
    "llama_b256": (11_300, "10,113"),
    "llama_rl_b256": (0.995, "0.964"),
    "llama_topp_b256": (0.99, ""),
    "moe_b1": (320, "227"),
    "moe_b32": (2_500, "2,022"),
    "moe_b256": (9_600, "8,304"),
    "moe_rl_b256": (9_500, "8,003"),
    "llama_b1024_rl": (17_500, "13,157"),
    "prefill_16x8192_tok_s": (None, "37,387"),
    "prefill_128x1024_tok_s": (48_000, "42,591"),
    "prefill_16x16384_tok_s": (None, "30,357"),
    "http_1024_share": (0.97, ""),
}
_ROLLOUT_MOST = {
    "prompt_logprobs_overhead": 0.05,
    "qwen_prompt_logprobs_overhead": 0.3,
    "http_1024_gap_p99_of_median": 2.0,
    "engine_streams_us_per_token": 30,
}


def _rollout_goals() -> dict[str, Goal]:
    goals: dict[str, Goal] = {}

    def add(name: str, title: str, unit: str, *, at_least: bool = True) -> None:
        goal, sglang = _ROLLOUT_GOALS.get(name, (_ROLLOUT_MOST.get(name), ""))
        goals[f"rollout.{name}"] = Goal("rollout", title, unit, goal, at_least, sglang)

    asked = {
        "t1": "temperature 1",
        "rl": "temperature 1, logprobs",
        "topp": "the same with top_p 0.95, top_k 50",
        "top20": "the same with the top 20 logprobs",
        "prompt_logprobs": "the same with logprobs of the prompt",
        "penalties": "the same with penalties",
        "stop_strings": "the same with stop strings, of the same without",
    }
    for model, prefix in ROLLOUT_PREFIXES.items():
        of_model = "" if prefix == "llama" else f"{SHAPE_TITLES[model]}: "
        other = "" if prefix == "llama" else f"{prefix}_"
        for prompt_len in (512, 4096):
            title = f"{of_model}64 prompts of {prompt_len:,}, 8 samples each"
            add(f"{other}grpo_{prompt_len}_tok_s", title, "tok/s")
        title = f"{of_model}the first with an update (in_place) in the middle: of the same without"
        add(f"{other}grpo_512_updated", title, "share")
        for size in WORKLOADS:
            add(f"{prefix}_b{size}", f"{SHAPE_TITLES[model]}, batch {size}, greedy", "tok/s")
            for name, title in asked.items():
                row = f"{prefix}_{name}_b{size}"
                unit = "tok/s" if row == "moe_rl_b256" else "share"
                of_greedy = "" if unit == "tok/s" or name == "stop_strings" else ": of greedy"
                add(row, f"{SHAPE_TITLES[model]}, batch {size}, {title}{of_greedy}", unit)
        add(f"{prefix}_b1024_rl", f"{SHAPE_TITLES[model]}, 1,024 requests, temperature 1, logprobs", "tok/s")
        for name in ("16x8192", "128x1024", "16x16384"):
            add(f"{other}prefill_{name}_tok_s", f"{of_model}prefill, {name.replace('x', ' x ')}", "tok/s")
        title = f"{of_model}128 x 1,024 with the prompts' logprobs: longer by"
        add(f"{other}prompt_logprobs_overhead", title, "share", at_least=False)
        for name in ("64x4k", "64x8k", "16x16k", "16x32k", "256xuneven"):
            add(f"{other}decode_{name}_tok_s", f"{of_model}decode, {name.replace('x', ' x ')}", "tok/s")
        for size in (64, 256):
            for name, title in {"p50": "median", "p99": "p99", "max": "longest"}.items():
                add(
                    f"{other}gap_{name}_b{size}",
                    f"{of_model}{size} streams, {title} gap",
                    "ms",
                    at_least=False,
                )
            title = f"{of_model}{size} streams at once, first token"
            add(f"{other}gap_first_b{size}", title, "ms", at_least=False)
        title = f"{of_model}256 streams of Engine that decode: p99 gap (goal: twice the median)"
        add(f"{other}engine_streams_256_p99_ms", title, "ms", at_least=False)
        title = f"{of_model}256 streams of Engine: CPU time of their process for a token"
        add(f"{other}engine_streams_us_per_token", title, "us", at_least=False)
        for name in ("p50", "p99"):
            title = f"{of_model}first token of one request beside 256 others, {name}"
            add(f"{other}first_token_under_load_{name}", title, "ms", at_least=False)
        for size in (256, 1024):
            add(f"{other}http_{size}_share", f"{of_model}{size:,} requests by HTTP: of Engine", "share")
            add(f"{other}http_{size}_streamed_share", f"{of_model}the same, streamed: of Engine", "share")
            title = f"{of_model}{size:,} streams by HTTP: p99 gap as multiple of the median"
            add(f"{other}http_{size}_gap_p99_of_median", title, "x", at_least=False)
    return goals


def _delta_goals() -> dict[str, Goal]:
    goals = {"delta.normal": Goal("delta", "64 streams, no update: longest gap", "ms", None)}
    for percent, apply_ms, vllm in (("1", 10, "93"), ("3", 15, ""), ("10", 30, "")):
        changed = f"{percent} % changed"
        goals[f"delta.idle_{percent}"] = Goal(
            "delta", f"{changed}: call to reply, idle", "ms", apply_ms, vllm=vllm
        )
        goals[f"delta.stall_{percent}"] = Goal("delta", f"{changed}: 64 streams, longest gap", "ms", 15)
        goals[f"delta.bytes_{percent}"] = Goal(
            "delta", f"{changed}: on the wire per changed weight", "bytes", 3.2
        )
        goals[f"delta.sender_{percent}"] = Goal(
            "delta", f"{changed}: found and coded by the trainer", "ms", None
        )
    return goals


GOALS: dict[str, Goal] = {
    **_throughput_goals(),
    **_rollout_goals(),
    **_default_goals(),
    **_parallel_goals(),
    **_delta_goals(),
    "release.weights": Goal("occupation", "release weights", "ms", 6, sglang="10", vllm="35-39 (both)"),
    "release.kv_cache": Goal("occupation", "release KV", "ms", 25, sglang="18-22", vllm="35-39 (both)"),
    "resume.weights": Goal("occupation", "resume weights, clean pages", "ms", 2, sglang="9-13", vllm="21-22"),
    "resume.kv_cache": Goal("occupation", "resume KV, clean pages", "ms", 6, sglang="6.3", vllm="52-395"),
    "resume_just_freed.weights": Goal("occupation", "resume weights, just freed", "ms", None),
    "resume_just_freed.kv_cache": Goal(
        "occupation", "resume KV, just freed", "ms", None, sglang="43-183", vllm="52-395"
    ),
    "resume_idle.weights": Goal("occupation", "resume weights, idle GPU", "ms", None),
    "resume_idle.kv_cache": Goal("occupation", "resume KV, idle GPU", "ms", None),
    "backup.release_changed": Goal(
        "occupation",
        "backup: release changed weights",
        "ms",
        330,
        sglang="4,693 (first: 6,501)",
        vllm="first: 6,118",
    ),
    "backup.release_unchanged": Goal(
        "occupation", "backup: release unchanged weights", "ms", 10, sglang="4,693", vllm="331"
    ),
    "backup.resume": Goal(
        "occupation", "backup: resume weights", "ms", 320, sglang="1,330-1,418", vllm="488"
    ),
    "replay.canary_ms": Goal("replay", "a canary of 256 tokens adds to the stall", "ms", 15),
    "replay.short_behind_long": Goal(
        "replay", "first token of 128 tokens, behind 30,000: times alone", "ratio", 3
    ),
    "replay.structured_64": Goal(
        "replay", "64 requests by a JSON schema: of the same without", "share", 0.95, at_least=True
    ),
    "replay.masks_64": Goal(
        "replay", "64 requests that ask for sampling masks: of the same without", "share", 0.99, at_least=True
    ),
    "replay.masks_arrays_64": Goal(
        "replay", "the same, in two arrays per answer (slime's form)", "share", 0.99, at_least=True
    ),
    "replay.routes_256": Goal(
        "replay", "256 streams with routed experts (Qwen3-30B-A3B): of without", "share", 0.98, at_least=True
    ),
    "lora.share_b1": Goal("lora", "1 request with an adapter: of the same without", "share", 0.93, True),
    "lora.share_b32": Goal("lora", "32 requests, 1 adapter: of the same without", "share", 0.93, True),
    "lora.share_b256_4": Goal(
        "lora", "256 requests, 4 adapters: of the same without", "share", 0.90, True, sglang="0.70-0.79"
    ),
    "lora.share_b256_32": Goal("lora", "256 requests, 32 adapters: of the same without", "share", 0.85, True),
    "lora.moe_share_b32": Goal(
        "lora",
        "Qwen3-30B-A3B, 32 requests, 1 adapter of experts too, rank 16: of without",
        "share",
        0.80,
        True,
    ),
    "lora.load_reply_ms": Goal(
        "lora", "a version from tensors on the card, 64 streams: to the reply", "ms", 15
    ),
    "lora.load_gap_ms": Goal("lora", "the same: longest gap, beyond that without", "ms", 2),
    "lora.fetch_first_token_ms": Goal(
        "lora", "an evicted adapter: first token, beyond a resident one", "ms", 10
    ),
    "start.cold": Goal(
        "start", "start to first token, no kernel compiled, 16 cores", "s", 60, sglang="122-143"
    ),
    **{
        f"start.{model}_first_token": Goal(
            "start", f"{SHAPE_TITLES[model]}: start to first token, kernels cached", "s", 20
        )
        for model in ROLLOUT_PREFIXES
        if model != "llama8b"
    },
    **{
        f"start.tp{num_ranks}_first_token": Goal(
            "start", f"tp={num_ranks}: start to first token, kernels cached", "s", 20
        )
        for num_ranks in (2, 4)
    },
    "start.first_token": Goal(
        "start", "start to first token, kernels cached", "s", 20, sglang="17-73", vllm="38"
    ),
    **{
        f"parity.{mode}.logprob": Goal(
            "parity", f"0.85 B Llama across an update ({mode}): mean |Δlogprob| from float32", "nat", None
        )
        for mode in ("in_place", "retract")
    },
    **{
        f"parity.{variant}.{measure}": Goal("parity", f"{title}: {what}", unit, None, at_least)
        for variant, title in (
            ("default", "as served"),
            ("no_graph", "without CUDA graphs"),
            ("no_overlap", "without overlap"),
            ("torch_native", "torch_native"),
        )
        for measure, what, unit, at_least in (
            ("agreement", "greedy tokens that agree", "share", True),
            ("logprob", "mean |Δlogprob|", "nat", False),
        )
    },
}
