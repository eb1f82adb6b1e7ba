"""A CUDA device: copies beside other work, its identity, its memory."""

import os
import subprocess

import pytest
import torch

from ebbtide.srt.device import open_device, process_bytes
from ebbtide.srt.errors import ConfigurationError, EngineError

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture(scope="module")
def device():
    try:
        return open_device("cuda")
    except ConfigurationError as error:
        pytest.skip(str(error))


def test_it_is_what_torch_calls_it(device):
    assert torch.ones(1, device=device.name).sum().item() == 1
    assert torch.device(device.name) == torch.device("cuda", 0)
    assert device.uuid == str(torch.cuda.get_device_properties(0).uuid)


def test_copies_follow_what_was_launched_before_them(device):
    source = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    destination = torch.empty_like(source)
    assert device.copies_done()
    torch.cuda._sleep(200_000_000)
    source.fill_(7)
    with device.copying():
        torch.cuda._sleep(200_000_000)
        destination.copy_(source)
    # And what follows them, launched on this thread's stream, is not ahead of them.
    device.follow_copies()
    seen = destination.clone()
    assert not device.copies_done()
    device.synchronize()
    assert device.copies_done()
    assert destination.unique().tolist() == seen.unique().tolist() == [7]


def test_copies_count_as_under_way_also_when_the_block_is_left_by_an_error(device):
    def launch_and_fail():
        with device.copying():
            torch.cuda._sleep(500_000_000)
            raise ValueError("a tensor does not fit")

    with pytest.raises(ValueError, match="does not fit"):
        launch_and_fail()
    assert not device.copies_done()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    device.synchronize()


def test_trim_gives_back_what_torch_keeps(device):
    device.trim()
    before = device.free_bytes()
    kept = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    del kept
    assert before - device.free_bytes() >= 256 * MIB
    device.trim()
    assert before - device.free_bytes() < 32 * MIB


def test_room_that_was_made_is_kept_until_it_is_trimmed_and_what_was_used_of_it_is_known(device):
    device.trim()
    device.peak_bytes()
    before = device.free_bytes()
    assert device.make_room(256 * MIB)
    assert device.peak_bytes() >= 256 * MIB
    kept = before - device.free_bytes()
    assert 256 * MIB <= kept < 320 * MIB
    tensors = [torch.empty(size * MIB, dtype=torch.uint8, device="cuda") for size in (1, 1, 50, 120)]
    assert device.make_room(100 * MIB)
    assert before - device.free_bytes() == kept
    del tensors
    assert 172 * MIB <= device.peak_bytes() < 180 * MIB
    assert not device.make_room(1 << 50)
    device.trim()
    assert before - device.free_bytes() < 32 * MIB


def test_what_this_process_holds_grows_with_its_tensors(device):
    device.trim()
    before = device.memory_info().process_bytes
    tensor = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    info = device.memory_info()
    assert info.process_bytes - before >= tensor.nbytes
    assert info.process_bytes <= info.total_bytes - info.free_bytes
    assert device.memory_info(os.getpid()).process_bytes == info.process_bytes


def test_another_process_holds_nothing_or_is_not_known(device):
    with subprocess.Popen(["sleep", "60"]) as child:
        if os.getpid() in process_bytes(device.uuid):
            assert device.memory_info(child.pid).process_bytes == 0
        else:
            with pytest.raises(EngineError, match="NVML"):
                device.memory_info(child.pid)
        child.kill()
    with pytest.raises(ProcessLookupError):
        device.memory_info(child.pid)
