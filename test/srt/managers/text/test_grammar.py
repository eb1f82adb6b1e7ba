"""Grammars by themselves, over a vocabulary of digits and signs."""

import pytest

from ebbtide.demo.task import make_tokenizer
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.text.grammar import GrammarCompiler, Vocabulary
from ebbtide.srt.managers.text.tokenizer import Tokenizer
from ebbtide.srt.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = Tokenizer(make_tokenizer())
    return GrammarCompiler(Vocabulary(tokenizer, len(tokenizer.hf), tokenizer.eos_token_ids))


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
