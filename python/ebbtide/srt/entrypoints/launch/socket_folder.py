"""The folder of an engine's sockets, and how those of killed engines go."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

PREFIX: Final = "ebbtide-"
# The owner holds a lock of this file, which the kernel drops when the process ends, however it does.
OWNED: Final = "owned"


class SocketFolder:
    """A new folder in the temporary one, of this process. Removes those whose owners were killed.

    A fork of the owner that lives on keeps the lock, and so the folder, until the next start after its end.
    """

    def __init__(self) -> None:
        _sweep(Path(tempfile.gettempdir()))
        self.path = tempfile.mkdtemp(prefix=PREFIX)
        unnamed = f"{self.path}/new"
        self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Only now may another start look whether it is locked.
        os.rename(unnamed, f"{self.path}/{OWNED}")

    def remove(self) -> None:
        """Remove it with all that is in it. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _sweep(parent: Path) -> None:
    for owned in parent.glob(f"{PREFIX}*/{OWNED}"):
        # Another user's, or one that its owner, or another start, has just removed.
        with suppress(OSError), owned.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(owned.parent, ignore_errors=True)
            logger.info("removed %s, which a killed engine had left", owned.parent)
