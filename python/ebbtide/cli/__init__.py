"""The `ebbtide` command and its subcommands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import typer

from ebbtide.cli import measure, server
from ebbtide.version import __version__

ON_THIS_MACHINE = "Run it on this machine"
ASK = "Ask a server"
CONTROL = "Control a server"

app = typer.Typer(
    help="An inference engine for the rollouts of reinforcement learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"ebbtide {__version__}")
        raise typer.Exit


@app.callback()
def ebbtide(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version."
    ),
) -> None:
    pass


def _add_own(name: str, help: str, module: str, **options: str) -> None:
    """Add a command whose module is imported when it runs, and has a `main` that parses the arguments."""

    @app.command(
        name,
        help=help,
        rich_help_panel=ON_THIS_MACHINE,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    )
    def command(context: typer.Context) -> None:
        try:
            main = import_module(module).main
        except ModuleNotFoundError as error:
            if error.name != "matplotlib":
                raise
            print('ebbtide demo draws with matplotlib: pip install "ebbtide[demo]"', file=sys.stderr)
            raise typer.Exit(2) from None
        raise typer.Exit(main(context.args, **options))


_add_own(
    *("serve", "Serve a model over HTTP: a folder, a hub id, or `tiny`, which comes with Ebbtide."),
    *("ebbtide.launch_server",),
    prog="ebbtide serve",
)
_add_own("warmup", "Compile a model's GPU kernels ahead of time.", "ebbtide.warmup")
_add_own("doctor", "Say what this machine has and what that means.", "ebbtide.doctor")
_add_own(
    "demo",
    "Train a small model by reinforcement learning, with Ebbtide for the rollouts.",
    "ebbtide.demo.run",
)
app.command("chat", rich_help_panel=ASK)(server.chat)
app.command("generate", rich_help_panel=ASK)(server.generate)
app.command("bench", rich_help_panel=ASK)(measure.bench)
app.command("top", rich_help_panel=ASK)(server.top)
app.command("status", rich_help_panel=ASK)(server.status)
app.command("pause", rich_help_panel=CONTROL)(server.pause)
app.command("continue", rich_help_panel=CONTROL)(server.go_on)
app.command("release", rich_help_panel=CONTROL)(server.release)
app.command("resume", rich_help_panel=CONTROL)(server.resume)
app.command("park", rich_help_panel=CONTROL)(server.park)
app.command("update", rich_help_panel=CONTROL)(server.update)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    Args:
        argv: the arguments after `ebbtide`; None: those of this process.

    Returns 0: done; 1: it failed or was refused; 2: the command line is wrong; 130: interrupted.
    """
    try:
        app(args=None if argv is None else list(argv), prog_name="ebbtide")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0
