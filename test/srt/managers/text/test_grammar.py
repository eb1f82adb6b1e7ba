"""What outputs keep to, over a vocabulary of digits and signs: grammars, and sequences that are banned."""

from functools import partial

import numpy as np
import pytest

from ebbtide.demo.trainer import make_tokenizer
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.io_struct import TokenizedGenerateReqInput
from ebbtide.srt.managers.scheduling.request import Req
from ebbtide.srt.managers.text import grammar
from ebbtide.srt.managers.text.grammar import (
    BannedSequences,
    GrammarCompiler,
    GrammarMask,
    GrammarShelf,
    MaskFiller,
    TokenRules,
    Vocabulary,
)
from ebbtide.srt.managers.text.tokenizer import Tokenizer
from ebbtide.srt.managers.wire.generation import LoadGrammar
from ebbtide.srt.model_executor.batch_plan import SampleSpec
from ebbtide.srt.sampling_params import GrammarSpec, SamplingParams

TOKENIZER = Tokenizer(make_tokenizer())
VOCABULARY = Vocabulary(TOKENIZER, len(TOKENIZER.hf), TOKENIZER.eos_token_ids)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(VOCABULARY)


def test_what_no_token_can_begin_is_refused(compiler: GrammarCompiler) -> None:
    for params in ({"choice": ["yes", "no"]}, {"regex": "[a-f]+"}):
        [(kind, value)] = params.items()
        spec = SamplingParams.from_dict({kind: value}).grammar
        assert spec is not None
        with pytest.raises(RequestRejected, match=f"{kind}: no token of the model's vocabulary can begin it"):
            compiler.compile(spec)
    spec = SamplingParams.from_dict({"choice": ["yes", "7"]}).grammar
    assert spec is not None
    assert compiler.compile(spec)


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"regex": "(a"}, "regex: does not compile: .*parenthesis"),
        ({"json_schema": "{"}, "json_schema: does not compile"),
        ({"json_schema": {"type": 5}}, "json_schema: does not compile: Type should be a string"),
        ({"ebnf": 'root ::= "a" x'}, 'ebnf: does not compile: .*"x" is not defined'),
        ({"structural_tag": {"type": "structural_tag"}}, "structural_tag: does not compile"),
        ({"regex": "a" * (1 << 18) + "b"}, "regex: expected at most 262144 characters"),
        ({"ebnf": "root ::= a\na ::= root\n" * 1001}, "ebnf: expected at most 2000 rules, got 2002"),
        ({"json_schema": '{"not":' * 3000 + "{}" + "}" * 3000}, "json_schema: expected at most 200 levels"),
        ({"regex": "(" * 90_000 + "1" + ")" * 90_000}, "regex: does not compile: .*Nest layer"),
    ],
)
def test_what_is_no_grammar_is_refused(
    compiler: GrammarCompiler, params: dict[str, object], problem: str
) -> None:
    spec = SamplingParams.from_dict(params).grammar
    assert spec is not None
    with pytest.raises(RequestRejected, match=f"^sampling_params.{problem}"):
        compiler.compile(spec)


AMBIGUOUS = "root ::= [0-9] | root root | root root root"


def test_masks_that_take_too_long_are_told(compiler: GrammarCompiler) -> None:
    shelf = GrammarShelf(VOCABULARY)
    slow: list[str] = []
    words_2W = np.zeros((2, -(-VOCABULARY.size // 32)), dtype=np.int32)

    def mask(ebnf: str) -> GrammarMask:
        shelf.load(LoadGrammar(key=ebnf, compiled=compiler.compile(GrammarSpec("ebnf", ebnf))))
        return shelf.mask(ebnf, lambda: slow.append(ebnf))

    plain, ambiguous = mask("root ::= [0-9]+"), mask(AMBIGUOUS)
    for _ in range(2000):
        if slow:
            break
        plain.fill([ambiguous], words_2W)
        assert plain.accept(7)
        assert ambiguous.accept(7)
    assert slow == [AMBIGUOUS]
    with pytest.raises(RequestRejected, match=r"sampling_params\.ebnf: it is too ambiguous"):
        compiler.compile(GrammarSpec("ebnf", AMBIGUOUS), continued_ids=[7] * 2000)


def test_after_threads_have_taken_long_each_mask_is_timed_by_itself(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = GrammarSpec("regex", "[0-9]+[=]")
    shelf, filler = GrammarShelf(VOCABULARY), MaskFiller(2)
    slow: list[int] = []
    shelf.load(LoadGrammar(key="k", compiled=compiler.compile(spec)))
    masks = [shelf.mask("k", partial(slow.append, row)) for row in range(9)]
    monkeypatch.setattr(grammar, "FILL_S_PER_TOKEN", 1e-12)
    batch_9W, rows_9W = (np.zeros((9, 1), dtype=np.int32) for _ in range(2))
    filler.fill(masks, batch_9W)
    assert slow == []
    filler.fill(masks, rows_9W)
    assert slow == list(range(9))
    assert (batch_9W == rows_9W).all()


@pytest.mark.parametrize(
    ("continued", "ends", "refusal"),
    [
        ("", False, None),
        ("12", False, None),
        ("12+3", False, None),
        ("12+3", True, "nothing follows"),
        ("1+", True, "does not allow"),
        ("+", False, "does not allow"),
    ],
)
def test_what_is_continued_goes_on_where_it_stood_in_its_grammar(
    compiler: GrammarCompiler, continued: str, ends: bool, refusal: str | None
) -> None:
    params = SamplingParams.from_dict({"regex": r"\d+\+\d"})
    assert params.grammar is not None
    shelf = GrammarShelf(VOCABULARY)
    shelf.load(LoadGrammar(key="k", compiled=compiler.compile(params.grammar)))
    ids = TOKENIZER.encode(continued, add_special_tokens=False) + [min(TOKENIZER.eos_token_ids)] * ends
    whole, mask = (TokenRules(shelf.mask("k", lambda: None), None) for _ in range(2))
    spec = SampleSpec(params, 0, TOKENIZER.eos_token_ids, [1], [], mask=mask)
    given = TokenizedGenerateReqInput(
        rid="r", input_ids=[1], sampling_params=params, max_new_tokens=8, seed=0
    )
    req = Req(given, 0, spec, None)
    if refusal is not None:
        with pytest.raises(RequestRejected, match=refusal):
            req.pass_over(ids)
        return
    req.pass_over(ids)
    assert all(map(whole.accept, ids))
    words_2W = np.zeros((2, -(-VOCABULARY.size // 32)), dtype=np.int32)
    mask.fill([whole], words_2W)
    assert (words_2W[0] == words_2W[1]).all()
    assert words_2W.any()


def test_what_would_complete_a_banned_sequence_cannot_come_next(compiler: GrammarCompiler) -> None:
    params = SamplingParams.from_dict({"regex": r"\d+"})
    assert params.grammar is not None
    shelf = GrammarShelf(VOCABULARY)
    shelf.load(LoadGrammar(key="k", compiled=compiler.compile(params.grammar)))
    plain = TokenRules(None, BannedSequences([[3], [1, 31], [1, 2, 1, 2]]))
    others = [TokenRules(shelf.mask("k", lambda: None), None), TokenRules(None, BannedSequences([[5]]))]

    def forbidden() -> list[list[int]]:
        words_3W = np.zeros((3, 1), dtype=np.int32)
        plain.fill(others, words_3W)
        bits = np.unpackbits(words_3W.view(np.uint8), axis=1, bitorder="little")
        return [np.flatnonzero(row == 0).tolist() for row in bits]

    first, of_grammar, last = forbidden()
    assert (first, last) == ([3], [5])
    assert of_grammar
    for token_id, banned in ((1, [3, 31]), (2, [3]), (1, [2, 3, 31]), (9, [3])):
        assert plain.accept(token_id)
        assert forbidden() == [banned, of_grammar, last]
    assert not plain.accept(3)
    with pytest.raises(RequestRejected, match="bad_words: cannot be combined with regex"):
        SamplingParams.from_dict({"regex": "a", "bad_words": ["b"]})
