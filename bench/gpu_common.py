"""Shared code of the GPU benchmarks: shapes of models, the machine's limits, rows of results, servers."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import torch
from common import write_result
from gpu_goals import GOALS
from transformers import AutoConfig

import ebbtide
from ebbtide.srt.models.registry import build_model

GB = 1e9
GIB = 1 << 30
START_TIMEOUT_S = 400.0


@dataclass(frozen=True)
class Shape:
    """A model with a configuration only, in bfloat16: 2 bytes per number.

    Attributes:
        config: fields of its config.json.
        server_args: further `ServerArgs` to measure it with.
    """

    config: dict[str, Any]
    server_args: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.config[name]

    def write(self, folder: Path) -> Path:
        """Write a model folder with only a config.json; returns the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        fixed = {"dtype": "bfloat16", "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        (folder / "config.json").write_text(json.dumps(fixed | self.config))
        return folder

    @property
    def _attention_params(self) -> int:
        """Parameters of attention in one layer."""
        hidden, num_heads = self["hidden_size"], self["num_attention_heads"]
        if self._is_latent:
            rank, query_dim = self["kv_lora_rank"], self["qk_nope_head_dim"] + self["qk_rope_head_dim"]
            queries = num_heads * query_dim
            query_rank = self["q_lora_rank"]
            of_queries = hidden * queries if query_rank is None else query_rank * (hidden + queries)
            of_latents = hidden * self._row_size
            of_heads = num_heads * rank * (self["qk_nope_head_dim"] + self["v_head_dim"])
            return int(of_queries + of_latents + of_heads + hidden * num_heads * self["v_head_dim"])
        head_dim, num_kv_heads = self["head_dim"], self["num_key_value_heads"]
        gates = num_heads * head_dim * hidden if "linear_num_key_heads" in self.config else 0
        return int(2 * hidden * head_dim * (num_heads + num_kv_heads) + gates)

    @property
    def _num_linear(self) -> int:
        """Number of layers with linear attention."""
        return int(self.config.get("layer_types", ()).count("linear_attention"))

    @property
    def _linear_sizes(self) -> tuple[int, int]:
        """Sizes of a linear-attention layer: of all keys (and of all queries), and of all values."""
        keys = self["linear_num_key_heads"] * self["linear_key_head_dim"]
        return keys, self["linear_num_value_heads"] * self["linear_value_head_dim"]

    @property
    def _mixer_params(self) -> int:
        """Parameters of attention and linear attention in all layers."""
        attention = (self["num_hidden_layers"] - self._num_linear) * self._attention_params
        if not self._num_linear:
            return int(attention)
        keys, values = self._linear_sizes
        return int(attention + self._num_linear * self["hidden_size"] * (2 * keys + 3 * values))

    @property
    def state_bytes(self) -> int:
        """Bytes of a request's state in linear-attention layers. A decode step reads and writes it."""
        if not self._num_linear:
            return 0
        keys, values = self._linear_sizes
        inputs = (2 * keys + values) * (self["linear_conv_kernel_dim"] - 1) * 2
        return int(self._num_linear * (inputs + values * self["linear_key_head_dim"] * 4))

    @property
    def _is_latent(self) -> bool:
        return "kv_lora_rank" in self.config

    @property
    def _row_size(self) -> int:
        """Numbers in the KV cache for a token in a layer with latent attention."""
        return int(self["kv_lora_rank"] + self["qk_rope_head_dim"])

    @property
    def num_experts(self) -> int:
        """Experts of a layer that has experts; 0: none has."""
        names = ("num_experts", "n_routed_experts", "num_local_experts")
        return int(next((self[name] for name in names if name in self.config), 0))

    def _mlp_params(self, num_experts: float) -> float:
        """Parameters of the MLPs of all layers, with this many experts in layers that have some."""
        hidden, num_layers = self["hidden_size"], self["num_hidden_layers"]
        if not self.num_experts:
            return float(num_layers * 3 * hidden * self["intermediate_size"])
        num_dense = self.config.get("first_k_dense_replace", 0)
        inner = self.config.get("moe_intermediate_size", self["intermediate_size"])
        experts = (num_experts + self.config.get("n_shared_experts", 0)) * 3 * inner
        return float(
            hidden * (num_dense * 3 * self["intermediate_size"] + (num_layers - num_dense) * experts)
        )

    @property
    def _head_params(self) -> int:
        return int(self["vocab_size"] * self["hidden_size"])

    def decode_weight_bytes(self, batch_size: int) -> float:
        """Bytes of weights that a decode step must read.

        Every matrix is read once, except the embedding (only rows) and the experts (as many as a batch is
        expected to use if experts are drawn uniformly).
        """
        num_used = 0.0
        if total := self.num_experts:
            num_used = total * (1 - (1 - self["num_experts_per_tok"] / total) ** batch_size)
        return 2 * (self._mixer_params + self._mlp_params(num_used) + self._head_params)

    @property
    def kv_bytes_per_token(self) -> int:
        if self._is_latent:
            return int(self["num_hidden_layers"] * self._row_size * 2)
        per_layer = 2 * self["num_key_value_heads"] * self["head_dim"] * 2
        return int((self["num_hidden_layers"] - self._num_linear) * per_layer)

    def kv_bytes(self, context_len: int) -> int:
        """Bytes that a decode step reads for a request with this many tokens, and writes to its state.

        Layers with a sliding window read the window only.
        """
        types = self.config.get("layer_types", ())
        share = types.count("sliding_attention") / len(types) if types else 0.0
        seen = min(context_len, self["sliding_window"]) if share else context_len
        tokens = share * seen + (1 - share) * context_len
        return int(self.kv_bytes_per_token * tokens) + 2 * self.state_bytes

    def flops(self, num_tokens: float, context_len: float, num_sampled: float) -> float:
        """Operations of a forward pass over `num_tokens`, which attend to `context_len` tokens on average."""
        layers, num_experts = self["num_hidden_layers"], self.config.get("num_experts_per_tok", 0)
        linear = 2 * (self._mixer_params + self._mlp_params(num_experts))
        # Latent attention is counted with expanded keys and values: no engine needs to do more.
        sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        both_dims = sum(self[name] for name in sizes) if self._is_latent else 2 * self["head_dim"]
        attention = 2 * (layers - self._num_linear) * self["num_attention_heads"] * both_dims * context_len
        return num_tokens * (linear + attention) + num_sampled * 2 * self._head_params


class HybridShape(Shape):
    """A model whose layers are Mamba-2 (M), attention (*), an MLP (-) or experts (E), by its pattern."""

    def _count(self, letter: str) -> int:
        return int(self["hybrid_override_pattern"].count(letter))

    @property
    def _num_linear(self) -> int:
        """Number of layers without attention."""
        return int(self["num_hidden_layers"] - self._count("*"))

    @property
    def _scan_sizes(self) -> tuple[int, int]:
        """Sizes of a Mamba-2 layer: inner size, and channels of the convolution."""
        inner = self["mamba_num_heads"] * self["mamba_head_dim"]
        return inner, inner + 2 * self["n_groups"] * self["ssm_state_size"]

    @property
    def _mixer_params(self) -> int:
        inner, channels = self._scan_sizes
        of_scans = self["hidden_size"] * (2 * inner + channels + self["mamba_num_heads"])
        return int(self._count("*") * self._attention_params + self._count("M") * of_scans)

    @property
    def state_bytes(self) -> int:
        inner, channels = self._scan_sizes
        inputs = channels * (self["conv_kernel"] - 1) * 2
        return int(self._count("M") * (inputs + inner * self["ssm_state_size"] * 4))

    def _mlp_params(self, num_experts: float) -> float:
        inner = self._count("-") * self["intermediate_size"]
        if of_experts := self._count("E"):
            inner += of_experts * self["moe_shared_expert_intermediate_size"]
            inner += of_experts * num_experts * self["moe_intermediate_size"]
        return float(2 * self["hidden_size"] * inner)


def _read_shapes() -> dict[str, Shape]:
    """Shapes by name, from the models' config.json or the defaults of transformers' configs (Qwen3.5).

    The experts of gpt-oss are in bfloat16.
    """
    configs = json.loads((Path(__file__).parent / "shapes.json").read_text())
    return {
        name: (HybridShape if "hybrid_override_pattern" in config else Shape)(config)
        for name, config in configs.items()
    }


SHAPES = _read_shapes()
TINY = SHAPES.pop("tiny")
SHAPES["llama8b-transformers"] = replace(SHAPES["llama8b"], server_args={"model_impl": "transformers"})


def checkpoint_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint's tensors. Experts are separate tensors, as trainers send them."""
    config = AutoConfig.for_model(**shape.config)
    model = build_model(shape["architectures"][0], config, torch.bfloat16, torch.device("cpu"))
    return {name: target.shape for name, target in model.checkpoint_map().items()}


# ------------------------------------------------------------------------------------------------ the machine


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def empty_cache(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()


@dataclass
class Machine:
    """The machine's rates, measured in this process before an engine starts. The best run counts.

    Attributes:
        runs: all runs, by name.
        copy_bytes_per_s: copies on the device, counting bytes read and bytes written.
        flops: operations per second of a bfloat16 matrix product of random numbers.
        to_host_bytes_per_s, to_device_bytes_per_s: copies to and from pinned memory.
    """

    runs: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def measure(cls, device: str, *, tiny: bool = False) -> Machine:
        machine = cls()
        num_bytes, size = (1 << 20, 128) if tiny else (4 * GIB, 8192)
        machine._measure_copies(device, num_bytes)
        machine._measure_product(device, size)
        empty_cache(device)
        return machine

    def _measure_copies(self, device: str, num_bytes: int) -> None:
        source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        target = torch.zeros_like(source)
        self._note("copy", device, 2 * num_bytes, lambda: target.copy_(source))
        host = torch.ones(min(num_bytes, GIB), dtype=torch.uint8, pin_memory=device == "cuda")
        part = source[: len(host)]
        self._note("to_host", device, len(host), lambda: host.copy_(part, non_blocking=True))
        self._note("to_device", device, len(host), lambda: part.copy_(host, non_blocking=True))

    def _measure_product(self, device: str, size: int) -> None:
        left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
        product = torch.empty_like(left)
        self._note("matmul", device, 2 * size**3, lambda: torch.mm(left, right, out=product))

    def measure_sustained(self, device: str, *, tiny: bool = False) -> None:
        """Repeat the matrix product, and note a rate for each half second: power limits lower the clocks."""
        size, num_windows, window_s = (128, 1, 0.01) if tiny else (8192, 8, 0.5)
        left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
        product = torch.empty_like(left)
        for _ in range(num_windows):
            synchronize(device)
            started, num_products = time.perf_counter(), 0
            while time.perf_counter() - started < window_s:
                for _ in range(20):
                    torch.mm(left, right, out=product)
                num_products += 20
                synchronize(device)
            rate = num_products * 2 * size**3 / (time.perf_counter() - started)
            self.runs.setdefault("matmul_sustained", []).append(rate)
        del left, right, product
        empty_cache(device)

    def _note(self, name: str, device: str, amount: float, action: Callable[[], object]) -> None:
        repeats = 5 if device == "cuda" else 1
        action()
        for _ in range(5):
            synchronize(device)
            started = time.perf_counter()
            for _ in range(repeats):
                action()
            synchronize(device)
            rate = repeats * amount / (time.perf_counter() - started)
            self.runs.setdefault(name, []).append(rate)

    @property
    def copy_bytes_per_s(self) -> float:
        return max(self.runs["copy"])

    @property
    def flops(self) -> float:
        return max(self.runs["matmul"])

    @property
    def to_host_bytes_per_s(self) -> float:
        return max(self.runs["to_host"])

    @property
    def to_device_bytes_per_s(self) -> float:
        return max(self.runs["to_device"])


# ------------------------------------------------------------------------------------------------- the script


def parser_of(docstring: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments of all GPU benchmarks."""
    parser = argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model: checks the script, measures nothing"
    )
    parser.add_argument("--runs", type=int, default=3, help="(with --tiny: at most 1)")
    parser.add_argument("--label", default="", help="end of the result's name: runs of parts side by side")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="JSON: further ServerArgs")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    args = parser.parse_args(argv)
    if args.tiny:
        args.runs = min(args.runs, 1)
    return args


def engine_args(args: argparse.Namespace, folder: Path, **more: Any) -> dict[str, Any]:
    """`ServerArgs` for a model folder without weights."""
    return {
        "model_path": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "device": args.device,
        **more,
        **args.engine_args,
    }


def shape_of(args: argparse.Namespace, name: str) -> Shape:
    return TINY if args.tiny else SHAPES[name]


@contextmanager
def model_folder(args: argparse.Namespace, name: str) -> Iterator[tuple[Shape, Path]]:
    """A shape by name, or the tiny one with `--tiny`, and a temporary model folder with it."""
    with tempfile.TemporaryDirectory(prefix="eb-") as folder:
        shape = shape_of(args, name)
        yield shape, shape.write(Path(folder) / "model")


def wall_ms(action: Callable[[], Any]) -> tuple[Any, float]:
    """Call an action; returns its result, and the milliseconds that it took."""
    started = time.perf_counter()
    result = action()
    return result, (time.perf_counter() - started) * 1e3


# -------------------------------------------------------------------------------------------------- the rows


class Report:
    """The rows of a benchmark's results. A row that fails gets its error, and the benchmark goes on."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self._name = name
        self._args = args
        self.rows: dict[str, dict[str, Any]] = {}
        self.facts: dict[str, Any] = {"engine_args": args.engine_args, "device": args.device}

    @contextmanager
    def attempt(self, *keys: str) -> Iterator[None]:
        """In this context, an exception becomes the rows' error. KeyError: a key is not in `GOALS`."""
        for key in keys:
            GOALS[key]
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            for key in keys:
                if key not in self.rows:
                    self.rows[key] = {"error": f"{type(error).__name__}: {error}"}

    def skip(self, *keys: str, why: str) -> None:
        for key in keys:
            self.rows[key] = {"skipped": why}

    def add(
        self,
        key: str,
        runs: Sequence[float],
        *,
        limit: float | None = None,
        limit_basis: str = "",
        best: bool = False,
        goal_value: float | None = None,
        **details: Any,
    ) -> None:
        """Add a row and write the file.

        Args:
            runs: in the unit of the goal.
            limit: the best that this machine allows, in the same unit; None: unknown.
            limit_basis: how the limit was determined.
            best: whether the row's value is the best run, not the median.
            goal_value: replaces the goal, if it depends on another measurement.
            details: other measurements, as JSON values.
        """
        goal = GOALS[key]
        wanted = goal.goal if goal_value is None else goal_value
        value = (max(runs) if goal.at_least else min(runs)) if best else statistics.median(runs)
        fraction = None
        if limit is not None and value > 0:
            fraction = value / limit if goal.at_least else limit / value
        self.rows[key] = {
            "value": value,
            "of": "best" if best else "median",
            "unit": goal.unit,
            "runs": list(runs),
            "limit": limit,
            "limit_basis": limit_basis,
            "fraction_of_limit": fraction,
            "goal": wanted,
            "reached": None if wanted is None else (value >= wanted if goal.at_least else value <= wanted),
            **details,
        }
        print(self._line(key), flush=True)
        # Written after each row, in case the script is stopped later.
        self._write()

    def finish(self) -> None:
        """Print the table and write the file. Figures of the tiny model or of a CPU are not written."""
        print(f"\n{self._name}")
        for key in self.rows:
            print(self._line(key))
        path = self._write()
        print(
            "not written: this was a check of the script" if path is None else f"written to {path}",
            flush=True,
        )

    def _write(self) -> Path | None:
        results = {**self.facts, "rows": self.rows}
        if self._args.tiny or self._args.device != "cuda":
            json.dumps(results)
            return None
        label = f"_{self._args.label}" if self._args.label else ""
        return write_result(f"{self._name}{label}", results)

    def _line(self, key: str) -> str:
        row, title = self.rows[key], GOALS[key].title
        if "value" not in row:
            return f"  {title:75.75s} {row.get('error') or 'skipped: ' + row['skipped']}"
        text = f"  {title:75.75s} {row['value']:11,.2f} {row['unit']}"
        if row["goal"] is not None:
            text += f"  goal {row['goal']:,.1f} {'reached' if row['reached'] else 'MISSED'}"
        if row["limit"] is not None:
            text += f"  limit {row['limit']:,.2f}"
        if row["fraction_of_limit"] is not None:
            text += f" ({row['fraction_of_limit']:.0%})"
        return text


# ------------------------------------------------------------------------------------------------- a server


@dataclass
class Server:
    """`python -m ebbtide.launch_server` in another process. `started`: by `time.perf_counter`."""

    process: subprocess.Popen[bytes]
    url: str
    log_file: Path
    started: float

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def wait_ready(self, path: str = "/health") -> None:
        """Wait until a path answers 200. RuntimeError, with the log's end: it ended, or is late."""
        while time.perf_counter() - self.started < START_TIMEOUT_S:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended: {self.log[-2000:]}")
            try:
                if httpx.get(self.url + path, timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.02)
        raise RuntimeError(f"the server was not ready after {START_TIMEOUT_S:g} s: {self.log[-2000:]}")


@contextmanager
def running_server(arguments: dict[str, Any]) -> Iterator[Server]:
    """Start a server with these `ServerArgs`, without waiting until it is ready; end it at the end."""
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="eb-") as folder:
        log_file = Path(folder) / "log"
        command = [sys.executable, "-m", "ebbtide.launch_server", "--port", str(port), *flags(arguments)]
        environment = os.environ | {
            "TMPDIR": folder,
            "PYTHONPATH": os.pathsep.join(
                [str(Path(ebbtide.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        }
        with log_file.open("wb") as log:
            started = time.perf_counter()
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            yield Server(process, f"http://127.0.0.1:{port}", log_file, started)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def flags(arguments: dict[str, Any]) -> list[str]:
    """`ServerArgs` as arguments of the command line."""
    result = []
    for name, value in arguments.items():
        if value is False or value is None:
            continue
        result.append("--" + name.replace("_", "-"))
        if value is not True:
            result += [str(one) for one in value] if isinstance(value, list) else [str(value)]
    return result


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
