"""The detokenizer: text per output, stop tokens and strings cut off, nothing kept after the last output."""

import gc
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixtures import scripted_engine
from fixtures.checkpoints import make_checkpoint
from fixtures.tokenizers import byte_fallback, byte_level
from hypothesis import example, given, strategies as st

from ebbtide.srt.config import EngineConfig, resolve
from ebbtide.srt.managers.detokenizer_manager import (
    DetokenizerManager,
    OutputText,
    run_detokenizer_process,
)
from ebbtide.srt.managers.io_struct import (
    FinishReason,
    RequestOutput,
    RequestStart,
    TokenOutput,
)
from ebbtide.srt.managers.text.tokenizer import Tokenizer
from ebbtide.srt.managers.wire.channel import ChannelAddresses
from ebbtide.srt.server_args import ServerArgs

EOS = byte_level().hf.convert_tokens_to_ids("</s>")


def ids(text: str) -> list[int]:
    return byte_level().encode(text)


def start(**changes: Any) -> RequestStart:
    return scripted_engine.start(**{"prompt_tail": ids("the"), **changes})


def texts(manager: DetokenizerManager, *outputs: RequestOutput) -> list[str]:
    message = manager.handle(TokenOutput(weight_version="1", outputs=list(outputs)))
    assert message.weight_version == "1"
    assert message.outputs == list(outputs)
    return message.texts


def finished(token_ids: list[int], reason: FinishReason, **started: Any) -> str:
    """The whole text of a request that arrives in one output."""
    output = RequestOutput("a", token_ids, finish=reason, start=start(**started))
    return texts(DetokenizerManager(byte_level()), output)[0]


def test_requests_do_not_mix() -> None:
    manager = DetokenizerManager(byte_level())
    duck = ids("🦆")
    first = RequestOutput("a", duck[:2], start=start())
    second = RequestOutput("b", ids(" dog"), start=start())
    assert texts(manager, first, second) == ["", " dog"]
    assert texts(manager, RequestOutput("b", ids("!")), RequestOutput("a", duck[2:])) == ["!", "🦆"]


def test_the_stop_token_is_cut_off_unless_it_is_to_stay() -> None:
    stop = FinishReason("stop", EOS)
    assert finished([*ids("dog"), EOS], stop) == "dog"
    assert finished([*ids("dog"), EOS], stop, skip_special_tokens=False) == "dog"
    assert finished([*ids("dog"), EOS], stop, skip_special_tokens=False, no_stop_trim=True) == "dog</s>"
    word = ids(" dog")
    assert finished([*ids("the"), *word], FinishReason("stop", word[-1])) != "the dog"


def test_the_last_token_stays_when_it_did_not_stop_the_request() -> None:
    assert finished(ids("the dog"), FinishReason("length", length=9)) == "the dog"
    assert finished(ids("the dog"), FinishReason("abort", message="x")) == "the dog"


def test_text_ends_at_the_stop_string() -> None:
    stop = FinishReason("stop", "\n\n")
    assert finished(ids("dog\n\nUser"), stop, stop_strings=("\n\n",)) == "dog"
    assert finished(ids("dog\n\nUser"), stop, stop_strings=("\n\n",), no_stop_trim=True) == "dog\n\n"


def test_what_might_have_become_a_stop_string_comes_out_at_the_end() -> None:
    manager = DetokenizerManager(byte_level())
    assert texts(manager, RequestOutput("a", ids("dog\n"), start=start(stop_strings=("\n\n",)))) == ["dog"]
    ended = RequestOutput("a", ids("x"), finish=FinishReason("length", length=2))
    assert texts(manager, RequestOutput("a", ids("\r")), ended) == ["\n\r", "x"]
    assert finished(ids("dog\n"), FinishReason("length", length=2), stop_strings=("\n\n",)) == "dog\n"


def test_half_a_character_comes_out_at_the_end() -> None:
    assert finished(ids("dog🦆")[:-1], FinishReason("length", length=2)) == "dog\ufffd"


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@given(output=st.lists(st.integers(0, 299), min_size=2, max_size=20), cut=st.integers(1, 20))
@example(output=[*ids("🦆")[:2], EOS], cut=2)
@example(output=[*byte_fallback().encode("🦆")[1:3], *byte_fallback().encode("a")], cut=2)
def test_what_goes_on_in_another_engine_has_the_text_of_what_was_not_cut(
    make: Callable[[], Tokenizer], output: list[int], cut: int
) -> None:
    """The first one died, and took along what it held back."""
    tokenizer, prompt, length = make(), ids("the"), FinishReason("length", length=1)
    whole, cut = RequestOutput("a", output, finish=length), min(cut, len(output) - 1)
    begun = OutputText(tokenizer, start()).push(RequestOutput("a", output[:cut]))
    tails = {"prompt_tail": prompt[max(0, len(prompt) + cut - 8) :], "continued_tail": output[:cut][-8:]}
    rest = OutputText(tokenizer, start(**tails)).push(RequestOutput("a", output[cut:], finish=length))
    assert begun + rest == OutputText(tokenizer, start()).push(whole)


def test_a_request_that_never_ran_and_one_that_is_unknown_have_no_text() -> None:
    manager = DetokenizerManager(byte_level())
    aborted = RequestOutput("a", [], finish=FinishReason("abort", message="x"), start=start())
    unknown = RequestOutput("b", ids("dog"), finish=FinishReason("abort", message="x"))
    assert texts(manager, aborted, unknown) == ["", ""]


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    manager = DetokenizerManager(byte_level())
    for number in range(50):
        texts(manager, RequestOutput(str(number), ids("dog"), start=start()))
    reason = FinishReason("length", length=1)
    texts(manager, *(RequestOutput(str(number), [], finish=reason) for number in range(50)))
    assert not [thing for thing in gc.get_objects() if type(thing) is OutputText]
    assert manager is not None


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = make_checkpoint(tmp_path_factory.mktemp("model"), "Qwen3ForCausalLM")
    return resolve(ServerArgs(model_path=str(path), device="cpu"))


def addresses(folder: Path) -> ChannelAddresses:
    return ChannelAddresses(*(f"ipc://{folder}/{name}" for name in ("scheduler", "detokenizer", "manager")))


def test_a_failed_start_says_why(config: EngineConfig, tmp_path: Path) -> None:
    broken = replace(config, model=replace(config.model, tokenizer_path=str(tmp_path / "nowhere")))
    ready, child_ready = multiprocessing.Pipe()
    run_detokenizer_process(broken, addresses(tmp_path), child_ready)
    answer = ready.recv()
    assert answer["status"] == "failed"
    assert "nowhere" in answer["message"]
