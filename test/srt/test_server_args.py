"""ServerArgs: the fields of the wire, the command line, the URL."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ebbtide.srt.argument_checks import check_arguments, settled
from ebbtide.srt.arguments import Kind, sglang_arguments
from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.server_args import ServerArgs, argument_specs, is_loopback

# The fields of SGLang 0.5.23's ServerArgs, but for three that only note what was given.
SGLANG_NAMES = (Path(__file__).parent / "fixtures" / "sglang_0_5_23_arguments.txt").read_text().split()


def parse(*argv: str) -> ServerArgs:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return ServerArgs.from_cli_args(parser.parse_args(argv))


def test_frameworks_may_patch_post_init() -> None:
    with mock.patch.object(ServerArgs, "__post_init__") as patched:
        ServerArgs(model_path="m")
    patched.assert_called_once_with()


def test_every_field_has_its_flag() -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    first_flags = {action.option_strings[0] for action in parser._actions if action.dest != "help"}
    assert first_flags == {"--" + entry.name.replace("_", "-") for entry in dataclasses.fields(ServerArgs)}


def test_sglangs_arguments_are_known_each_in_one_place() -> None:
    own = {spec.name for spec in argument_specs()}
    assert len(SGLANG_NAMES) == len(set(SGLANG_NAMES)) == 543
    assert set(SGLANG_NAMES) <= own | sglang_arguments().keys()
    assert not own & sglang_arguments().keys()


def other_value(name: str) -> Any:
    """A value that is not the default, of the type that the command line makes."""
    argument = sglang_arguments()[name]
    if argument.value_type in ("bool", "switch"):
        return not argument.default
    return {"int": 7, "float": 0.25, "str": "other"}.get(argument.value_type, ["other"])


def of_kind(kind: Kind) -> list[str]:
    return [name for name, argument in sglang_arguments().items() if argument.kind is kind]


def test_what_would_change_results_is_refused_by_name() -> None:
    for name in of_kind(Kind.DEFAULT_ONLY):
        with pytest.raises(ConfigurationError, match=rf"not supported: {name}="):
            check_arguments(ServerArgs(model_path="m", **{name: other_value(name)}))


@pytest.mark.parametrize("off", [{"enable_lora": False}, {"grpc_mode": None}, {"lora_paths": []}])
def test_off_may_be_written_in_several_ways(off: dict[str, Any]) -> None:
    check_arguments(ServerArgs(model_path="m", **off))


def test_what_has_no_effect_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    names = of_kind(Kind.NO_EFFECT)
    check_arguments(ServerArgs(model_path="m", **{name: other_value(name) for name in names}))
    assert sorted(caplog.messages) == sorted(
        f"--{name.replace('_', '-')} has no effect in Ebbtide" for name in names
    )


def test_what_is_not_built_yet_is_not_ignored_silently(caplog: pytest.LogCaptureFixture) -> None:
    check_arguments(ServerArgs(model_path="m", schedule_policy="hrrn"))
    assert caplog.messages == ["--schedule-policy hrrn means fcfs in Ebbtide: order of arrival"]


def test_an_alias_is_what_it_stands_for() -> None:
    args = ServerArgs(model_path="m", cuda_graph_bs_decode=[1, 2], disable_decode_cuda_graph=True)  # type: ignore[call-arg]
    assert (settled(args).cuda_graph_bs, settled(args).disable_cuda_graph) == ([1, 2], True)
    both = ServerArgs(model_path="m", cuda_graph_max_bs=8, cuda_graph_max_bs_decode=9)  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match="another name of cuda_graph_max_bs: got 9 and 8"):
        settled(both)


ROOT_PATHS = ("engines", "/engines/", "/", "/a//b", "/..", "/a?b", "/a\n", "//other.host", "/v1", "/docs/a")


@pytest.mark.parametrize("path", ROOT_PATHS)
def test_a_path_of_a_proxy_is_absolute_and_none_of_the_servers_own(path: str) -> None:
    good = settled(ServerArgs(model_path="m", fastapi_root_path="/engines/a.b"))  # type: ignore[call-arg]
    check_arguments(good)
    assert good.root_path == "/engines/a.b"
    with pytest.raises(ConfigurationError, match=r"root_path.*expected a path"):
        check_arguments(ServerArgs(model_path="m", root_path=path))


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "names"),
    [
        ("auto", "auto", ("auto", "auto")),
        ("half", "fp8", ("float16", "fp8_e4m3")),
        ("bf16", "float", ("bfloat16", "float32")),
        (torch.bfloat16, torch.float8_e4m3fn, ("bfloat16", "fp8_e4m3")),
    ],
)
def test_a_dtype_may_have_another_name_or_be_an_object_of_torch(
    dtype: Any, kv_cache_dtype: Any, names: tuple[str, str]
) -> None:
    args = settled(ServerArgs(model_path="m", dtype=dtype, kv_cache_dtype=kv_cache_dtype))
    check_arguments(args)
    assert (args.dtype, args.kv_cache_dtype) == names


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--tp", "2"], "tp_size", 2),
        (["--data-parallel-size", "3"], "dp_size", 3),
        (["--mem-fraction-static", "0.5"], "mem_fraction_static", 0.5),
        (["--skip-tokenizer-init"], "skip_tokenizer_init", True),
        (["--no-enable-memory-saver"], "enable_memory_saver", False),
        (["--cuda-graph-bs", "1", "2", "4"], "cuda_graph_bs", [1, 2, 4]),
        (["--custom-weight-loader", "a.b", "c.d"], "custom_weight_loader", ["a.b", "c.d"]),
        (["--schedule-conservativeness", "0.3"], "schedule_conservativeness", 0.3),
        (["--expert-parallel-size", "2"], "ep_size", 2),
        (["--enable-hicache"], "enable_hierarchical_cache", True),
        (["--no-enable-fused-qk-norm-rope"], "enable_fused_qk_norm_rope", False),
        (["--gc-threshold", "700", "10"], "gc_threshold", [700, 10]),
    ],
)
def test_flags_set_their_fields(argv: list[str], name: str, value: Any) -> None:
    assert getattr(parse("--model", "m", *argv), name) == value


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--model-path", "m", "--no-such-flag"],
        ["--model-path", "m", "--page-size", "many"],
        ["--model-path", "m", "--schedule-policy", "lifo"],
    ],
)
def test_a_bad_command_line_is_a_usage_error(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(*argv)
    assert stop.value.code == 2


def test_flags_can_be_prefixed_by_wrapping_add_argument() -> None:
    parser = argparse.ArgumentParser()
    plain = parser.add_argument

    def prefixed(*flags: str, **options: Any) -> argparse.Action:
        options.pop("required", None)
        return plain(*(f"--rollout-{flag.lstrip('-')}" for flag in flags), **options)

    parser.add_argument = prefixed  # type: ignore[method-assign]
    ServerArgs.add_cli_args(parser)
    namespace = parser.parse_args(["--rollout-tp-size", "4", "--rollout-page-size", "8"])
    assert (namespace.rollout_tp_size, namespace.rollout_page_size) == (4, 8)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:30000"),
        ("[::]", "http://[::1]:30000"),
        ("fd00::1", "http://[fd00::1]:30000"),
        ("node-7", "http://node-7:30000"),
    ],
)
def test_url(host: str, url: str) -> None:
    assert ServerArgs(model_path="m", host=host).url() == url


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.8.8.8", True),
        ("localhost", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("node-7", False),
        ("", False),
    ],
)
def test_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
