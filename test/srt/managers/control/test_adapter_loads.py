"""Adapters on null parts: each token is checked against the version that the answer names for it."""

import itertools
import random
from typing import Any

import pytest
from fixtures.adapter_control import AdapterHarness, loading
from fixtures.control import PROMPT, Harness, updating

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.control.adapters import AdapterBook
from ebbtide.srt.managers.io_struct import (
    AbortReq,
    Canary,
    ContinueGenerationReqInput,
    ControlCall,
    EndWeightUpdateReqInput,
    Expire,
    FinishReason,
    LoadLoRAAdapterFromTensorsReqInput,
    LoadRequest,
    PauseGenerationReqInput,
    PauseMode,
    Prepared,
    UnloadLoRAAdapterReqInput,
    Verdict,
    VersionContract,
)
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.testing import default_schedule

pytestmark = pytest.mark.unit


def test_requests_with_several_adapters_and_none_share_a_batch() -> None:
    harness = AdapterHarness(num_ranks=2)
    labels = [harness.load("a", 1), harness.load("b", 2)]
    rids = [harness.ask(adapter) for adapter in ("a", None, "b", "a")]
    harness.run_until_idle()
    assert [harness.labels(rid) for rid in rids] == [labels[:1], [], labels[1:], labels[:1]]
    harness.assert_true(*rids)
    assert harness.runner.num_steps < 2 * 16, "they ran together"


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        *((loading(name, 1), "lora_name") for name in ("", "a b", "a@1", "x" * 257)),
        *(
            (loading("a", 1, lora_version=version), "lora_version")
            for version in ("", "1\n2026-01-01 loaded")
        ),
        (
            LoadLoRAAdapterFromTensorsReqInput(
                lora_name="a", config_dict={}, serialized_named_tensors=[], added_tokens_config={"<x>": 5}
            ),
            "added_tokens_config",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_loaded_is_refused(request_: LoadRequest, problem: str) -> None:
    harness = AdapterHarness()
    assert problem in harness.refuse(request_).message
    assert harness.loaded == []
    assert "--enable-lora" in Harness().refuse(request_).message, "nothing can be"


def test_an_adapter_that_is_not_there_is_404() -> None:
    harness = AdapterHarness()
    harness.load("a", 1)
    for asked in ("b", "a@7", "a@", "@1"):
        rid = harness.ask(asked)
        harness.run_until_idle()
        finish = harness.finish(rid)
        assert (finish.status_code, "a@1" in finish.message) == (404, True), asked
        assert harness.outputs[rid].token_ids == []


@pytest.mark.parametrize(
    ("fields", "contract", "num_retractions"),
    [
        ({"in_flight": "continue"}, VersionContract(), 0),
        ({"in_flight": "recompute"}, VersionContract(), 1),
        ({}, VersionContract(on_update="recompute"), 1),
    ],
)
def test_requests_in_flight_move_if_they_or_the_load_say_so(
    fields: dict[str, Any], contract: VersionContract, num_retractions: int
) -> None:
    harness = AdapterHarness(num_slots=2)
    first = harness.load("a", 1)
    rid = harness.ask("a", max_new_tokens=40, contract=contract)
    pinned = harness.ask(first, max_new_tokens=40, contract=contract)
    harness.turn(5)
    reply = harness.do(loading("a", 2, **fields))
    harness.contents["a@2"] = 2
    assert reply.num_moved == 1
    harness.run_until_idle()
    assert harness.labels(rid) == [first, "a@2"]
    assert harness.labels(pinned) == [first], "it asked for that version"
    assert harness.outputs[rid].num_retractions == num_retractions
    harness.assert_true()


def test_kv_that_two_versions_have_computed_is_nobody_elses() -> None:
    harness = AdapterHarness(num_slots=2)
    harness.load("a", 1)
    rid = harness.ask("a", max_new_tokens=40)
    harness.turn(5)
    harness.load("a", 2, in_flight="continue")
    harness.run_until_idle()
    longer = [*PROMPT, *harness.outputs[rid].token_ids, 1]
    rids = [harness.ask(label, prompt=longer) for label in ("a@1", "a@2")]
    harness.run_until_idle()
    cached = [harness.outputs[rid].cached_tokens for rid in rids]
    assert cached[0] <= len(PROMPT) + 8
    assert cached[1] == 0


def test_an_update_of_the_adapter_may_end_requests() -> None:
    harness = AdapterHarness()
    harness.load("a", 1)
    rid = harness.ask("a", contract=VersionContract(on_update="abort"), max_new_tokens=40)
    harness.turn(5)
    harness.load("a", 2)
    harness.run_until_idle()
    finish = harness.finish(rid)
    assert finish.kind == "abort"
    assert harness.outputs[rid].token_ids


def test_a_version_never_changes_and_a_retry_changes_nothing() -> None:
    harness = AdapterHarness(num_ranks=2)
    harness.load("a", 1, lora_version="step-1")
    assert harness.do(loading("a", 1, lora_version="step-1")).changed is False
    other = harness.refuse(loading("a", 2, lora_version="step-1"))
    assert other.status == 409
    assert "step-1" in other.message
    harness.load("a", 2, lora_version="step-2")
    assert harness.do(loading("a", 1, lora_version="step-1")).changed is False
    assert harness.loaded == ["a@step-1", "a@step-2"], "a late retry takes nothing back"
    harness.do(UnloadLoRAAdapterReqInput(lora_name="a"))
    assert harness.refuse(loading("a", 3, lora_version="step-1")).status == 409
    harness.load("a", 1, lora_version="step-1")
    rid = harness.ask("a")
    harness.run_until_idle()
    harness.assert_true(rid)


def test_no_slot_is_written_that_a_pass_under_way_reads() -> None:
    harness = AdapterHarness(num_slots=2, keep_adapter_versions=0)
    harness.load("a", 1)
    rid = harness.ask("a", max_new_tokens=40)
    harness.turn(5)
    harness.load("a", 2)
    harness.turn()
    harness.abort(rid)
    # Its slot is free, and the last pass with it has not ended: the runner looks at what it reads.
    harness.load("a", 3)
    harness.assert_true(rid)


def test_an_unload_waits_for_requests_and_takes_no_new_ones() -> None:
    harness = AdapterHarness()
    harness.load("a", 1)
    rid = harness.ask("a", max_new_tokens=40)
    harness.turn(5)
    call = harness.call(UnloadLoRAAdapterReqInput(lora_name="a"))
    late = harness.ask("a")
    harness.turn(5)
    finish = harness.finish(late)
    assert finish.status_code == 404
    assert call not in harness.replies
    harness.run_until_idle()
    assert harness.reply(call).num_in_use == 0
    assert harness.outputs[rid].finish == FinishReason("length", length=40)
    harness.assert_true(rid)
    assert harness.refuse(UnloadLoRAAdapterReqInput(lora_name="a")).status == 404
    harness.load("a", 2)
    assert harness.refuse(UnloadLoRAAdapterReqInput(lora_name="a", lora_version=1)).status == 404
    assert harness.do(UnloadLoRAAdapterReqInput(lora_name="a", timeout_s=0)).num_in_use == 0
    assert list(harness.scheduler.policy.adapters.all()) == []


def test_an_unload_waits_for_paused_requests_until_its_deadline_only() -> None:
    harness = AdapterHarness()
    harness.load("a", 1)
    rid = harness.ask("a", max_new_tokens=40)
    harness.turn(5)
    harness.do(PauseGenerationReqInput(mode=PauseMode.IN_PLACE))
    call = harness.call(UnloadLoRAAdapterReqInput(lora_name="a", timeout_s=5))
    harness.turn(5)
    assert call not in harness.replies
    harness.deliver(Expire(id=call))
    harness.turn(5)
    assert harness.reply(call).num_in_use == 1
    harness.do(ContinueGenerationReqInput())
    harness.run_until_idle()
    assert harness.outputs[rid].finish == FinishReason("length", length=40)
    harness.assert_true(rid)


def test_a_request_is_not_kept_out_by_later_ones() -> None:
    """Streams of two adapters never end together; a third one still gets its turn."""
    harness = AdapterHarness(schedule=default_schedule(max_running_requests=4), num_pages=256)
    for index, name in enumerate("abc"):
        harness.load(name, index + 1)
    prompts = (range(first, first + 10) for first in itertools.count())

    def ask_two() -> None:
        for name, num_tokens in (("a", 6), ("b", 9)):
            harness.ask(name, prompt=next(prompts), max_new_tokens=num_tokens)

    ask_two()
    ask_two()
    harness.turn(3)
    third = harness.ask("c", prompt=next(prompts), max_new_tokens=4)
    for _ in range(20):
        ask_two()
        harness.turn(2)
    assert harness.finish(third) == FinishReason("length", length=4)
    harness.run_until_idle()
    harness.assert_true()


def test_a_pinned_adapter_keeps_its_slot() -> None:
    harness = AdapterHarness(num_pages=256)
    pinned = harness.load("p", 9, pinned=True)
    for index in range(4):
        harness.load(f"a{index}", index + 1)
    rids = [harness.ask(f"a{index % 4}", max_new_tokens=4) for index in range(8)]
    harness.run_until_idle()
    assert all(harness.outputs[rid].finish == FinishReason("length", length=4) for rid in rids)
    [version] = [one for one in harness.scheduler.policy.adapters.all() if one.label == pinned]
    assert version.slot is not None
    assert version.copy is None
    harness.load("p", 10, pinned=True)
    rid = harness.ask("p")
    harness.run_until_idle()
    harness.assert_true(rid, *rids)


def test_slots_that_are_all_pinned_refuse_further_adapters_by_name() -> None:
    harness = AdapterHarness()
    harness.load("p", 1, pinned=True)
    harness.load("q", 2, pinned=True)
    harness.refused(loading("a", 3), 409, "p, q")
    harness.do(UnloadLoRAAdapterReqInput(lora_name="q"))
    harness.load("a", 3)
    harness.refused(loading("q", 2, pinned=True), 409, "a")
    assert harness.loaded == ["p@1", "a@3"]


@pytest.mark.parametrize(("step", "rank"), [("open", 0), ("write", 1)])
def test_a_load_that_fails_on_one_rank_changes_nothing(step: str, rank: int) -> None:
    harness = AdapterHarness(num_ranks=2)
    harness.load("a", 1)
    before = harness.loaded
    harness.ranks[rank].adapters.faults[step] = RequestRejected("it does not fit")
    assert "it does not fit" in harness.refuse(loading("a", 2)).message
    assert harness.loaded == before
    harness.load("a", 3)
    rid = harness.ask("a")
    harness.run_until_idle()
    harness.assert_true(rid)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_version_that_cannot_be_brought_in_ends_its_requests_and_no_others(num_ranks: int) -> None:
    harness = AdapterHarness(num_slots=2, num_ranks=num_ranks)
    harness.load("a", 1)
    harness.load("b", 2)
    harness.load("c", 3)
    harness.ranks[-1].adapters.faults["restore"] = RuntimeError("out of memory")
    lost, other = harness.ask("a"), harness.ask("c")
    harness.run_until_idle()
    finish = harness.finish(lost)
    assert finish.status_code == 500
    assert "a@1" in finish.message
    assert harness.outputs[other].finish == FinishReason("length", length=16)
    again = harness.ask("a")
    harness.run_until_idle()
    harness.assert_true(again, other)


def test_a_full_shelf_and_the_names_of_the_base_are_refused_by_name() -> None:
    book = AdapterBook(3, 0, max_names=1, reserved=frozenset({"base"}))
    book.check_name("a")
    book.add("a", None, digest="", path="", slot=0, pinned=False)
    assert book.check_load("a", None, "", pinned=False) is False, "a new version is no further name"
    with pytest.raises(RequestRejected, match=r"max_loaded_loras is 1.*: a") as refused:
        book.check_load("b", None, "", pinned=False)
    assert refused.value.status == 409
    with pytest.raises(RequestRejected, match="'base' means the base model"):
        book.check_name("base")


def test_on_a_full_shelf_the_longest_unused_that_may_leave_makes_room() -> None:
    book = AdapterBook(3, 0, max_names=3)
    for name, may_leave in (("kept", False), ("old", True), ("new", True)):
        book.check_load(name, None, "", pinned=False)
        book.add(name, None, digest="", path="", slot=0, pinned=False, may_leave=may_leave)
    old = book.resolve("old")
    book.join(old)
    book.start(old)
    book.check_load("next", None, "", pinned=False)
    book.add("next", None, digest="", path="", slot=1, pinned=False)
    assert list(book.current) == ["kept", "old", "next"], "a request runs on the other one"
    book.check_load("last", None, "", pinned=False)
    book.add("last", None, digest="", path="", slot=1, pinned=False)
    assert list(book.current) == ["kept", "next", "last"]
    assert old.slot is not None, "its request comes to its end"
    with pytest.raises(RequestRejected, match="max_loaded_loras is 3: kept, next, last"):
        book.check_load("more", None, "", pinned=False)


def test_the_one_that_was_named_leaves_before_the_longest_unused() -> None:
    book = AdapterBook(3, 0, max_names=3)
    for name in ("kept", "old", "new"):
        book.add(name, None, digest="", path="", slot=0, pinned=False, may_leave=name != "kept")
    book.add("next", None, digest="", path="", slot=0, pinned=False, may_leave=True, instead_of="old")
    assert list(book.current) == ["kept", "new", "next"]
    book.add("last", None, digest="", path="", slot=0, pinned=False, instead_of="kept")
    assert list(book.current) == ["kept", "next", "last"], "what may not leave stays"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_release_ends_what_is_on_its_way_to_a_slot(num_ranks: int) -> None:
    harness = AdapterHarness(num_slots=2, keeps_weights=True, num_ranks=num_ranks)
    harness.load("a", 1)
    harness.load("b", 2)
    harness.load("c", 3)
    for rank in harness.ranks:
        rank.adapters.slowness = 5
    waiting = harness.ask("a")
    harness.turn(2)
    call = harness.call(loading("d", 4))
    harness.turn(3)
    harness.release(MemoryTag.WEIGHTS)
    assert harness.refusal(call).status == harness.refuse(loading("d", 4)).status == 409
    assert harness.loaded == ["a@1", "b@2", "c@3"]
    harness.resume(MemoryTag.WEIGHTS)
    harness.run_until_idle()
    assert harness.outputs[waiting].finish == FinishReason("length", length=16)
    harness.assert_true(waiting)


def test_a_joint_load_that_is_given_up_leaves_nothing() -> None:
    harness = AdapterHarness()
    harness.load("a", 1)
    harness.deliver(ControlCall(id="joint", request=loading("a", 2), is_joint=True))
    harness.turn(5)
    assert isinstance(harness.replies.pop("joint"), Prepared)
    harness.deliver(Verdict(id="joint", refusal="other replicas have refused this"))
    harness.turn(2)
    assert harness.loaded == ["a@1"]
    rid = harness.ask("a")
    harness.run_until_idle()
    harness.assert_true(rid)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_in_a_storm_every_token_is_of_the_version_that_is_named(seed: int, num_ranks: int) -> None:
    """Loads, unloads, updates of the base, pauses, sleeps and aborts in any order."""
    chance = random.Random(seed)
    harness = AdapterHarness(
        num_ranks=num_ranks,
        keeps_weights=True,
        num_pages=64,
        keep_adapter_versions=chance.randrange(3),
        schedule=default_schedule(max_running_requests=chance.choice([2, 8])),
    )
    for rank in harness.ranks:
        rank.adapters.slowness = chance.randrange(4)
    value = 0
    for _ in range(120):
        name = chance.choice("abcd")
        match chance.randrange(11):
            case 0 | 1:
                value += 1
                in_flight: Any = chance.choice(["stay", "continue", "recompute", "abort"])
                pinned = chance.random() < 0.1
                harness.call(loading(name, value, in_flight=in_flight, pinned=pinned, lora_version=value))
                harness.contents[f"{name}@{value}"] = value
            case 2:
                harness.call(UnloadLoRAAdapterReqInput(lora_name=name, timeout_s=0))
            case 3:
                harness.release(*chance.sample(list(MemoryTag), k=chance.randint(1, 3)))
                harness.turn(chance.randrange(3))
                harness.resume()
            case 4:
                harness.pause(chance.choice([PauseMode.RETRACT, PauseMode.IN_PLACE]))
                harness.turn(chance.randrange(3))
                harness.proceed()
            case 10:
                value += 1
                mode = chance.choice([PauseMode.RETRACT, PauseMode.IN_PLACE, PauseMode.WAIT])
                flush = mode is PauseMode.RETRACT
                harness.call(updating(value, weight_version=value, pause_mode=mode, flush_cache=flush))
            case 5:
                harness.call(AbortReq(rid=chance.choice([*harness.outputs, "nobody"])))
            case _:
                asked = chance.choice([name, name, None, f"{name}@{chance.randint(1, value + 1)}"])
                contract = VersionContract(on_update=chance.choice(["continue", "recompute", "abort"]))
                harness.ask(asked, max_new_tokens=chance.randint(1, 20), contract=contract)
        harness.turn(chance.randrange(4))
    harness.run_until_idle()
    assert all(output.finish is not None for output in harness.outputs.values()), "a request was lost"
    harness.assert_true()
    book = harness.scheduler.policy.adapters
    assert all(not one.num_live and not one.num_running and one.is_reachable for one in book.all())


def test_base_and_adapters_begin_to_serve_in_one_turn() -> None:
    harness = AdapterHarness(num_ranks=2)
    first = harness.load("a", 1)
    rid = harness.ask("a", max_new_tokens=60)
    harness.turn(4)
    harness.begin(session_id="step")
    joining: dict[str, Any] = {"session_id": "step", "in_flight": "continue"}
    second = harness.load("a", 2, lora_version="two", **joining)
    assert harness.do(loading("a", 2, lora_version="two", **joining)).changed is False, "it was asked again"
    assert harness.refuse(loading("a", 3, lora_version="two")).status == 409
    assert harness.refuse(loading("a", 2, lora_version="two")).status == 409
    harness.update(7, weight_version=7, session_id="step", flush_cache=False)
    harness.turn(5)
    assert harness.loaded == [first], "nothing of it serves before its end"
    harness.end(session_id="step", pause_mode=PauseMode.IN_PLACE)
    harness.run_until_idle()
    output = harness.outputs[rid]
    assert harness.labels(rid) == harness.loaded == [first, second]
    [(_, _), (_, with_adapter)] = output.adapter_starts
    [(_, _), (_, with_base)] = output.version_starts
    assert with_adapter == with_base
    harness.assert_true(rid)


def test_a_session_that_is_discarded_takes_its_adapters_with_it() -> None:
    harness = AdapterHarness(num_slots=2)
    harness.load("a", 1)
    harness.begin(session_id="step")
    fields: dict[str, Any] = {"lora_version": "two", "session_id": "step"}
    harness.load("a", 2, **fields)
    harness.abort_session()
    assert harness.loaded == ["a@1"]
    assert harness.refuse(loading("a", 2, **fields)).status == 409
    harness.load("a", 3, lora_version="two")
    rids = [harness.ask("a"), harness.ask("a@1")]
    harness.run_until_idle()
    harness.assert_true(*rids)


def test_what_is_staged_leaves_a_slot_to_requests() -> None:
    harness = AdapterHarness(num_slots=3, num_ranks=2)
    harness.load("a", 1)
    harness.load("b", 2)
    harness.begin(session_id="step")
    fields: dict[str, Any] = {"lora_version": "1", "session_id": "step"}
    harness.load("c", 3, **fields)
    harness.load("d", 4, **fields)
    harness.refused(loading("e", 5, **fields), 409, "c@1, d@1 are staged or pinned")
    assert harness.do(loading("c", 3, **fields)).changed is False
    rids = [harness.ask("a"), harness.ask("b")]
    harness.run_until_idle()
    harness.assert_true(*rids)
    harness.end(session_id="step", allow_incomplete=True)
    assert harness.loaded == ["a@1", "b@2", "c@1", "d@1"]


@pytest.mark.parametrize("kind", [RequestRejected, RuntimeError])
def test_a_session_without_an_adapter_that_was_refused_is_incomplete(kind: type[Exception]) -> None:
    harness = AdapterHarness()
    harness.begin(session_id="step")
    fields: dict[str, Any] = {"lora_version": "1", "session_id": "step"}
    harness.ranks[0].adapters.faults["open"] = kind("it does not fit")
    assert "it does not fit" in harness.refuse(loading("a", 1, **fields)).message
    assert harness.refuse(loading("a", 1, session_id="step")).status == 400, "a version is needed"
    assert "it does not fit" in harness.refuse(EndWeightUpdateReqInput(session_id="step")).message
    harness.load("a", 1, **fields)
    harness.end(session_id="step")
    assert harness.loaded == ["a@1"]


def test_a_canary_is_held_against_a_version_before_it_means_anything() -> None:
    harness = AdapterHarness(num_ranks=2)
    harness.load("a", 2)
    rid = harness.ask("a", max_new_tokens=40)
    harness.turn(5)
    # Of odd hundreds null weights make no finite logprobs: the base is 0, and adapters count 101 each.
    canary = Canary(input_ids=[1, 2, 3])
    assert "not finite" in harness.refuse(loading("a", 3, canary=canary)).message
    assert harness.loaded == ["a@1"]
    assert "finite" in harness.do(loading("a", 4, canary=canary)).message
    expected = Canary(input_ids=[1, 2, 3], logprobs=[-1.0, -1.0], atol=0.1)
    assert harness.refuse(loading("a", 6, canary=expected)).status == 400
    assert harness.refuse(loading("a", 6, canary=Canary(input_ids=[1, 1000]))).status == 400
    harness.run_until_idle()
    assert harness.labels(rid) == ["a@1"]
    assert harness.loaded == ["a@1", "a@2"]
