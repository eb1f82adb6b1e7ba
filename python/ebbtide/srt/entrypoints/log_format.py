"""How lines of the log look."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ebbtide.srt.server_args import ServerArgs

TEXT: Final = "%(asctime)s %(levelname)s [{process}] %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """A JSON object a line: `time` (UTC), `level`, `process`, `logger`, `message`, and `exception` if any."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process_name,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def configure_logging(args: ServerArgs, process_name: str) -> None:
    """Log to stderr from the level of the arguments on, each line with the name of the process."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter(process_name)
        if args.log_format == "json"
        else logging.Formatter(TEXT.format(process=process_name))
    )
    level = logging.getLevelNamesMapping().get(args.log_level.upper(), logging.INFO)
    logging.basicConfig(level=level, handlers=[handler], force=True)
