"""The arguments of a server or an Engine, and their command line. Nothing is checked or looked at here."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self, get_type_hints

from ebbtide.srt.arguments import (
    Arg,
    ArgumentSpec,
    SglangArgument,
    SglangArguments,
    argument_spec,
    sglang_arguments,
)

_DTYPES = ("auto", "float32", "float", "float16", "half", "bfloat16", "bf16")
OWN_SCHEDULE_POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "priority", "random")
_OTHER_SCHEDULE_POLICIES = ("routing-key", "hrrn", "shortest-prefill-first")
# Spelled out, since this module imports nothing that parses: the keys of `TOOL_CALL_FORMATS`, and of
# `REASONING_FORMATS`.
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

    model_path: Annotated[
        str,
        Arg("Folder of a Hugging Face checkpoint, or the id of a model on the hub.", aliases=("--model",)),
    ]
    model_impl: Annotated[
        str,
        Arg(
            "auto: Ebbtide's code where it has the architecture, else transformers' with Ebbtide's attention;"
            " transformers: that for every architecture.",
            choices=("auto", "transformers"),
        ),
    ] = "auto"
    tokenizer_path: Annotated[
        str | None, Arg("Folder or hub id of the tokenizer (default: the model path).")
    ] = None
    tokenizer_mode: Annotated[
        str,
        Arg("auto: the fast tokenizer if the model has one; slow: the Python one.", choices=("auto", "slow")),
    ] = "auto"
    skip_tokenizer_init: Annotated[bool, Arg("Load no tokenizer: requests and answers are token ids.")] = (
        False
    )
    trust_remote_code: Annotated[
        bool, Arg("Run Python code that comes with the model's config or tokenizer.")
    ] = False
    revision: Annotated[str | None, Arg("Branch, tag or commit of a hub id.")] = None
    context_length: Annotated[
        int | None, Arg("Longest request, prompt and output, in tokens (default: the model's).", minimum=1)
    ] = None
    dtype: Annotated[
        str, Arg("Type of weights and activations; auto: the checkpoint's.", choices=_DTYPES)
    ] = "auto"
    kv_cache_dtype: Annotated[
        str, Arg("Type of the KV cache; auto: the model's.", choices=(*_DTYPES, "fp8_e4m3", "fp8"))
    ] = "auto"
    kv_cache_scales: Annotated[
        str,
        Arg(
            "Scales of a KV cache in FP8: the checkpoint's (1 where it has none), calibrated once"
            " on the first tokens, or calibrated again after every update.",
            choices=("checkpoint", "calibrate", "recalibrate"),
        ),
    ] = "checkpoint"
    kv_cache_calibration_tokens: Annotated[
        int, Arg("Prompt tokens that a calibration measures.", minimum=1)
    ] = 4096
    load_format: Annotated[
        str,
        Arg(
            "Files to load weights from: safetensors, pt (.bin), whichever there is (auto); "
            "dummy: random weights.",
            choices=("auto", "safetensors", "pt", "dummy"),
        ),
    ] = "auto"
    json_model_override_args: Annotated[str, Arg("JSON object merged into the model's config.")] = "{}"
    served_model_name: Annotated[
        str | None,
        Arg(
            "Model name shown to clients (default: the model path). Several, divided by commas, are all "
            "answered to; with * among them, any name is."
        ),
    ] = None
    chat_template: Annotated[
        str | None, Arg("Chat template: a file, or the Jinja text itself (default: the tokenizer's).")
    ] = None
    weight_version: Annotated[str, Arg("Version of the weights at start, as answers report it.")] = "default"

    host: Annotated[str, Arg("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Arg("TCP port to listen on.", minimum=1)] = 30000
    api_key: Annotated[str | None, Arg("Key that generation requests must send (default: none needed).")] = (
        None
    )
    admin_api_key: Annotated[
        str | None,
        Arg(
            "Key that control requests must send (default: the api-key, if any; "
            "a server without an admin key listens on loopback only)."
        ),
    ] = None
    allow_unauthenticated_control: Annotated[
        bool,
        Arg(
            "Listen beyond loopback without an admin key, although anyone who reaches the port "
            "then controls the engine."
        ),
    ] = False
    allowed_hosts: Annotated[
        list[str] | None,
        Arg(
            "Names by which clients reach a server without an API key, besides addresses and "
            "localhost; *: any (default: none on loopback, else any). Web pages of the hosts "
            "named may also send it requests."
        ),
    ] = None
    root_path: Annotated[
        str,
        Arg(
            "Path of a proxy below which this server is, such as /engines/a, whether or not the proxy "
            "cuts it off."
        ),
    ] = ""
    enable_request_id_headers: Annotated[
        bool, Arg("Answer with the X-Request-Id of the request, or a new one where it has none.")
    ] = False
    enable_force_include_usage: Annotated[
        bool, Arg("End every stream of /v1 with the usage, whatever its stream_options say.")
    ] = False

    tp_size: Annotated[
        int,
        Arg(
            "Ranks that divide each replica of the model (tensor parallelism).",
            aliases=("--tensor-parallel-size", "--tp"),
            minimum=1,
        ),
    ] = 1
    dp_size: Annotated[
        int,
        Arg(
            "Replicas of the model behind one address (data parallelism).",
            aliases=("--data-parallel-size", "--dp"),
            minimum=1,
        ),
    ] = 1
    load_balance_method: Annotated[
        str,
        Arg(
            "Which replica gets a request: round_robin, in turn (also auto, "
            "follow_bootstrap_room, total_requests); shortest_queue, the one with the fewest "
            "tokens to process (also total_tokens).",
            choices=(
                *("auto", "round_robin", "shortest_queue"),
                *("follow_bootstrap_room", "total_requests", "total_tokens"),
            ),
        ),
    ] = "auto"
    nnodes: Annotated[int, Arg("Number of nodes that the ranks are on.", minimum=1)] = 1
    node_rank: Annotated[int, Arg("Number of this node, from 0; node 0 serves requests.", minimum=0)] = 0
    dist_init_addr: Annotated[
        str | None,
        Arg(
            "host:port of node 0, where the nodes meet; not needed with one node.",
            aliases=("--nccl-init-addr",),
        ),
    ] = None
    dist_timeout: Annotated[
        int | None,
        Arg("Seconds that nodes and ranks wait for each other at start (default: 600).", minimum=1),
    ] = None
    nccl_port: Annotated[
        int | None,
        Arg(
            "Port on which the ranks of replica 0 meet, with several nodes (default: a free one).", minimum=1
        ),
    ] = None
    base_gpu_id: Annotated[int, Arg("GPU of the node's first rank.", minimum=0)] = 0
    gpu_id_step: Annotated[int, Arg("Distance between the GPUs of neighbouring ranks.", minimum=1)] = 1
    disable_custom_all_reduce: Annotated[
        bool, Arg("Use NCCL for all sums over ranks, and never kernels that write to another GPU's memory.")
    ] = False
    device: Annotated[
        str | None,
        Arg("Device to run on (default: cuda if torch sees a GPU, else cpu).", choices=("cuda", "cpu")),
    ] = None
    random_seed: Annotated[int | None, Arg("Seed of sampling (default: drawn at start).")] = None

    mem_fraction_static: Annotated[
        float | None,
        Arg("Share of the memory free at start that weights and KV cache take (default: 0.85 on a GPU)."),
    ] = None
    max_total_tokens: Annotated[
        int | None,
        Arg("Size of the KV cache in tokens (default: what mem-fraction-static leaves).", minimum=1),
    ] = None
    page_size: Annotated[int | None, Arg("Tokens per page of the KV cache (default: 16).", minimum=1)] = None
    max_running_requests: Annotated[
        int | None, Arg("Largest batch, in requests (default: 512 on a GPU, 64 on a CPU).", minimum=1)
    ] = None
    max_queued_requests: Annotated[
        int | None, Arg("Requests that may wait; further ones get 503 (default: no limit).", minimum=0)
    ] = None
    chunked_prefill_size: Annotated[
        int | None,
        Arg(
            "Most prompt tokens of one forward pass; longer prompts are prefilled in chunks; -1: "
            "no limit (default: 8192 on a GPU, 512 on a CPU).",
            minimum=1,
            also=-1,
        ),
    ] = None
    max_prefill_tokens: Annotated[
        int, Arg("Most prompt tokens of all requests in one forward pass.", minimum=1)
    ] = 16384
    prefill_share: Annotated[
        float | None,
        Arg(
            "Largest share of a forward pass's prompt tokens for a single prompt, so that short "
            "prompts do not wait for long ones, and a third of what all prompts get of a pass that "
            "streams wait for; 1: one prompt after the other (default: 1/16, but at least 512 "
            "tokens, 1024 for models with experts)."
        ),
    ] = None
    schedule_policy: Annotated[
        str,
        Arg(
            "Order of waiting requests: fcfs, arrival; lpm, longest cached prefix; dfs-weight, "
            "prefixes that most requests share; lof, longest output; priority, the request's "
            "field of this name; random. The other names mean fcfs.",
            choices=(*OWN_SCHEDULE_POLICIES, *_OTHER_SCHEDULE_POLICIES),
        ),
    ] = "fcfs"
    enable_priority_scheduling: Annotated[
        bool,
        Arg(
            "Take waiting requests by their field priority, equal ones in the order of --schedule-policy "
            "(fcfs or lof); requests that run are not interrupted."
        ),
    ] = False
    schedule_low_priority_values_first: Annotated[
        bool, Arg("Take requests of low priority values first, where priorities count.")
    ] = False
    default_priority_value: Annotated[
        int | None, Arg("Priority of requests that bring none (default: 0).")
    ] = None
    disable_radix_cache: Annotated[bool, Arg("Turn the prefix cache off.")] = False
    prefix_cache_scope: Annotated[
        str,
        Arg(
            "Which requests may use a cached prefix: any, or only those of the weight version "
            "that computed it.",
            choices=("any", "version"),
        ),
    ] = "any"
    enable_return_routed_experts: Annotated[
        bool, Arg("Record which experts each token goes through, for requests that ask for it.")
    ] = False
    return_sampling_mask: Annotated[
        bool, Arg("Return sampling masks with every answer of /inference unless the request says otherwise.")
    ] = False
    routed_experts_format: Annotated[
        str,
        Arg(
            "Form of routed experts in /v1 and /inference: a numpy file, or bytes with shape and "
            "dtype, both in base64.",
            choices=("npy", "packed"),
        ),
    ] = "npy"
    quantization: Annotated[
        str | None,
        Arg(
            "Quantize weights to FP8 (e4m3): fp8, one scale per block of 128 x 128; w8a8_fp8, one"
            " per row (default: as in the checkpoint).",
            choices=("fp8", "w8a8_fp8"),
        ),
    ] = None
    quantization_exclude: Annotated[
        list[str] | None,
        Arg(
            "Modules not to quantize, by checkpoint name or pattern, such as o_proj or "
            "model.layers.0.* (never quantized: lm_head, embeddings, routers, norms)."
        ),
    ] = None
    enable_lora: Annotated[
        bool, Arg("Serve LoRA adapters beside the model: memory is taken for max-loras-per-batch of them.")
    ] = False
    max_lora_rank: Annotated[
        int | None,
        Arg("Highest rank of an adapter, at most 256; memory is taken for it (default: 64).", minimum=8),
    ] = None
    max_loras_per_batch: Annotated[
        int,
        Arg(
            "Adapters that a batch may have. There is memory for one more, so that one loads beside them.",
            aliases=("--max-loras",),
            minimum=1,
        ),
    ] = 8
    lora_target_modules: Annotated[
        list[str] | None,
        Arg("Modules that adapters may have, such as q_proj; all: every one (default: every one)."),
    ] = None
    lora_paths: Annotated[
        list[str] | None, Arg("Adapters to load at the start: folders, or name=folder (default: none).")
    ] = None
    max_loaded_loras: Annotated[
        int | None,
        Arg("Adapters that may be loaded, in device and host memory (default: no limit).", minimum=1),
    ] = None
    lora_keep_versions: Annotated[
        int,
        Arg("Earlier versions of an adapter that requests may still ask for, as name@version.", minimum=0),
    ] = 1
    enable_fp32_lm_head: Annotated[bool, Arg("Compute logits in float32.")] = False
    disable_cuda_graph: Annotated[bool, Arg("Turn CUDA graphs off.")] = False
    cuda_graph_bs: Annotated[
        list[int] | None,
        Arg("Batch sizes to capture CUDA graphs for (default: a list up to cuda-graph-max-bs)."),
    ] = None
    cuda_graph_max_bs: Annotated[
        int | None,
        Arg("Largest batch size to capture (default: 512, at most max-running-requests).", minimum=1),
    ] = None
    disable_overlap_schedule: Annotated[
        bool, Arg("Process the results of a step before launching the next one.")
    ] = False
    attention_backend: Annotated[
        str | None,
        Arg("flashinfer, triton or torch_native (default: the first that works with this device and model)."),
    ] = None
    kernel_cache_dir: Annotated[
        str | None,
        Arg(
            "Folder for compiled kernels; it can be copied to machines with the same GPU and "
            "packages (default: each library's own)."
        ),
    ] = None
    logprobs_mode: Annotated[
        str,
        Arg(
            "Scores that logprobs are computed from: scaled, after penalties and temperature; "
            "raw_logprobs, the model's logits; processed_logprobs, after top-k, top-p and min-p "
            "too.",
            choices=("scaled", "raw_logprobs", "processed_logprobs"),
        ),
    ] = "scaled"
    nonfinite_logits: Annotated[
        str,
        Arg(
            "What becomes of a request whose logits hold NaN or +Inf: abort, it ends with the tokens before "
            "them; continue, it goes on and meta_info.num_nonfinite counts them.",
            choices=("abort", "continue"),
        ),
    ] = "abort"
    max_logprobs: Annotated[
        int,
        Arg(
            "Most logprobs per token that /v1 and /inference return; -1: no limit.",
            minimum=0,
            also=-1,
        ),
    ] = 20
    return_tokens_as_token_ids: Annotated[
        bool, Arg('Name tokens as "token_id:5" in the logprobs of /v1, unless the request says otherwise.')
    ] = False
    paused_requests: Annotated[
        str,
        Arg(
            "What happens to requests that arrive while generation is paused by abort or wait: "
            "queue, they wait; reject, they get 503.",
            choices=("queue", "reject"),
        ),
    ] = "queue"
    tool_call_parser: Annotated[
        str | None,
        Arg(
            "Format in which the model writes tool calls (default: calls stay in the text).",
            choices=TOOL_CALL_PARSERS,
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        Arg(
            "Format in which the model marks its reasoning (default: it stays in the answer).",
            choices=REASONING_PARSERS,
        ),
    ] = None
    constrained_json_disable_any_whitespace: Annotated[
        bool, Arg("JSON that a schema makes has one space behind each comma and colon, and no other.")
    ] = False
    constrained_json_max_whitespace_cnt: Annotated[
        int | None,
        Arg("Most characters of whitespace in a row in JSON that a schema makes (default: any).", minimum=1),
    ] = None
    stream_interval: Annotated[int, Arg("Tokens per chunk of a stream.", minimum=1)] = 1
    incremental_streaming_output: Annotated[
        bool, Arg("Chunks of a /generate stream hold the new tokens only, not all so far.")
    ] = False

    enable_memory_saver: Annotated[
        bool,
        Arg("Allow memory to be released and resumed (default: on; memory-saver-backend none turns it off)."),
    ] = True
    memory_saver_backend: Annotated[
        str,
        Arg(
            "How memory is released: auto, the engine's own arenas; torch_memory_saver, that "
            "library; none, never.",
            choices=("auto", "torch_memory_saver", "none"),
        ),
    ] = "auto"
    enable_weights_cpu_backup: Annotated[
        bool, Arg("Keep a copy of the weights in host memory, so that they survive a release.")
    ] = False
    kv_park_bytes: Annotated[
        int | None,
        Arg(
            "Host memory per rank, in bytes, for KV kept by a release or resize with preserve; "
            "taken at start if given (default: an eighth of the host's memory, shared by its "
            "ranks).",
            minimum=0,
        ),
    ] = None
    custom_weight_loader: Annotated[
        str | list[str] | None, Arg("Import paths of functions that updates may name as load_format.")
    ] = None
    update_staging: Annotated[
        str,
        Arg(
            "Whether an update is first written to a second copy of the weights: auto, if there "
            "is memory for it and a direct write would stall requests; always, or the update is "
            "refused; never.",
            choices=("auto", "always", "never"),
        ),
    ] = "auto"
    refuse_nonfinite: Annotated[
        bool,
        Arg("Refuse adapters with NaN or Inf, and weight updates unless they say refuse_nonfinite: false."),
    ] = False
    weight_update_timeout_s: Annotated[float, Arg("Seconds that a weight update or session may take.")] = (
        600.0
    )

    enable_trace: Annotated[bool, Arg("Send OpenTelemetry traces of control operations and outputs.")] = False
    otlp_traces_endpoint: Annotated[str, Arg("host:port of the trace collector (OTLP over gRPC).")] = (
        "localhost:4317"
    )
    otlp_service_name: Annotated[str, Arg("Name of this server in traces.")] = "ebbtide"
    watchdog_timeout: Annotated[
        float,
        Arg(
            "Seconds that a forward pass, or one turn of a control request, may take; after that "
            "the engine ends and logs the stacks of all threads. So it does when a process has been stopped "
            "for four fifths of it."
        ),
    ] = 300.0
    soft_watchdog_timeout: Annotated[
        float | None, Arg("Seconds after which those stacks are only logged (default: never).")
    ] = None
    pause_warning_s: Annotated[
        float,
        Arg(
            "Seconds without running, paused or asleep, after which a warning is logged, again "
            "and again (0: never).",
            minimum=0,
        ),
    ] = 1800.0
    drain_timeout_s: Annotated[
        float, Arg("Seconds after SIGTERM in which accepted requests may finish (0: end at once).", minimum=0)
    ] = 0.0
    skip_server_warmup: Annotated[bool, Arg("Do not generate a test token before serving.")] = False
    log_level: Annotated[str, Arg("Least severe log lines to write.", choices=_LOG_LEVELS)] = "info"
    log_level_http: Annotated[
        str | None, Arg("The same for the HTTP server's lines (default: log-level).", choices=_LOG_LEVELS)
    ] = None
    log_format: Annotated[
        str, Arg("Log as lines of text, or as one JSON object per line.", choices=("text", "json"))
    ] = "text"
    log_requests: Annotated[bool, Arg("Log each request when it arrives and when it ends.")] = False
    log_requests_level: Annotated[
        int,
        Arg(
            "What log-requests writes: 0, counts and times; 1 or 2, also sampling parameters; 3, "
            "also prompts.",
            minimum=0,
        ),
    ] = 2
    decode_log_interval: Annotated[
        int | None, Arg("Forward passes between two status lines in the log; 0: none.", minimum=0)
    ] = 40
    enable_metrics: Annotated[bool, Arg("Serve Prometheus metrics at /metrics.")] = False
    metrics_aliases: Annotated[
        str | None, Arg("Serve metrics under this engine's names as well.", choices=("sglang", "vllm"))
    ] = None

    def __post_init__(self) -> None:
        """Nothing: frameworks patch this method, and build arguments on machines that never run them."""

    def url(self) -> str:
        """Where a client on this machine reaches the server: `http://host:port`."""
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
        """Build from those attributes of a namespace that are fields."""
        names = [entry.name for entry in dataclasses.fields(cls)]
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})


def bare_host(host: str) -> str:
    """The host without the brackets that an IPv6 address may be written in."""
    return host.removeprefix("[").removesuffix("]")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host; a name other than localhost is taken to be reachable."""
    try:
        return ipaddress.ip_address(bare_host(host)).is_loopback
    except ValueError:
        return host == "localhost"


@functools.cache
def argument_specs() -> tuple[ArgumentSpec, ...]:
    """Ebbtide's own fields, in the order of the class; `sglang_arguments` has the others."""
    hints = get_type_hints(ServerArgs, include_extras=True)
    others = sglang_arguments()
    return tuple(
        argument_spec(entry, hints[entry.name])
        for entry in dataclasses.fields(ServerArgs)
        if entry.name not in others
    )


# The argument that each section begins with.
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
    """Knows all server arguments. The keywords are those of `argparse.ArgumentParser`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        for spec in argument_specs():
            if spec.name in SECTIONS:
                section = self.add_argument_group(SECTIONS[spec.name])
            section.add_argument(*spec.flags, **spec.argparse_options())
        for argument in sglang_arguments().values():
            self.add_argument(*argument.flags, **argument.argparse_options())

    def read(self, argv: Sequence[str]) -> ServerArgs:
        """The arguments of a command line; leaves the process with status 2 where it is wrong."""
        args, unknown = self.parse_known_args(argv)
        if unknown:
            self.error(f"unrecognized arguments: {', '.join(map(_with_nearest, unknown))}")
        return ServerArgs.from_cli_args(args)


def _with_nearest(text: str) -> str:
    """What was not understood, with the flag that it may be a misspelling of."""
    flags = [flag for spec in argument_specs() for flag in spec.flags]
    near = difflib.get_close_matches(text.partition("=")[0], flags, n=1) if text.startswith("--") else []
    return f"{text} (did you mean {near[0]}?)" if near else text
