"""ServerArgs: the fields of the wire, the command line, the URL."""

import argparse
import dataclasses
from typing import Any
from unittest import mock

import pytest

from ebbtide.srt.server_args import ServerArgs, is_loopback


def parse(*argv: str) -> ServerArgs:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return ServerArgs.from_cli_args(parser.parse_args(argv))


def test_building_one_touches_nothing() -> None:
    args = ServerArgs(model_path="/no/such/folder", device="cuda", tp_size=64, port=-1)
    assert (args.model_path, args.tp_size) == ("/no/such/folder", 64)


def test_an_unknown_field_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="tensor_parallel"):
        ServerArgs(model_path="m", tensor_parallel=2)  # type: ignore[call-arg]


def test_frameworks_may_patch_post_init() -> None:
    with mock.patch.object(ServerArgs, "__post_init__") as patched:
        ServerArgs(model_path="m")
    patched.assert_called_once_with()


def test_the_command_line_has_the_defaults_of_the_class() -> None:
    assert parse("--model-path", "m") == ServerArgs(model_path="m")


def test_every_field_has_its_flag() -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    first_flags = {action.option_strings[0] for action in parser._actions if action.dest != "help"}
    assert first_flags == {"--" + entry.name.replace("_", "-") for entry in dataclasses.fields(ServerArgs)}


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--tp", "2"], "tp_size", 2),
        (["--tensor-parallel-size", "2"], "tp_size", 2),
        (["--tp-size", "2"], "tp_size", 2),
        (["--dp", "3"], "dp_size", 3),
        (["--data-parallel-size", "3"], "dp_size", 3),
        (["--nnodes", "2"], "nnodes", 2),
        (["--node-rank", "1"], "node_rank", 1),
        (["--dist-init-addr", "node-0:5000"], "dist_init_addr", "node-0:5000"),
        (["--nccl-port", "29500"], "nccl_port", 29500),
        (["--base-gpu-id", "2"], "base_gpu_id", 2),
        (["--gpu-id-step", "2"], "gpu_id_step", 2),
        (["--load-balance-method", "shortest_queue"], "load_balance_method", "shortest_queue"),
        (["--mem-fraction-static", "0.5"], "mem_fraction_static", 0.5),
        (["--chunked-prefill-size", "-1"], "chunked_prefill_size", -1),
        (["--skip-tokenizer-init"], "skip_tokenizer_init", True),
        (["--cuda-graph-bs", "1", "2", "4"], "cuda_graph_bs", [1, 2, 4]),
        (["--custom-weight-loader", "a.b", "c.d"], "custom_weight_loader", ["a.b", "c.d"]),
        (["--enable-lora"], "enable_lora", True),
        (["--schedule-conservativeness", "0.3"], "schedule_conservativeness", 0.3),
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


def test_from_cli_args_takes_the_attributes_that_exist() -> None:
    args = ServerArgs.from_cli_args(argparse.Namespace(model_path="m", page_size=8, unrelated=1))
    assert args == ServerArgs(model_path="m", page_size=8)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:30000"),
        ("0.0.0.0", "http://127.0.0.1:30000"),
        ("::", "http://[::1]:30000"),
        ("[::]", "http://[::1]:30000"),
        ("[fd00::1]", "http://[fd00::1]:30000"),
        ("fd00::1", "http://[fd00::1]:30000"),
        ("node-7", "http://node-7:30000"),
    ],
)
def test_url(host: str, url: str) -> None:
    assert ServerArgs(model_path="m", host=host).url() == url


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("node-7", False),
        ("", False),
    ],
)
def test_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
