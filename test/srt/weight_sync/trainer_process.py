"""A trainer in a process of its own: it serializes as frameworks do, with torch alone, and keeps the tensors.

Run as a program it answers lines on its standard input; `TrainerProcess` is the test's end of that.
"""

import base64
import io
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Self

import torch
import torch.multiprocessing


def sample_tensors() -> list[tuple[str, torch.Tensor]]:
    """Every layout that a trainer sends: plain, parameter, transposed, offset view, empty, scalar, tied."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(6, 4, generator=generator)
    return [
        ("plain", torch.randn(3, 5, generator=generator)),
        ("parameter", torch.nn.Parameter(torch.randn(7, generator=generator).to(torch.bfloat16))),
        ("transposed", base.t()),
        ("rows", base[2:5]),
        ("tied", base),
        ("empty", torch.empty(0, 3)),
        ("scalar", torch.tensor(2.5, dtype=torch.float16)),
        ("counts", torch.arange(9)),
        ("odd", torch.arange(5, dtype=torch.uint8)),
        ("after_odd", torch.randn(2, 2, generator=generator, dtype=torch.float64)),
    ]


@dataclass
class FlattenedTensorMetadata:
    """As frameworks vendor it: what counts is the name of the class."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


@dataclass
class LocalSerializedTensor:
    values: list[bytes]


def torch_pickle(obj: object) -> bytes:
    buffer = io.BytesIO()
    ForkingPickler(buffer, 4).dump(obj)
    return buffer.getvalue()


def bucket_of(tensors: list[tuple[str, torch.Tensor]], as_dicts: bool) -> dict[str, Any]:
    pieces, metadata, start = [], [], 0
    for name, tensor in tensors:
        piece = tensor.detach().contiguous().flatten().view(torch.uint8)
        fields = (name, tensor.shape, tensor.dtype, start, start + piece.numel(), piece.numel())
        metadata.append(FlattenedTensorMetadata(*fields))
        pieces.append(piece)
        start += piece.numel()
    listed = [vars(item) for item in metadata] if as_dicts else metadata
    return {"flattened_tensor": torch.cat(pieces), "metadata": listed}


def make(kind: str) -> tuple[bytes, object]:
    """Returns a payload and what has to stay alive for it."""
    tensors = sample_tensors()
    match kind:
        case "named":
            return torch_pickle(tensors), tensors
        case "bucket" | "bucket_of_dicts":
            bucket = bucket_of(tensors, as_dicts=kind == "bucket_of_dicts")
            return torch_pickle(bucket), bucket
        case "empty_bucket":
            bucket = {"flattened_tensor": torch.empty(0, dtype=torch.uint8), "metadata": []}
            return torch_pickle(bucket), bucket
        case "two_ranks":
            ranks = [tensors, [(name, tensor.detach() + 1) for name, tensor in tensors]]
            values = [[torch_pickle(tensor) for _, tensor in rank] for rank in ranks]
            payload = [
                (name, LocalSerializedTensor([values[0][i], values[1][i]]))
                for i, (name, _) in enumerate(tensors)
            ]
            return torch_pickle(payload), ranks
        case "file_descriptor":
            torch.multiprocessing.set_sharing_strategy("file_descriptor")
            try:
                return torch_pickle(tensors), tensors
            finally:
                torch.multiprocessing.set_sharing_strategy("file_system")
    raise ValueError(kind)


def main() -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")
    held: object = None
    for line in sys.stdin:
        command = line.strip()
        if command == "drop":
            held = None
            print("dropped", flush=True)
        else:
            payload, held = make(command)
            print(base64.b64encode(payload).decode(), flush=True)
    del held


class TrainerProcess:
    """The test's end."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def send(self, kind: str) -> str:
        """The payload of a kind, as base64; its tensors live until `drop` or the next `send`."""
        return self._ask(kind)

    def drop(self) -> None:
        self._ask("drop")

    def shared_objects(self) -> set[Path]:
        """What this trainer has in shared memory."""
        return set(Path("/dev/shm").glob(f"torch_{self._process.pid}_*"))

    def _ask(self, command: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        assert answer, f"the trainer process ended at {command!r}"
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        assert self._process.stdout is not None
        self._process.stdout.close()


if __name__ == "__main__":
    main()
