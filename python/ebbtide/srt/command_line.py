"""The parser of `ebbtide serve`: help by section, and the nearest flag for a misspelt one."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any

from ebbtide.srt.arguments import sglang_arguments
from ebbtide.srt.server_args import ServerArgs, argument_specs

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
