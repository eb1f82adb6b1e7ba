"""What `/generate` accepts, what it refuses and why, and the messages that it becomes."""

import base64
import random
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tokenizers
from fixtures.tokenizers import byte_level
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ebbtide import SamplingParams
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.api.array_forms import ExpertSlots
from ebbtide.srt.managers.api.generate_fields import UNSUPPORTED_FIELDS, GenerateReqInput
from ebbtide.srt.managers.api.generate_request import GenerationDraft, RequestNormalizer
from ebbtide.srt.managers.api.request_limits import RequestLimits
from ebbtide.srt.managers.io_struct import TokenizedGenerateReqInput
from ebbtide.srt.managers.text.tokenizer import Tokenizer

LIMITS = RequestLimits(
    context_len=32, vocab_size=500, max_total_num_tokens=24, stream_interval=3, num_replicas=1
)


def plan(
    fields: Any = None, *, limits: RequestLimits = LIMITS, tokenizer: Any = byte_level, **more: Any
) -> list[TokenizedGenerateReqInput]:
    return drafted(fields if fields is not None else more, limits, tokenizer)[1]


def drafted(
    fields: Any, limits: RequestLimits = LIMITS, tokenizer: Any = byte_level
) -> tuple[GenerationDraft, list[TokenizedGenerateReqInput]]:
    normalizer = RequestNormalizer(limits, tokenizer and tokenizer(), random.Random(0))
    draft = normalizer.draft(fields)
    return draft, normalizer.plan(draft, normalizer.tokenize(draft, draft.prompts))


def refusal(**fields: Any) -> str:
    with pytest.raises(RequestRejected) as caught:
        plan(fields)
    assert caught.value.status == 400
    return caught.value.message


def test_a_single_prompt() -> None:
    sampling_params = {"max_new_tokens": 4, "temperature": 0.5}
    draft, [output] = drafted({"text": "the dog", "sampling_params": sampling_params, "stream": True})
    assert not draft.is_list
    assert output.input_ids == byte_level().encode("the dog")
    assert output.sampling_params == SamplingParams(max_new_tokens=4, temperature=0.5)
    assert (output.max_new_tokens, output.stream, output.stream_interval) == (4, True, 3)
    assert len(output.rid) == 32
    assert int(output.rid, 16) >= 0


def test_null_is_not_given() -> None:
    fields = dict.fromkeys(GenerateReqInput.__struct_fields__) | {"input_ids": [1, 2]}
    (output,) = plan(fields)
    assert (output.input_ids, output.max_new_tokens, output.return_logprob) == ([1, 2], 23, False)


def test_unknown_fields_are_ignored_and_a_struct_will_do() -> None:
    assert plan(input_ids=[1], log_metrics=True, conversation_id="c", made_up=3)[0].input_ids == [1]
    params = SamplingParams(top_k=3)
    assert plan(GenerateReqInput(input_ids=[1], sampling_params=params))[0].sampling_params is params


ONE, TWO = {"input_ids": [1]}, {"input_ids": [[1], [2]]}
REFUSED: list[tuple[str, list[dict[str, Any]]]] = [
    ("exactly one of text and input_ids", [{}, {"text": "a", **ONE}]),
    ("empty", [{"text": ""}, {"text": ["a", ""]}, {"input_ids": []}, {"input_ids": [[1], []]}]),
    ("empty", [{"text": []}, {"text": [], "sampling_params": []}]),
    # A wrong type is named with its path.
    ("$.input_ids[0]", [{"input_ids": ["a"]}]),
    ("$.stream", [{"text": "a", "stream": "perhaps"}]),
    ("$.timeout_s", [{"text": "a", "timeout_s": "nan"}]),
    ("$.top_logprobs_num", [{"text": "a", "top_logprobs_num": 1.5}]),
    # Ids outside the vocabulary, in one prompt of a batch too; more positions or tokens than there are.
    *[(str(bad), [{"input_ids": [1, bad]}, {**ONE, "token_ids_logprob": [bad]}]) for bad in (500, -1, 2**70)],
    ("999", [{"input_ids": [[1], [999]]}]),
    ("500", [{**ONE, "sampling_params": {"logit_bias": {"500": 1}}}]),
    *[(str(start), [{**ONE, "return_logprob": True, "logprob_start_len": start}]) for start in (-2, 4)],
    *[(str(num), [{**ONE, "top_logprobs_num": num}]) for num in (-1, 501)],
    ("mixture", [{"input_ids": [1, [2]]}, {**ONE, "token_ids_logprob": [1, [2]]}]),
    ("rid", [{**TWO, "rid": rid} for rid in ("", "x" * 257, ["a", "a"])]),
    ("timeout_s", [{**ONE, "timeout_s": value} for value in (0, -1, float("nan"), float("inf"))]),
    ("truncate_prompt_tokens", [{**ONE, "truncate_prompt_tokens": -2}]),
    ("truncation_side", [{**ONE, "truncation_side": side} for side in ("middle", True)]),
    # What no message has room for.
    *[
        (name, [{**ONE, name: value} for value in (2**63, -(2**63) - 1, 10**400)])
        for name in ("priority", "max_version_lag", "min_weight_version", "truncate_prompt_tokens")
    ],
    # Lists have one entry for each prompt, and n is the same for all.
    ("n must be the same", [{**TWO, "sampling_params": [{"n": 1}, {"n": 2}]}]),
    ("rid", [{**TWO, "rid": ["a"]}]),
    ("sampling_params", [{**TWO, "sampling_params": [{}]}]),
    ("return_logprob", [{**TWO, "return_logprob": [True]}]),
    ("logprob_start_len", [{**TWO, "logprob_start_len": [1]}]),
    ("cache_salt", [{**TWO, "cache_salt": ["a"]}]),
    ("token_ids_logprob", [{**TWO, "token_ids_logprob": [[1]]}]),
    # What is in the parameters is checked here too.
    ("temprature", [{**ONE, "sampling_params": {"temprature": 1}}]),
    ("expected an object", [{**ONE, "sampling_params": 3}]),
]


@pytest.mark.parametrize(
    ("message", "fields"), [(message, each) for message, cases in REFUSED for each in cases], ids=str
)
def test_what_cannot_be_is_refused_by_name(message: str, fields: dict[str, Any]) -> None:
    assert message in refusal(**fields)


def test_a_prompt_that_fills_the_context_or_the_pool_is_refused() -> None:
    limits = replace(LIMITS, context_len=8, max_total_num_tokens=100)
    with pytest.raises(RequestRejected, match=r"8 tokens.*8 tokens"):
        plan(input_ids=[1] * 8, limits=limits)
    assert limits.max_req_input_len == 7
    assert plan(input_ids=[1] * 7, limits=limits)[0].max_new_tokens == 1
    assert "25 tokens" in refusal(input_ids=[1] * 25), "the pool has room for 24"
    assert plan(input_ids=[1] * 24)[0].max_new_tokens == 1


class Unasked(Tokenizer):
    """A tokenizer that must not be asked for the ids of a text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert len(text) < 100_000, "the text was tokenized"
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("texts", ["a" * 100_000, " " * 100_000, ["short", "a" * 100_000]])
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(texts: Any) -> None:
    asked = texts if isinstance(texts, str) else texts[1:]
    with pytest.raises(RequestRejected, match=r"100000 characters: expected at most \d+, .* context of 32"):
        plan(text=asked, tokenizer=lambda: Unasked(byte_level().hf))
    # One bad prompt refuses the batch.
    assert "100000 characters" in refusal(text=texts)


def test_a_text_whose_blanks_the_tokenizer_drops_is_as_long_as_the_rest_of_it() -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"sea": 0, "<unk>": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    dropping = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=words))
    (output,) = plan(text="sea" + " \u2003" * 50_000 + "sea", tokenizer=lambda: dropping)
    assert output.input_ids == [0, 0]


@pytest.mark.parametrize(("kept", "num_kept"), [(3, 3), (-1, 7)])
def test_a_prompt_can_be_cut_to_its_last_tokens(kept: int, num_kept: int) -> None:
    limits = replace(LIMITS, context_len=8)
    fields = {"input_ids": [1, 2, 3, 4, 5, 6, 7, 8], "truncate_prompt_tokens": kept}
    assert plan(fields, limits=limits)[0].input_ids == [1, 2, 3, 4, 5, 6, 7, 8][-num_kept:]
    beginning = plan({**fields, "truncation_side": "right"}, limits=limits)[0].input_ids
    assert beginning == [1, 2, 3, 4, 5, 6, 7, 8][:num_kept]
    with pytest.raises(RequestRejected, match="8 tokens"):
        plan({**fields, "truncate_prompt_tokens": 0}, limits=limits)
    text = "the dog " * 1000
    (output,) = plan(text=text, truncate_prompt_tokens=4)
    assert output.input_ids == byte_level().encode(text)[-4:], "a text that is cut may be of any length"


@given(
    length=st.integers(1, 20),
    asked=st.none() | st.integers(0, 40),
    least=st.integers(0, 40),
    context=st.integers(21, 60),
    pool=st.integers(20, 60),
)
def test_max_new_tokens_are_cut_to_what_fits_and_more_min_new_tokens_are_refused(
    length: int, asked: int | None, least: int, context: int, pool: int
) -> None:
    least = least if asked is None else min(least, asked)
    room = min(context - length, pool - (length - 1))
    given: dict[str, Any] = {
        "input_ids": [1] * length,
        "sampling_params": {"max_new_tokens": asked, "min_new_tokens": least},
        "limits": replace(LIMITS, context_len=context, max_total_num_tokens=pool),
    }
    if least > room:
        with pytest.raises(RequestRejected, match=f"min_new_tokens: expected at most {room}, "):
            plan(**given)
        return
    (output,) = plan(**given)
    assert output.max_new_tokens == (room if asked is None else min(asked, room))
    assert output.sampling_params.min_new_tokens == least


@pytest.mark.parametrize(("low_first", "expected"), [(False, [3, 0, 7]), (True, [-3, 0, -7])])
def test_priorities_are_higher_where_requests_are_more_urgent(low_first: bool, expected: list[int]) -> None:
    limits = replace(LIMITS, default_priority=7, low_priority_first=low_first)
    made = [plan(input_ids=[1], limits=limits, priority=given)[0] for given in (3, 0, None)]
    assert [output.priority for output in made] == expected


# ------------------------------------------------------------------------------------------- batches and n


def test_samples_follow_their_prompt() -> None:
    made = plan(input_ids=[[1], [2]], sampling_params={"n": 2}, return_logprob=[True, False])
    for text, n in ((["a"], 1), ("a", 2)):
        assert drafted({"text": text, "sampling_params": {"n": n}})[0].is_list
    assert [output.input_ids for output in made] == [[1], [1], [2], [2]]
    assert [output.return_logprob for output in made] == [True, True, False, False]
    assert len({output.rid for output in made}) == 4


def test_lists_have_one_entry_per_prompt() -> None:
    made = plan(
        input_ids=[[1, 1], [2]],
        sampling_params=[{"temperature": 0}, None],
        return_logprob=True,
        logprob_start_len=[2, None],
        top_logprobs_num=[None, 3],
        token_ids_logprob=[[4], None],
        cache_salt=["a", None],
    )
    first, second = made
    assert first.sampling_params.temperature == 0
    assert second.sampling_params == SamplingParams()
    assert (first.logprob_start, first.top_logprobs_num, first.token_ids_logprob) == (2, 0, (4,))
    assert (second.logprob_start, second.top_logprobs_num, second.token_ids_logprob) == (None, 3, ())
    assert first.cache_namespace != second.cache_namespace == ()
    assert plan(input_ids=[1], extra_key="a")[0].cache_namespace != first.cache_namespace


def test_prompts_of_a_batch_may_have_adapters_of_their_own() -> None:
    limits = replace(LIMITS, has_adapters=True)
    for asked, expected in (("a", ["a", "a"]), (["a@2", None], ["a@2", None]), ("", [None, None])):
        made = plan(limits=limits, input_ids=[[1], [2]], lora_path=asked)
        assert [output.adapter for output in made] == expected
    assert "--enable-lora" in refusal(input_ids=[1], lora_path="a")
    assert "one entry per prompt" in refusal(input_ids=[[1], [2]], lora_path=["a"])
    assert "lora_path" in refusal(input_ids=[1], lora_path=7)


@pytest.mark.parametrize(
    ("fields", "rids", "groups"),
    [
        ({"input_ids": [1], "rid": "a"}, ["a"], {}),
        ({"input_ids": [1], "rid": ["a"]}, ["a"], {}),
        ({"input_ids": [[1]], "rid": "a"}, ["a_0"], {"a": ["a_0"]}),
        ({"input_ids": [[1], [2]], "rid": ["a", "b"]}, ["a", "b"], {}),
        (
            {"input_ids": [[1], [2]], "rid": "a", "sampling_params": {"n": 2}},
            ["a_0", "a_1", "a_2", "a_3"],
            {"a": ["a_0", "a_1", "a_2", "a_3"]},
        ),
        (
            {"input_ids": [[1], [2]], "rid": ["a", "b"], "sampling_params": {"n": 2}},
            ["a_0", "a_1", "b_0", "b_1"],
            {"a": ["a_0", "a_1"], "b": ["b_0", "b_1"]},
        ),
        (
            {"input_ids": [1], "rid": ["a"], "sampling_params": {"n": 2}},
            ["a_0", "a_1"],
            {"a": ["a_0", "a_1"]},
        ),
    ],
)
def test_rids(fields: dict[str, Any], rids: list[str], groups: dict[str, list[str]]) -> None:
    draft, made = drafted(fields)
    assert [output.rid for output in made] == draft.all_rids == rids
    assert draft.groups == groups


# ------------------------------------------------------------------------------------- seeds and parameters


def test_a_seed_gives_each_sample_its_own_within_64_bits() -> None:
    made = plan(input_ids=[1], sampling_params={"n": 3, "sampling_seed": 2**63 - 2})
    assert [output.seed for output in made] == [2**63 - 2, 2**63 - 1, -(2**63)]


def test_drawn_seeds_differ_and_repeat_with_the_random_seed() -> None:
    seeds = [output.seed for output in plan(input_ids=[1], sampling_params={"n": 50})]
    assert len(set(seeds)) == 50
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert seeds == [output.seed for output in plan(input_ids=[1], sampling_params={"n": 50})]


def test_without_return_logprob_none_is_computed() -> None:
    (output,) = plan(input_ids=[1], logprob_start_len=0, top_logprobs_num=5, token_ids_logprob=[1])
    assert (output.logprob_start, output.top_logprobs_num, output.token_ids_logprob) == (None, 0, ())
    assert plan(input_ids=[1], return_logprob=True, token_ids_logprob=[])[0].token_ids_logprob == ()


@pytest.mark.parametrize("name", ["routed_dp_rank", "data_parallel_rank"])
def test_only_replicas_that_exist_can_be_asked_for(name: str) -> None:
    assert plan(**{"input_ids": [1], name: 0})
    for rank in (1, -1):
        assert str(rank) in refusal(**{"input_ids": [1], name: rank})


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "a"},
        {"input_ids": [1], "sampling_params": {"stop": "x"}},
        {"input_ids": [1], "return_text_in_logprobs": True},
    ],
)
def test_what_needs_a_tokenizer_says_so_where_there_is_none(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestRejected, match="needs a tokenizer"):
        plan(fields, tokenizer=None)


def test_what_could_be_sampled_is_told_where_it_is_bounded() -> None:
    unbounded = {"input_ids": [1], "sampling_params": {"temperature": 1.0}}
    assert "expected top_k, top_p or min_p, or greedy" in refusal(**unbounded, return_sampling_mask=True)
    asked = {"custom_params": {"return_top_p_token_ids": True}}
    assert "return_top_p_token_ids: expected top_k" in refusal(input_ids=[1], sampling_params=asked)


def test_of_what_could_be_sampled_only_the_sampled_tokens_logprob_is_told() -> None:
    assert plan(input_ids=[1], sampling_logprobs_mode="selected")
    said = refusal(input_ids=[1], sampling_logprobs_mode="support")
    assert "at `$.sampling_logprobs_mode`; expected one of selected" in said


# These limits are of a model without experts.
@pytest.mark.parametrize("name", sorted({*UNSUPPORTED_FIELDS, "replay_routed_experts"}))
def test_features_that_are_missing_are_refused_only_when_asked_for(name: str) -> None:
    for empty in (None, False, "", [], {}, [None, []]):
        assert plan({"input_ids": [1], name: empty})
    for wanted in (True, "x", [1], 0, {"a": 1}):
        assert name in refusal(**{"input_ids": [1], name: wanted})


ROUTED = replace(LIMITS, records_routes=True, experts=ExpertSlots(2, 6, 3, (0, 1)))
ROWS = np.tile(np.arange(3, dtype=np.uint8), (4, 2, 1))


def packed(rows_TLK: NDArray[np.uint8]) -> dict[str, Any]:
    data = base64.b64encode(rows_TLK.tobytes()).decode()
    return {"data": data, "shape": list(rows_TLK.shape), "dtype": "uint8"}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (packed(ROWS[:, :1]), r"expected \[tokens, 2 layers, 3 experts\], got \[4, 1, 3\]"),
        (packed(ROWS + 4), "expected experts from 0 to 5, got 6"),
        (packed(ROWS // 2), "expected different experts of a token in a layer, got one twice"),
        (packed(np.concatenate([ROWS, ROWS])), "expected at most the 4 tokens of the prompt, got 8"),
        (packed(ROWS) | {"shape": [5, 5]}, "what is none of these: cannot reshape"),
        (packed(ROWS) | {"start": 3}, "what is none of these: its rows begin with the first token"),
        ("AAAA", "what is none of these: buffer size"),
        ("experts", "what is none of these: Incorrect padding"),
        ([0, 1, 2], "a list must have one entry per prompt"),
    ],
)
def test_experts_that_cannot_be_taken_are_refused(given: Any, problem: str) -> None:
    assert plan(input_ids=[1] * 4, replay_routed_experts=packed(ROWS), limits=ROUTED)
    with pytest.raises(RequestRejected, match=f"replay_routed_experts: .*{problem}"):
        plan(input_ids=[1] * 4, replay_routed_experts=given, limits=ROUTED)


def test_experts_are_told_from_a_token_of_the_prompt_on() -> None:
    asked = {"input_ids": [1] * 4, "return_routed_experts": True}
    assert plan({**asked, "routed_experts_start_len": 4}, limits=ROUTED)[0].routed_experts_start == 4
    with pytest.raises(RequestRejected, match="routed_experts_start_len: expected 0 to the 4 tokens"):
        plan({**asked, "routed_experts_start_len": 5}, limits=ROUTED)
    assert "return_routed_experts: expected a server with" in refusal(**asked)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_ids": [[1]] * 65537}, "input_ids: expected at most 65536 prompts, got 65537"),
        ({"input_ids": [1] * 64}, "the prompt has 64 tokens: it must be shorter than the context of 32"),
    ],
)
def test_what_is_too_much_by_its_length_is_refused_before_its_entries_are_looked_at(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestRejected, match=message):
        LIMITS.check_given("input_ids", fields["input_ids"])
    LIMITS.check_given("input_ids", fields["input_ids"][:24])
    LIMITS.check_given("input_ids", [1] * 64, kept=-1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_ids_logprob": [1] * ((1 << 18) + 1)}, "token_ids_logprob: expected at most 262144 entries"),
        ({"return_logprob": [True] * ((1 << 18) + 1)}, "return_logprob: expected at most 262144 entries"),
        (
            {"return_logprob": True, "token_ids_logprob": [1] * 5000, "sampling_params": {"n": 4000}},
            "have at most 16777216 ids and characters in these, each output its own; got 20000000",
        ),
        ({"sampling_params": {"n": 4000, "stop": ["a" * 4000, "b" * 1000]}}, "got 20000000"),
        ({"sampling_params": {"n": 4000}, "cache_salt": "a" * 4989}, "got 20000000"),
        ({"sampling_params": {"n": 4000}, "min_weight_version": "a" * 5000}, "got 20000000"),
        (
            {"sampling_params": {"n": 4000, "allowed_token_ids": [1] * 2500, "stop_token_ids": [1] * 2500}},
            "got 20000000",
        ),
    ],
)
def test_a_request_brings_no_more_ids_than_that(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRejected, match=message):
        plan(input_ids=[1], **fields)


def test_an_output_has_no_more_logprobs_than_a_message_holds() -> None:
    whole = {"return_logprob": True, "top_logprobs_num": 150_000}
    limits = replace(LIMITS, context_len=4096, max_total_num_tokens=4096, vocab_size=150_000)
    params = {"max_new_tokens": 440}
    assert plan(input_ids=[1] * 3000, sampling_params=params, limits=limits, **whole)
    for more in ({"logprob_start_len": 0}, {"sampling_params": {"max_new_tokens": 448}}):
        with pytest.raises(RequestRejected, match=r"150000 at each of up to .* tokens are too many"):
            plan(input_ids=[1] * 3000, limits=limits, **{"sampling_params": params, **whole, **more})


def test_structured_output_without_its_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(RequestRejected, match=r"sampling_params\.regex: .*ebbtide\[structured\]") as caught:
        plan(input_ids=[1], sampling_params={"regex": "a+"})
    assert caught.value.status == 501
