"""The task of the demo: what is asked, what is right, and how it is spelt."""

import pytest
from transformers import AutoTokenizer

from ebbtide.demo.trainer import (
    EOS,
    EOS_ID,
    MAX_ANSWER_TOKENS,
    PAD_ID,
    Problem,
    ProblemSet,
    encode,
    make_tokenizer,
)


@pytest.mark.parametrize(("left", "right", "answer"), [(37, 58, "59"), (99, 99, "891"), (10, 10, "02")])
def test_answers_have_the_ones_digit_first(left, right, answer):
    problem = Problem(left, right)
    assert problem.question == f"{left}+{right}="
    assert problem.answer == answer
    assert len(encode(problem.answer)) < MAX_ANSWER_TOKENS


def test_held_out_problems_are_never_drawn():
    problems = ProblemSet(seed=0)
    drawn = [problem for _ in range(100) for problem in problems.draw(256)]
    assert not set(drawn) & set(problems.held_out)
    assert len(set(drawn) | set(problems.held_out)) > 7500


def test_saved_tokenizer_spells_as_encode_does(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "37+58=590123456789"
    assert tokenizer(text)["input_ids"] == encode(text)
    assert tokenizer.decode(encode(text)) == text
    assert tokenizer.decode([*encode("59"), EOS_ID, PAD_ID], skip_special_tokens=True) == "59"
    assert tokenizer.eos_token == EOS
    assert tokenizer.eos_token_id == EOS_ID
