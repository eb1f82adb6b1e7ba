"""The arguments of a server or an Engine, and their command line. Nothing is checked or looked at here."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import ipaddress
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Self, get_args, get_origin, get_type_hints

from ebbtide.srt.sglang_arguments import SglangArgument, SglangArguments, sglang_arguments


@dataclass(frozen=True, slots=True)
class Arg:
    """What the command line and the checks need to know of a field beyond its type and default.

    Attributes:
        help: one line.
        aliases: further flags.
        choices: the only values taken.
        minimum: the least number taken.
        also: a number below `minimum` that is taken too.
    """

    help: str
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    also: int | None = None


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
    """Every argument with its default. Building one checks and touches nothing: `config.resolve` does.

    A field `a_b` is the flag `--a-b`. An unknown field is a `TypeError`.

    Source: wire_api section 7.
    """

    model_path: Annotated[str, Arg("Local Hugging Face folder or hub id.", aliases=("--model",))]
    tokenizer_path: Annotated[str | None, Arg("Folder or hub id of the tokenizer (default: model path).")] = (
        None
    )
    tokenizer_mode: Annotated[
        str, Arg("Fast tokenizer if there is one, or not.", choices=("auto", "slow"))
    ] = "auto"
    skip_tokenizer_init: Annotated[bool, Arg("Token ids in and out only.")] = False
    trust_remote_code: Annotated[bool, Arg("Run code that comes with the model's config or tokenizer.")] = (
        False
    )
    revision: Annotated[str | None, Arg("Revision of a hub id.")] = None
    context_length: Annotated[int | None, Arg("Tokens of context (default: the model's).", minimum=1)] = None
    dtype: Annotated[str, Arg("Type of the weights; auto: the checkpoint's.", choices=_DTYPES)] = "auto"
    kv_cache_dtype: Annotated[
        str, Arg("Type of the KV cache; auto: the model's.", choices=(*_DTYPES, "fp8_e4m3", "fp8"))
    ] = "auto"
    kv_cache_scales: Annotated[
        str,
        Arg(
            "Scales of a KV cache in FP8: the checkpoint's (1 where it has none), or calibrated on the first "
            "tokens, once or anew with every update.",
            choices=("checkpoint", "calibrate", "recalibrate"),
        ),
    ] = "checkpoint"
    kv_cache_calibration_tokens: Annotated[int, Arg("Tokens that a calibration looks at.", minimum=1)] = 4096
    load_format: Annotated[
        str, Arg("How weights are loaded.", choices=("auto", "safetensors", "pt", "dummy"))
    ] = "auto"
    json_model_override_args: Annotated[str, Arg("JSON object merged into the model's config.")] = "{}"
    served_model_name: Annotated[str | None, Arg("Name shown to clients (default: model path).")] = None
    chat_template: Annotated[str | None, Arg("Chat template (default: the tokenizer's).")] = None
    weight_version: Annotated[str, Arg("Version of the weights at start.")] = "default"

    host: Annotated[str, Arg("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Arg("Port to listen on.", minimum=1)] = 30000
    api_key: Annotated[str | None, Arg("Key of the generation endpoints.")] = None
    admin_api_key: Annotated[str | None, Arg("Key of the control endpoints.")] = None
    allow_unauthenticated_control: Annotated[
        bool, Arg("Listen beyond loopback although anyone who reaches the port controls the engine.")
    ] = False

    tp_size: Annotated[
        int, Arg("Tensor-parallel ranks.", aliases=("--tensor-parallel-size", "--tp"), minimum=1)
    ] = 1
    dp_size: Annotated[
        int, Arg("Data-parallel replicas.", aliases=("--data-parallel-size", "--dp"), minimum=1)
    ] = 1
    load_balance_method: Annotated[
        str,
        Arg(
            "Which replica takes a generation: in turn, or the one with the fewest tokens to process "
            "(total_tokens is shortest_queue, the other names are round_robin).",
            choices=(
                *("auto", "round_robin", "shortest_queue"),
                *("follow_bootstrap_room", "total_requests", "total_tokens"),
            ),
        ),
    ] = "auto"
    nnodes: Annotated[int, Arg("Machines that the ranks are on.", minimum=1)] = 1
    node_rank: Annotated[int, Arg("Which of them this is; 0 serves.", minimum=0)] = 0
    dist_init_addr: Annotated[
        str | None,
        Arg(
            "host:port of node 0, where several nodes meet; one node needs none.",
            aliases=("--nccl-init-addr",),
        ),
    ] = None
    dist_timeout: Annotated[
        int | None, Arg("Seconds in which nodes and ranks must have met (default: 600).", minimum=1)
    ] = None
    nccl_port: Annotated[
        int | None,
        Arg("Port where ranks of replica 0 meet, on several nodes (default: a free one).", minimum=1),
    ] = None
    base_gpu_id: Annotated[int, Arg("Device of a node's first rank.", minimum=0)] = 0
    gpu_id_step: Annotated[int, Arg("Distance between the devices of neighbouring ranks.", minimum=1)] = 1
    disable_custom_all_reduce: Annotated[
        bool, Arg("Ranks add up by NCCL alone, and never through each other's memory.")
    ] = False
    device: Annotated[str | None, Arg("Device (default: chosen).", choices=("cuda", "cpu"))] = None
    random_seed: Annotated[int | None, Arg("Seed of sampling (default: drawn).")] = None

    mem_fraction_static: Annotated[
        float | None, Arg("Share of the memory free at start for weights and KV cache (default: chosen).")
    ] = None
    max_total_tokens: Annotated[int | None, Arg("Tokens in the KV pool (default: by memory).", minimum=1)] = (
        None
    )
    page_size: Annotated[int | None, Arg("Tokens per KV page (default: chosen).", minimum=1)] = None
    max_running_requests: Annotated[int | None, Arg("Requests in a batch (default: chosen).", minimum=1)] = (
        None
    )
    max_queued_requests: Annotated[
        int | None, Arg("Requests that may wait (default: no limit).", minimum=0)
    ] = None
    chunked_prefill_size: Annotated[
        int | None,
        Arg("Prompt tokens per forward pass; -1: no chunking (default: chosen).", minimum=1, also=-1),
    ] = None
    max_prefill_tokens: Annotated[int, Arg("Prompt tokens of all requests per forward pass.", minimum=1)] = (
        16384
    )
    prefill_share: Annotated[
        float | None,
        Arg(
            "Of the prompt tokens of a forward pass, what a single prompt gets at most (default: 1/16, but "
            "512 tokens, and 1024 of models with experts)."
        ),
    ] = None
    schedule_policy: Annotated[
        str,
        Arg(
            "Order of waiting requests: arrival, longest cached prefix, prefixes shared by most, longest "
            "output, the field priority, or random (the other names are fcfs).",
            choices=(*OWN_SCHEDULE_POLICIES, *_OTHER_SCHEDULE_POLICIES),
        ),
    ] = "fcfs"
    enable_return_routed_experts: Annotated[
        bool, Arg("Record which experts each token goes through, for requests that ask for it.")
    ] = False
    return_sampling_mask: Annotated[
        bool, Arg("Sampling masks with every answer of /inference that does not say otherwise.")
    ] = False
    routed_experts_format: Annotated[
        str, Arg("Of routed experts in /v1 and /inference.", choices=("npy", "packed"))
    ] = "npy"
    quantization: Annotated[
        str | None,
        Arg(
            "Bits of weights: fp8 keeps blocks of 128 x 128 in e4m3 with a scale each, w8a8_fp8 rows "
            "(default: as the checkpoint says).",
            choices=("fp8", "w8a8_fp8"),
        ),
    ] = None
    quantization_exclude: Annotated[
        list[str] | None,
        Arg(
            "Modules that keep their dtype, by their names in checkpoints, as o_proj or model.layers.0.* "
            "(always: lm_head, embeddings, routers, norms)."
        ),
    ] = None
    enable_fp32_lm_head: Annotated[bool, Arg("Compute logits in float32.")] = False
    disable_radix_cache: Annotated[bool, Arg("No prefix cache.")] = False
    prefix_cache_scope: Annotated[
        str, Arg("Which weight versions may share cached prefixes.", choices=("any", "version"))
    ] = "any"
    disable_cuda_graph: Annotated[bool, Arg("No CUDA graphs.")] = False
    cuda_graph_bs: Annotated[list[int] | None, Arg("Batch sizes to capture (default: chosen).")] = None
    cuda_graph_max_bs: Annotated[int | None, Arg("Largest batch size to capture.", minimum=1)] = None
    disable_overlap_schedule: Annotated[bool, Arg("Process a step before the next one is launched.")] = False
    attention_backend: Annotated[str | None, Arg("flashinfer, triton or torch_native (default: chosen).")] = (
        None
    )
    kernel_cache_dir: Annotated[
        str | None,
        Arg(
            "Folder for compiled kernels; it can be copied to machines with the same GPUs and packages "
            "(default: where each library keeps its own)."
        ),
    ] = None
    logprobs_mode: Annotated[
        str,
        Arg(
            "What the logprobs of outputs are of: scores after penalties and temperature; logits as they "
            "came; or the former without what top-k, top-p and min-p drop.",
            choices=("scaled", "raw_logprobs", "processed_logprobs"),
        ),
    ] = "scaled"
    max_logprobs: Annotated[
        int,
        Arg(
            "How many logprobs per token /v1 and /inference tell at most; -1: any number.",
            minimum=0,
            also=-1,
        ),
    ] = 20
    return_tokens_as_token_ids: Annotated[
        bool, Arg('Logprobs of /v1 name tokens as "token_id:5", unless a request says otherwise.')
    ] = False
    paused_requests: Annotated[
        str,
        Arg(
            "Whether requests that come while generation is paused by abort or wait have to wait, or are "
            "answered with 503.",
            choices=("queue", "reject"),
        ),
    ] = "queue"
    tool_call_parser: Annotated[
        str | None,
        Arg("How the model writes calls of tools (default: they stay text).", choices=TOOL_CALL_PARSERS),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        Arg(
            "How the model marks its reasoning (default: it stays with the answer).",
            choices=REASONING_PARSERS,
        ),
    ] = None
    stream_interval: Annotated[int, Arg("Tokens between chunks of a stream.", minimum=1)] = 1
    incremental_streaming_output: Annotated[bool, Arg("Chunks hold what is new, not everything so far.")] = (
        False
    )

    enable_memory_saver: Annotated[bool, Arg("Memory can be released and resumed.")] = True
    memory_saver_backend: Annotated[
        str,
        Arg("How memory is given back; none: not at all.", choices=("auto", "torch_memory_saver", "none")),
    ] = "auto"
    enable_weights_cpu_backup: Annotated[bool, Arg("Parameters survive a release of the weights.")] = False
    kv_park_bytes: Annotated[
        int | None,
        Arg(
            "Host memory per rank for the KV of requests while the cache is released with preserve=live or "
            "all (default: a share of the host's). Given, it is taken at the start.",
            minimum=0,
        ),
    ] = None
    custom_weight_loader: Annotated[
        str | list[str] | None, Arg("Import paths that updates may name as load_format.")
    ] = None
    update_staging: Annotated[
        str,
        Arg(
            "Whether updates are written to a second copy of the weights: where there is memory for it and "
            "somebody waits; always, or refused; or never.",
            choices=("auto", "always", "never"),
        ),
    ] = "auto"
    weight_update_timeout_s: Annotated[float, Arg("Seconds a weight update or session may take.")] = 600.0

    enable_trace: Annotated[
        bool, Arg("Send OpenTelemetry traces of control operations and outputs to a collector.")
    ] = False
    otlp_traces_endpoint: Annotated[str, Arg("host:port of the collector, OTLP over gRPC.")] = (
        "localhost:4317"
    )
    otlp_service_name: Annotated[str, Arg("The name of this server in traces.")] = "ebbtide"
    watchdog_timeout: Annotated[
        float,
        Arg(
            "Seconds a forward pass, or what a control request does in a turn, may take; then the engine "
            "ends and says where every thread stands."
        ),
    ] = 300.0
    soft_watchdog_timeout: Annotated[
        float | None, Arg("Seconds after which that is only logged (default: never).")
    ] = None
    pause_warning_s: Annotated[
        float,
        Arg(
            "Seconds without a moment in which a forward pass might have run, paused or asleep, after which "
            "that is reported, again and again (0: never).",
            minimum=0,
        ),
    ] = 1800.0
    drain_timeout_s: Annotated[
        float, Arg("Seconds that requests have to end after SIGTERM (default: none).", minimum=0)
    ] = 0.0
    skip_server_warmup: Annotated[bool, Arg("Do not generate a token before serving.")] = False
    log_level: Annotated[str, Arg("Log level.", choices=_LOG_LEVELS)] = "info"
    log_level_http: Annotated[
        str | None, Arg("Log level of HTTP (default: log level).", choices=_LOG_LEVELS)
    ] = None
    log_format: Annotated[str, Arg("Lines of text, or JSON objects.", choices=("text", "json"))] = "text"
    log_requests: Annotated[bool, Arg("Log each request as it comes and as it ends.")] = False
    log_requests_level: Annotated[
        int, Arg("0: counts and times; from 1 on sampling parameters, from 3 on prompts too.", minimum=0)
    ] = 2
    decode_log_interval: Annotated[
        int | None, Arg("Forward passes between log lines; 0: none.", minimum=0)
    ] = 40
    enable_metrics: Annotated[bool, Arg("Serve Prometheus metrics.")] = False
    metrics_aliases: Annotated[
        str | None, Arg("Serve them also under the names of that engine.", choices=("sglang", "vllm"))
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


@dataclass(frozen=True, slots=True)
class ArgumentSpec:
    """A field of Ebbtide's own as the command line and the checks see it.

    Attributes:
        types: the plain types a value may have; a list's item type for lists.
        is_list: whether a list is taken.
        optional: whether None is taken.
        default: `dataclasses.MISSING` where the field is required.
    """

    name: str
    arg: Arg
    types: tuple[type, ...]
    is_list: bool
    optional: bool
    default: Any

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        return (self.flag, *self.arg.aliases)

    def argparse_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"help": self.arg.help}
        if self.default is dataclasses.MISSING:
            options["required"] = True
        else:
            options["default"] = self.default
        if bool in self.types:
            return {**options, "action": "store_true"}
        options["type"] = self.types[0]
        if self.is_list:
            options["nargs"] = "+"
        if self.arg.choices:
            options["choices"] = list(self.arg.choices)
        return options


@functools.cache
def argument_specs() -> tuple[ArgumentSpec, ...]:
    """Ebbtide's own fields, in the order of the class; `sglang_arguments` has the others."""
    hints = get_type_hints(ServerArgs, include_extras=True)
    others = sglang_arguments()
    return tuple(
        _spec(entry, hints[entry.name])
        for entry in dataclasses.fields(ServerArgs)
        if entry.name not in others
    )


def _spec(entry: dataclasses.Field[Any], hint: Any) -> ArgumentSpec:
    plain, arg = get_args(hint)
    members = get_args(plain) if isinstance(plain, UnionType) else (plain,)
    lists = [member for member in members if get_origin(member) is list]
    scalars = tuple(member for member in members if member is not type(None) and member not in lists)
    items = tuple(get_args(member)[0] for member in lists)
    return ArgumentSpec(
        name=entry.name,
        arg=arg,
        types=scalars or items,
        is_list=bool(lists),
        optional=type(None) in members,
        default=entry.default,
    )
