"""The arguments of a server or an Engine, and their command line. They are checked elsewhere."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, get_type_hints

from ebbtide.srt.arguments import (
    ArgumentSpec,
    SglangArgument,
    SglangArguments,
    arg,
    argument_spec,
    sglang_arguments,
)

_DTYPES = ("auto", "float32", "float", "float16", "half", "bfloat16", "bf16")
OWN_SCHEDULE_POLICIES = ("fcfs", "lpm", "lof", "priority")
_OTHER_SCHEDULE_POLICIES = ("dfs-weight", "random", "routing-key", "hrrn", "shortest-prefill-first")
# The keys of `TOOL_CALL_FORMATS` and `REASONING_FORMATS`, repeated here to avoid their imports.
TOOL_CALL_PARSERS = (
    *("qwen", "qwen25", "hermes", "qwen3_coder", "llama3", "mistral", "deepseekv3", "deepseekv31", "glm45"),
    *("kimi_k2", "pythonic"),
)
REASONING_PARSERS = ("deepseek-r1", "deepseek-v3", "glm45", "kimi", "kimi_k2", "qwen3", "qwen3-thinking")
_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass
class ServerArgs(SglangArguments):
    """The arguments of a server or an `Engine`, with their defaults. `ebbtide serve --help` explains each.

    A field `a_b` is the flag `--a-b`. Values are checked when an engine starts (`config.resolve`), not here.

    Raises:
        TypeError: a field that does not exist.

    Source: wire_api section 7.
    """

    model_path: str = arg(
        dataclasses.MISSING,
        "Folder of a Hugging Face checkpoint, or the id of a model on the hub.",
        aliases=("--model",),
    )
    model_impl: str = arg(
        "auto",
        "auto: Ebbtide's code where it has the architecture, else transformers' with Ebbtide's attention;"
        " transformers: that for every architecture.",
        choices=("auto", "transformers"),
    )
    tokenizer_path: str | None = arg(None, "Folder or hub id of the tokenizer (default: the model path).")
    tokenizer_mode: str = arg(
        "auto",
        "auto: the fast tokenizer if the model has one; slow: the Python one.",
        choices=("auto", "slow"),
    )
    skip_tokenizer_init: bool = arg(False, "Load no tokenizer: requests and answers are token ids.")
    trust_remote_code: bool = arg(False, "Run Python code that comes with the model's config or tokenizer.")
    revision: str | None = arg(None, "Branch, tag or commit of a hub id.")
    context_length: int | None = arg(
        None, "Longest request, prompt and output, in tokens (default: the model's).", minimum=1
    )
    dtype: str = arg("auto", "Type of weights and activations; auto: the checkpoint's.", choices=_DTYPES)
    kv_cache_dtype: str = arg(
        "auto", "Type of the KV cache; auto: the model's.", choices=(*_DTYPES, "fp8_e4m3", "fp8")
    )
    kv_cache_scales: str = arg(
        "checkpoint",
        "Scales of a KV cache in FP8: the checkpoint's (1 where it has none), calibrated once"
        " on the first tokens, or calibrated again after every update.",
        choices=("checkpoint", "calibrate", "recalibrate"),
    )
    kv_cache_calibration_tokens: int = arg(4096, "Prompt tokens that a calibration measures.", minimum=1)
    load_format: str = arg(
        "auto",
        "Files to load weights from: safetensors, pt (.bin), whichever there is (auto); "
        "dummy: random weights.",
        choices=("auto", "safetensors", "pt", "dummy"),
    )
    json_model_override_args: str = arg("{}", "JSON object merged into the model's config.")
    served_model_name: str | None = arg(
        None,
        "Model name shown to clients (default: the model path). Requests may use any of several "
        "names, separated by commas; with * among them, any name.",
    )
    chat_template: str | None = arg(
        None, "Chat template: a file, or the Jinja text itself (default: the tokenizer's)."
    )
    weight_version: str = arg("default", "Version of the weights at start, as answers report it.")

    host: str = arg("127.0.0.1", "Address to listen on.")
    port: int = arg(30000, "TCP port to listen on.", minimum=1)
    api_key: str | None = arg(None, "Key that generation requests must send (default: none needed).")
    admin_api_key: str | None = arg(
        None,
        "Key that control requests must send (default: the api-key, if any; "
        "a server without an admin key listens on loopback only).",
    )
    allow_unauthenticated_control: bool = arg(
        False,
        "Listen beyond loopback without an admin key, although anyone who reaches the port "
        "then controls the engine.",
    )
    allowed_hosts: list[str] | None = arg(
        None,
        "Names by which clients reach a server without an API key, besides addresses and "
        "localhost; *: any (default: none on loopback, else any). Web pages of the hosts "
        "named may also send it requests.",
    )
    root_path: str = arg(
        "",
        "Path below which a proxy serves this server, such as /engines/a, whether or not the proxy "
        "removes it.",
    )
    enable_request_id_headers: bool = arg(
        False, "Answer with the X-Request-Id of the request, or a new one where it has none."
    )
    enable_force_include_usage: bool = arg(
        False, "End every stream of /v1 with the usage, whatever its stream_options say."
    )

    tp_size: int = arg(
        1,
        "Ranks that divide each replica of the model (tensor parallelism).",
        aliases=("--tensor-parallel-size", "--tp"),
        minimum=1,
    )
    dp_size: int = arg(
        1,
        "Replicas of the model behind one address (data parallelism).",
        aliases=("--data-parallel-size", "--dp"),
        minimum=1,
    )
    load_balance_method: str = arg(
        "auto",
        "Which replica gets a request: round_robin, in turn (also auto, "
        "follow_bootstrap_room, total_requests); shortest_queue, the one with the fewest "
        "tokens to process (also total_tokens).",
        choices=(
            *("auto", "round_robin", "shortest_queue"),
            *("follow_bootstrap_room", "total_requests", "total_tokens"),
        ),
    )
    nnodes: int = arg(1, "Number of nodes that the ranks are on.", minimum=1)
    node_rank: int = arg(0, "Number of this node, from 0; node 0 serves requests.", minimum=0)
    dist_init_addr: str | None = arg(
        None,
        "host:port of node 0, where the nodes meet; not needed with one node.",
        aliases=("--nccl-init-addr",),
    )
    dist_timeout: int | None = arg(
        None, "Seconds that nodes and ranks wait for each other at start (default: 600).", minimum=1
    )
    nccl_port: int | None = arg(
        None,
        "Port on which the ranks of replica 0 meet, with several nodes (default: a free one).",
        minimum=1,
    )
    base_gpu_id: int = arg(0, "GPU of the node's first rank.", minimum=0)
    gpu_id_step: int = arg(1, "Distance between the GPUs of neighbouring ranks.", minimum=1)
    disable_custom_all_reduce: bool = arg(
        False, "Use NCCL for all sums over ranks, and never kernels that write to another GPU's memory."
    )
    device: str | None = arg(
        None, "Device to run on (default: cuda if torch sees a GPU, else cpu).", choices=("cuda", "cpu")
    )
    random_seed: int | None = arg(None, "Seed of sampling (default: drawn at start).")

    mem_fraction_static: float | None = arg(
        None,
        "Share of the memory free at start that weights and KV cache take (default: 0.85 on a GPU, for the "
        "cache no less than half of what the weights leave).",
    )
    max_total_tokens: int | None = arg(
        None, "Size of the KV cache in tokens (default: what mem-fraction-static leaves).", minimum=1
    )
    page_size: int | None = arg(None, "Tokens per page of the KV cache (default: 16).", minimum=1)
    max_running_requests: int | None = arg(
        None,
        "Largest batch, in requests (default: 512 on a GPU, 64 on a CPU; fewer where states of requests "
        "would leave the KV cache less than half).",
        minimum=1,
    )
    max_queued_requests: int | None = arg(
        None,
        "Most requests that wait for the model, and for each adapter; others get 503 (default: no limit).",
        minimum=0,
    )
    chunked_prefill_size: int | None = arg(
        None,
        "Most prompt tokens of one forward pass; longer prompts are prefilled in chunks; -1: "
        "no limit (default: 8192 on a GPU, 512 on a CPU).",
        minimum=1,
        also=-1,
    )
    max_prefill_tokens: int = arg(16384, "Most prompt tokens of all requests in one forward pass.", minimum=1)
    prefill_share: float | None = arg(
        None,
        "Largest share of a forward pass's prompt tokens for a single prompt, so that short "
        "prompts do not wait for long ones; in a pass that also decodes streams, all prompts get "
        "three times this share; 1: one prompt after the other (default: 1/16, but at least 512 "
        "tokens, 1024 for models with experts).",
    )
    schedule_policy: str = arg(
        "fcfs",
        "Order of waiting requests: fcfs, arrival; lpm, longest cached prefix; lof, longest output; "
        "priority, the request's field of this name. The other names mean fcfs.",
        choices=(*OWN_SCHEDULE_POLICIES, *_OTHER_SCHEDULE_POLICIES),
    )
    enable_priority_scheduling: bool = arg(
        False,
        "Take waiting requests by their field priority, equal ones in the order of --schedule-policy "
        "(fcfs or lof); requests that run are not interrupted.",
    )
    schedule_low_priority_values_first: bool = arg(False, "Lower priority values are more urgent.")
    default_priority_value: int | None = arg(None, "Priority of requests that bring none (default: 0).")
    disable_radix_cache: bool = arg(False, "Turn the prefix cache off.")
    prefix_cache_scope: str = arg(
        "any",
        "Which requests may use a cached prefix: any, or only those of the weight version that computed it.",
        choices=("any", "version"),
    )
    enable_return_routed_experts: bool = arg(
        False, "Record which experts each token goes through, for requests that ask for it."
    )
    return_sampling_mask: bool = arg(
        False, "Return sampling masks with every answer of /inference unless the request says otherwise."
    )
    routed_experts_format: str = arg(
        "npy",
        "Form of routed experts in /v1 and /inference: a numpy file, or bytes with shape and "
        "dtype, both in base64.",
        choices=("npy", "packed"),
    )
    quantization: str | None = arg(
        None,
        "Quantize weights to FP8 (e4m3): fp8, one scale per block of 128 x 128; w8a8_fp8, one"
        " per row (default: as in the checkpoint).",
        choices=("fp8", "w8a8_fp8"),
    )
    quantization_exclude: list[str] | None = arg(
        None,
        "Modules not to quantize, by checkpoint name or pattern, such as o_proj or "
        "model.layers.0.* (never quantized: lm_head, embeddings, routers, norms).",
    )
    enable_lora: bool = arg(
        False, "Serve LoRA adapters beside the model; reserves memory for max-loras-per-batch of them."
    )
    max_lora_rank: int | None = arg(
        None, "Highest rank of an adapter, at most 256; memory is reserved for it (default: 64).", minimum=8
    )
    max_loras_per_batch: int = arg(
        8,
        "Most adapters in a batch. There is memory for one more, to load it meanwhile.",
        aliases=("--max-loras",),
        minimum=1,
    )
    lora_target_modules: list[str] | None = arg(
        None, "Modules that adapters may have, such as q_proj; all: every one (default: every one)."
    )
    lora_paths: list[str] | None = arg(
        None, "Adapters to load at the start: folders, or name=folder (default: none)."
    )
    lora_folder: str | None = arg(
        None,
        "Folder of adapters; one is loaded when a request first names it as its model (default: none).",
    )
    max_loaded_loras: int | None = arg(
        None, "Adapters that may be loaded, in device and host memory (default: no limit).", minimum=1
    )
    max_running_requests_per_lora: int | None = arg(
        None, "Requests of one adapter that run at a time; further ones wait (default: no limit).", minimum=1
    )
    lora_keep_versions: int = arg(
        1, "Earlier versions of an adapter that requests may still ask for, as name@version.", minimum=0
    )
    enable_fp32_lm_head: bool = arg(False, "Compute logits in float32.")
    disable_cuda_graph: bool = arg(False, "Turn CUDA graphs off.")
    cuda_graph_bs: list[int] | None = arg(
        None, "Batch sizes to capture CUDA graphs for (default: a list up to cuda-graph-max-bs)."
    )
    cuda_graph_max_bs: int | None = arg(
        None, "Largest batch size to capture (default: 512, at most max-running-requests).", minimum=1
    )
    disable_overlap_schedule: bool = arg(
        False, "Process the results of a step before launching the next one."
    )
    attention_backend: str | None = arg(
        None, "flashinfer, triton or torch_native (default: the first that works with this device and model)."
    )
    kernel_cache_dir: str | None = arg(
        None,
        "Folder for compiled kernels; it can be copied to machines with the same GPU and "
        "packages (default: each library's own).",
    )
    logprobs_mode: str = arg(
        "scaled",
        "Scores that logprobs are computed from: scaled, after penalties and temperature; "
        "raw_logprobs, the model's logits; processed_logprobs, after top-k, top-p and min-p "
        "too.",
        choices=("scaled", "raw_logprobs", "processed_logprobs"),
    )
    nonfinite_logits: str = arg(
        "abort",
        "What becomes of a request whose logits hold NaN or +Inf: abort, it ends with the tokens before "
        "them; continue, it goes on and meta_info.num_nonfinite counts them.",
        choices=("abort", "continue"),
    )
    max_logprobs: int = arg(
        20, "Most logprobs per token that /v1 and /inference return; -1: no limit.", minimum=0, also=-1
    )
    return_tokens_as_token_ids: bool = arg(
        False, 'Name tokens as "token_id:5" in the logprobs of /v1, unless the request says otherwise.'
    )
    paused_requests: str = arg(
        "queue",
        "What happens to requests that arrive while generation is paused by abort or wait: "
        "queue, they wait; reject, they get 503.",
        choices=("queue", "reject"),
    )
    tool_call_parser: str | None = arg(
        None,
        "Format in which the model writes tool calls (default: calls stay in the text).",
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str | None = arg(
        None,
        "Format in which the model marks its reasoning (default: it stays in the answer).",
        choices=REASONING_PARSERS,
    )
    constrained_json_disable_any_whitespace: bool = arg(
        False, "In JSON by a schema, write one space after each comma and colon, and no other whitespace."
    )
    constrained_json_max_whitespace_cnt: int | None = arg(
        None, "Most characters of whitespace in a row in JSON by a schema (default: any).", minimum=1
    )
    stream_interval: int = arg(1, "Tokens per chunk of a stream.", minimum=1)
    incremental_streaming_output: bool = arg(
        False, "Chunks of a /generate stream hold the new tokens only, not all so far."
    )

    enable_memory_saver: bool = arg(
        True, "Allow memory to be released and resumed (default: on; memory-saver-backend none turns it off)."
    )
    memory_saver_backend: str = arg(
        "auto",
        "How memory is released: auto, the engine's own arenas; torch_memory_saver, that "
        "library; none, never.",
        choices=("auto", "torch_memory_saver", "none"),
    )
    enable_weights_cpu_backup: bool = arg(
        False, "Keep a copy of the weights in host memory, so that they survive a release."
    )
    kv_park_bytes: int | None = arg(
        None,
        "Host memory per rank, in bytes, for KV kept by a release or resize with preserve; "
        "taken at start if given (default: an eighth of the host's memory, shared by its "
        "ranks).",
        minimum=0,
    )
    custom_weight_loader: str | list[str] | None = arg(
        None, "Import paths of functions that updates may name as load_format."
    )
    update_staging: str = arg(
        "auto",
        "Whether an update is first written to a second copy of the weights: auto, if there "
        "is memory for it and a direct write would stall requests; always, or the update is "
        "refused; never.",
        choices=("auto", "always", "never"),
    )
    refuse_nonfinite: bool = arg(
        False, "Refuse adapters with NaN or Inf, and weight updates unless they say refuse_nonfinite: false."
    )
    weight_update_timeout_s: float = arg(600.0, "Seconds that a weight update or session may take.")

    enable_trace: bool = arg(False, "Send OpenTelemetry traces of control operations and outputs.")
    otlp_traces_endpoint: str = arg("localhost:4317", "host:port of the trace collector (OTLP over gRPC).")
    otlp_service_name: str = arg("ebbtide", "Name of this server in traces.")
    watchdog_timeout: float = arg(
        300.0,
        "Seconds that a forward pass, or one turn of a control request, may take; after that "
        "the engine ends and logs the stacks of all threads. The same happens if a process is "
        "stopped for four fifths of that time.",
    )
    soft_watchdog_timeout: float | None = arg(
        None, "Seconds after which those stacks are only logged (default: never)."
    )
    pause_warning_s: float = arg(
        1800.0,
        "Seconds without running, paused or asleep, after which a warning is logged, again "
        "and again (0: never).",
        minimum=0,
    )
    drain_timeout_s: float = arg(
        0.0, "Seconds after SIGTERM in which accepted requests may finish (0: end at once).", minimum=0
    )
    skip_server_warmup: bool = arg(False, "Do not generate a test token before serving.")
    log_level: str = arg("info", "Least severe log lines to write.", choices=_LOG_LEVELS)
    log_level_http: str | None = arg(
        None, "The same for the HTTP server's lines (default: log-level).", choices=_LOG_LEVELS
    )
    log_format: str = arg(
        "text", "Log as lines of text, or as one JSON object per line.", choices=("text", "json")
    )
    log_requests: bool = arg(False, "Log each request when it arrives and when it ends.")
    log_requests_level: int = arg(
        2,
        "What log-requests writes: 0, counts and times; 1 or 2, also sampling parameters; 3, also prompts.",
        minimum=0,
    )
    decode_log_interval: int | None = arg(
        40, "Forward passes between two status lines in the log; 0: none.", minimum=0
    )
    enable_metrics: bool = arg(False, "Serve Prometheus metrics at /metrics.")
    metrics_aliases: str | None = arg(
        None, "Serve metrics under this engine's names as well.", choices=("sglang", "vllm")
    )

    def __post_init__(self) -> None:
        """Do nothing: frameworks patch this method, and build arguments on machines that never run them."""

    def url(self) -> str:
        """The server's URL for clients on this machine: `http://host:port`."""
        host = bare_host(self.host)
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add one flag per field by `parser.add_argument`, which callers wrap to prefix the flags."""
        known: list[ArgumentSpec | SglangArgument] = [*argument_specs(), *sglang_arguments().values()]
        for argument in known:
            parser.add_argument(*argument.flags, **argument.argparse_options())

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Build from the attributes of a namespace that are fields; others are ignored."""
        names = [entry.name for entry in dataclasses.fields(cls)]
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})


def bare_host(host: str) -> str:
    """The host without the brackets that an IPv6 address may be written in."""
    return host.removeprefix("[").removesuffix("]")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host. Of names, only localhost counts as loopback."""
    try:
        return ipaddress.ip_address(bare_host(host)).is_loopback
    except ValueError:
        return host == "localhost"


@functools.cache
def argument_specs() -> tuple[ArgumentSpec, ...]:
    """Ebbtide's own fields, in the order of the class; `sglang_arguments` has the others."""
    hints = get_type_hints(ServerArgs)
    others = sglang_arguments()
    return tuple(
        argument_spec(entry, hints[entry.name])
        for entry in dataclasses.fields(ServerArgs)
        if entry.name not in others
    )


# First argument of a section of `--help` → title.
SECTIONS = {
    "model_path": "Model",
    "host": "Address and access",
    "tp_size": "Ranks, nodes and devices",
    "mem_fraction_static": "KV cache and scheduling",
    "enable_return_routed_experts": "Routed experts and sampling masks",
    "quantization": "Numbers and kernels",
    "logprobs_mode": "Logprobs, and requests that wait",
    "tool_call_parser": "Tools, reasoning, structured output, streams",
    "enable_memory_saver": "Releasing memory and updating weights",
    "enable_trace": "Operation: traces, watchdogs, logs, metrics",
}


class ServeParser(argparse.ArgumentParser):
    """A parser of all server arguments. `options`: those of `argparse.ArgumentParser`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        for spec in argument_specs():
            if spec.name in SECTIONS:
                section = self.add_argument_group(SECTIONS[spec.name])
            section.add_argument(*spec.flags, **spec.argparse_options())
        for argument in sglang_arguments().values():
            self.add_argument(*argument.flags, **argument.argparse_options())

    def read(self, argv: Sequence[str]) -> ServerArgs:
        """Read a command line, which may begin with the model. If it is wrong, exit with status 2."""
        has_model = argv and not argv[0].startswith("-")
        args, unknown = self.parse_known_args(["--model-path", *argv] if has_model else argv)
        if unknown:
            self.error(f"unrecognized arguments: {', '.join(map(_with_nearest, unknown))}")
        return ServerArgs.from_cli_args(args)


def _with_nearest(text: str) -> str:
    """An unknown argument, with the most similar flag, if there is one."""
    flags = [flag for spec in argument_specs() for flag in spec.flags]
    name = text.partition("=")[0] if text.startswith("--") else ""
    near = difflib.get_close_matches(name, flags, n=1, cutoff=0.75)
    return f"{text} (did you mean {near[0]}?)" if near else text
