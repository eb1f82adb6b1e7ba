"""Checks arguments: rejects impossible and unsupported ones, and warns of those without effect."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ebbtide.srt.arguments import ArgumentSpec, Kind, sglang_arguments
from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.server_args import (
    OWN_SCHEDULE_POLICIES,
    ServerArgs,
    argument_specs,
    bare_host,
    is_loopback,
)

logger = logging.getLogger(__name__)

ALLOW_UNAUTHENTICATED_CONTROL = "EBBTIDE_ALLOW_UNAUTHENTICATED_CONTROL"
# Other name of a dtype → ours. torch's own names have the prefix "torch.".
_DTYPES = {"half": "float16", "float": "float32", "bf16": "bfloat16"}
_KV_CACHE_DTYPES = {**_DTYPES, "fp8": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3"}


def settled(args: ServerArgs) -> ServerArgs:
    """Copy values of aliases to the arguments that they stand for, and normalise all values.

    Raises ConfigurationError: an alias and its argument were given different values.
    """
    changes: dict[str, Any] = {
        "dtype": _dtype_name(args.dtype, _DTYPES),
        "kv_cache_dtype": _dtype_name(args.kv_cache_dtype, _KV_CACHE_DTYPES),
        "host": bare_host(args.host),
        "log_level_http": args.log_level_http or args.log_level,
    }
    if not args.enable_memory_saver:
        changes["memory_saver_backend"] = "none"
    if isinstance(args.custom_weight_loader, str):
        changes["custom_weight_loader"] = [args.custom_weight_loader]
    defaults = {spec.name: spec.default for spec in argument_specs()}
    for alias in sglang_arguments().values():
        value = getattr(args, alias.name)
        if alias.kind is not Kind.ALIAS or value == alias.default:
            continue
        own = getattr(args, alias.stands_for)
        if own not in (defaults[alias.stands_for], value):
            raise ConfigurationError(
                f"{alias.name} is another name of {alias.stands_for}: got {value!r} and {own!r}"
            )
        changes[alias.stands_for] = value
    return replace(args, **changes)


def _dtype_name(given: object, others: Mapping[str, str]) -> str:
    name = str(given).removeprefix("torch.")
    return others.get(name, name)


def check_arguments(args: ServerArgs) -> None:
    """Check all that depends on the arguments alone, and warn once about each that has no effect.

    Raises ConfigurationError: with the argument, what was expected and what was given.
    """
    for spec in argument_specs():
        _check_value(spec, getattr(args, spec.name))
    _check_bounds(args)
    _check_supported(args)
    _check_nodes(args)
    _check_exposure(args)
    _warn_without_effect(args)


_TYPE_NAMES = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


def _check_value(spec: ArgumentSpec, value: Any) -> None:
    if value is None and spec.optional:
        return
    items = value if spec.is_list and isinstance(value, list | tuple) else [value]
    if not all(_is_a(item, spec.types) for item in items):
        expected = " or ".join(_TYPE_NAMES[kind] for kind in spec.types)
        raise _unexpected(spec.name, f"{expected}{' or a list' if spec.is_list else ''}", value)
    arg = spec.arg
    if arg.choices and value not in arg.choices:
        raise _unexpected(spec.name, f"one of {', '.join(arg.choices)}", value)
    if arg.minimum is not None and not value >= arg.minimum and value != arg.also:
        raise _unexpected(
            spec.name, f"at least {arg.minimum}" + (f", or {arg.also}" if arg.also else ""), value
        )


def _is_a(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, bool):  # isinstance counts it as an int
        return bool in kinds
    return isinstance(value, kinds) or (float in kinds and isinstance(value, int))


def _unexpected(name: str, expected: str, value: Any) -> ConfigurationError:
    return ConfigurationError(f"{name}: expected {expected}, got {value!r}")


def _check_bounds(args: ServerArgs) -> None:
    fraction = args.mem_fraction_static
    if fraction is not None and not 0 < fraction < 1:
        raise _unexpected("mem_fraction_static", "a number between 0 and 1", fraction)
    if args.prefill_share is not None and not 0 < args.prefill_share <= 1:
        raise _unexpected("prefill_share", "a number above 0 and up to 1", args.prefill_share)
    if args.port > 65535:
        raise _unexpected("port", "at most 65535", args.port)
    _check_root_path(args.root_path)
    if args.nccl_port is not None and args.nccl_port > 65535:
        raise _unexpected("nccl_port", "at most 65535", args.nccl_port)
    for name in ("api_key", "admin_api_key"):
        if getattr(args, name) == "":  # e.g. an unset shell variable; clients without a key would be let in
            raise ConfigurationError(f"{name}: expected a key, got an empty string")
    for name in ("weight_update_timeout_s", "watchdog_timeout", "soft_watchdog_timeout"):
        seconds = getattr(args, name)
        if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
            raise _unexpected(name, "a number of seconds above 0", seconds)


# First segments of those of the server's own paths that have several segments.
PATH_FOLDERS = ("dashboard", "docs", "inference", "nemo-rl", "skyrl", "v1")


def _check_root_path(path: str) -> None:
    if path and re.fullmatch(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+", path) is None:
        raise _unexpected("root_path", "a path such as /engines/a, with no slash at its end", path)
    # Else the server could not tell whether a proxy has removed the root path.
    if path.strip("/").partition("/")[0] in PATH_FOLDERS:
        raise _unexpected("root_path", "a path that begins otherwise than the server's own", path)


# Values that frameworks pass for "off", whichever of them is the default.
_OFF: tuple[Any, ...] = (None, False, "", [])


def _check_supported(args: ServerArgs) -> None:
    for argument in sglang_arguments().values():
        value, default = getattr(args, argument.name), argument.default
        is_default = value == default or (value in _OFF and default in _OFF)
        if argument.kind is Kind.DEFAULT_ONLY and not is_default:
            raise ConfigurationError(
                f"not supported: {argument.name}={value!r} (only {default!r} is accepted)"
            )


def _check_nodes(args: ServerArgs) -> None:
    num_ranks = args.tp_size * args.dp_size
    if num_ranks % args.nnodes:
        raise ConfigurationError(
            f"nnodes: expected a divisor of the {num_ranks} ranks (tp_size={args.tp_size}, "
            f"dp_size={args.dp_size}), got {args.nnodes}"
        )
    if args.node_rank >= args.nnodes:
        raise _unexpected("node_rank", f"at most {args.nnodes - 1} (nnodes={args.nnodes})", args.node_rank)
    if args.nnodes > 1:
        if args.dist_init_addr is None:
            raise ConfigurationError(
                f"dist_init_addr: nnodes={args.nnodes} needs the host:port of node 0, the same on every node"
            )
        if split_address(args.dist_init_addr)[0] in ("0.0.0.0", "::"):
            raise _unexpected(
                "dist_init_addr", "an address by which the other nodes reach node 0", args.dist_init_addr
            )


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port` or `[host]:port` into the host, without brackets, and the port.

    Raises ConfigurationError: it has neither form.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not bare_host(host) or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise _unexpected("dist_init_addr", "host:port of node 0", address)
    return bare_host(host), int(port)


def _check_exposure(args: ServerArgs) -> None:
    allowed = args.allow_unauthenticated_control or os.environ.get(ALLOW_UNAUTHENTICATED_CONTROL) == "1"
    if not allowed and args.admin_api_key is None and not is_loopback(args.host):
        raise ConfigurationError(
            f"host {args.host} is not loopback: whoever reaches the port could control the engine. Pass "
            f"--admin-api-key or, if the network is trusted, --allow-unauthenticated-control "
            f"(or set {ALLOW_UNAUTHENTICATED_CONTROL}=1)"
        )


def _warn_without_effect(args: ServerArgs) -> None:
    for argument in sglang_arguments().values():
        if argument.kind is Kind.NO_EFFECT and getattr(args, argument.name) != argument.default:
            logger.warning("%s has no effect in Ebbtide", argument.flags[0])
    if args.schedule_policy not in OWN_SCHEDULE_POLICIES:
        logger.warning("--schedule-policy %s means fcfs in Ebbtide: order of arrival", args.schedule_policy)


def seconds_from(variable: str) -> float | None:
    """Read a time limit from an environment variable; None: it is not set, not positive, or infinite.

    Raises ConfigurationError: it is not a number.
    """
    given = os.environ.get(variable, "")
    try:
        seconds = float(given) if given else 0.0
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):
        raise ConfigurationError(f"{variable}: expected a number of seconds, got {given!r}")
    return seconds if 0 < seconds < math.inf else None


def check_quantized_dtype(quantization: str | None, dtype: str, *, is_cuda: bool) -> None:
    """Reject dtypes of activations that have no kernels for quantised weights.

    A GPU's kernels write bfloat16; the emulation on a CPU can also write float32.

    Raises ConfigurationError: the dtype is another one.
    """
    served = ("bfloat16",) if is_cuda else ("bfloat16", "float32")
    if quantization is not None and dtype not in served:
        where = "on a GPU" if is_cuda else "on a CPU"
        raise ConfigurationError(
            f"quantization={quantization}: expected dtype {' or '.join(served)} {where}, got {dtype}"
        )


def sees_cuda() -> bool:
    """Whether torch sees a CUDA device. Imports torch only if there is a driver; starts no CUDA context."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == "cuda"
