"""Device memory that is only counted, and the memory of a tag on it."""

from __future__ import annotations

from collections.abc import Callable

from ebbtide.srt.errors import OutOfDeviceMemory


class NullDevice:
    """Device memory that is only counted; shared by all tags of one engine, or of several."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes

    def take(self, num_bytes: int) -> None:
        if num_bytes > self.free_bytes:
            raise OutOfDeviceMemory(num_bytes, self.free_bytes)
        self.used_bytes += num_bytes


class NullMemory:
    """The memory of one tag on a `NullDevice`; resident from the start."""

    def __init__(
        self,
        device: NullDevice,
        num_bytes: int,
        *,
        keeps_contents: bool = False,
        is_needed: bool = True,
        lose_contents: Callable[[], None] = lambda: None,
    ) -> None:
        device.take(num_bytes)
        self.keeps_contents = keeps_contents
        self.is_needed = is_needed
        self.virtual_bytes = num_bytes
        self.resident_bytes = num_bytes
        self.backup_bytes = 0
        # What a resume takes.
        self.wanted_bytes = num_bytes
        self._is_saved = False
        self._device = device
        self._lose_contents = lose_contents

    def prepare_release(self, keep: bool) -> None:
        if keep:
            self.backup_bytes = self.virtual_bytes
        self._is_saved = keep

    def release(self) -> int:
        freed_bytes, self.resident_bytes = self.resident_bytes, 0
        self._device.used_bytes -= freed_bytes
        if not self._is_saved:
            self._lose_contents()
        return freed_bytes

    def resume(self) -> int:
        mapped_bytes = self.wanted_bytes - self.resident_bytes
        self._device.take(mapped_bytes)
        self.resident_bytes = self.wanted_bytes
        return mapped_bytes

    def give(self, num_bytes: int) -> int:
        """So much of it goes to the device, and does not come with a resume."""
        self._device.used_bytes -= num_bytes
        self.resident_bytes -= num_bytes
        self.wanted_bytes -= num_bytes
        return num_bytes

    def take(self, num_bytes: int) -> int:
        """So much more of it."""
        self._device.take(num_bytes)
        self.resident_bytes += num_bytes
        self.wanted_bytes += num_bytes
        return num_bytes
