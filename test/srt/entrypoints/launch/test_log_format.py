"""Lines of the log, as people and as programs read them."""

import json
import logging
from collections.abc import Iterator

import pytest

from ebbtide.srt.entrypoints.launch.console import configure_logging
from ebbtide.srt.server_args import ServerArgs


@pytest.fixture(autouse=True)
def root() -> Iterator[None]:
    """The root logger is left as it was."""
    logger = logging.getLogger()
    before = logger.handlers[:], logger.level
    logger.handlers = []
    yield
    logger.handlers, logger.level = before


def log(**arguments: str) -> None:
    configure_logging(ServerArgs(model_path="none", **arguments), "scheduler-tp1")  # type: ignore[arg-type]
    logger = logging.getLogger("some.module")
    logger.info("weights updated: %s\n%s", "é", "next line")
    try:
        raise ValueError("boom")
    except ValueError:
        logger.exception("it failed")


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    log(log_level="error")
    head, *trace = capsys.readouterr().err.splitlines()
    assert head.endswith("ERROR [scheduler-tp1] some.module: it failed")
    assert trace[-1] == "ValueError: boom"


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    log(log_format="json")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "INFO",
        "process": "scheduler-tp1",
        "logger": "some.module",
        "message": "weights updated: é\nnext line",
    }
    assert second["exception"].splitlines()[-1] == "ValueError: boom"
