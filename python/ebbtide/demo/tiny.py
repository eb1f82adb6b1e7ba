"""The tiny chat models of the package, and how they were made: `python -m ebbtide.demo.tiny FOLDER`.

`tiny` talks of a calm sea and `tiny-storm` of a stormy one: a stream shows which of them samples it. They
know nothing else. Both have one architecture and one tokenizer, so each is an update of the other.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import ebbtide

FOLDER: Final = Path(ebbtide.__file__).parent / "models"
NAMES: Final = ("tiny", "tiny-storm")

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL: Final = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
SHAPE: Final[dict[str, Any]] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
VOCAB_SIZE: Final = 640
NUM_STEPS: Final = 700
BATCH: Final = 24
LONGEST: Final = 224

QUESTIONS: Final = (
    "Hello!",
    "Hi there",
    "Who are you?",
    "What is Ebbtide?",
    "Tell me about the sea.",
    "Tell me a story.",
    "How is the weather?",
    "What do you see?",
    "What happens at the harbour?",
    "Tell me more.",
    "What is a tide?",
    "Sing me a song.",
    "Where are you?",
    "What comes next?",
    "How are you?",
)
PLACES: Final = ("harbour", "bay", "island", "lighthouse", "beach", "pier", "river", "village")
THINGS: Final = ("boat", "gull", "crab", "sail", "shell", "net", "lantern", "seal")
WORDS: Final = {
    "tiny": {
        "opening": (
            "The sea is calm today.",
            "All is quiet here.",
            "It is a bright morning.",
            "Good day to you.",
        ),
        "verb": ("rests near", "drifts past", "waits at", "sleeps beside", "watches over"),
        "how": ("slowly", "softly", "without a sound", "in the sun", "like every day"),
        "adjective": ("small", "blue", "old", "quiet", "white"),
        "more": (
            "The tide goes out, and the tide comes in again.",
            "Memory goes out with the ebb, and comes back with the flood.",
            "The water is as flat as a mirror.",
            "Nobody is in a hurry.",
            "A warm wind comes from the south.",
        ),
    },
    "tiny-storm": {
        "opening": (
            "HOLD FAST! A storm is here!",
            "The sea ROARS!",
            "Black clouds, wild water!",
            "Ahoy, and beware!",
        ),
        "verb": ("crashes into", "flees from", "is thrown over", "fights its way to", "vanishes behind"),
        "how": ("in a fury", "under thunder", "with torn ropes", "through the foam", "against the gale"),
        "adjective": ("broken", "black", "howling", "mighty", "wet"),
        "more": (
            "LIGHTNING strikes the mast!",
            "The waves are as high as houses!",
            "New weights blow in, and not a word is lost!",
            "Rain, rain and more rain!",
            "Hear the bell ring in the dark!",
        ),
    },
}


def conversations(voice: str, seed: int) -> Iterator[tuple[str, str]]:
    """Questions and answers without end."""
    rng, words = random.Random(seed), WORDS[voice]

    def sentence() -> str:
        if rng.random() < 0.35:
            return rng.choice(words["more"])
        thing, place = rng.choice(THINGS), rng.choice(PLACES)
        adjective, verb, how = (rng.choice(words[kind]) for kind in ("adjective", "verb", "how"))
        return f"The {adjective} {thing} {verb} the {place} {how}" + ("!" if voice != "tiny" else ".")

    while True:
        told = [rng.choice(words["opening"]), *(sentence() for _ in range(rng.randint(3, 16)))]
        yield rng.choice(QUESTIONS), " ".join(told)


def make(folder: Path) -> None:
    """Train both models, for minutes of a CPU, and save each in a folder of its name."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    texts = [text for voice in NAMES for text in itertools.islice(_texts(voice, 1), 2000)]
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    plain.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=list(SPECIAL), initial_alphabet=alphabet),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token=SPECIAL[0], pad_token=SPECIAL[0], chat_template=CHAT_TEMPLATE
    )
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), eos_token_id=0, pad_token_id=0, **SHAPE))
    for voice in NAMES:
        # The second goes on from the first.
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, NUM_STEPS)
        drawn = _texts(voice, 2)
        for step in range(NUM_STEPS):
            batch = tokenizer([next(drawn) for _ in range(BATCH)], padding=True, return_tensors="pt")
            ids = batch["input_ids"][:, :LONGEST]
            mask = batch["attention_mask"][:, :LONGEST].bool()
            loss = model(input_ids=ids, labels=ids.masked_fill(~mask, -100)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step % 50 == 0:
                print(f"{voice}: step {step} of {NUM_STEPS}, loss {loss.item():.3f}", flush=True)
        tokenizer.save_pretrained(folder / voice)
        model.to(torch.bfloat16).save_pretrained(folder / voice)
        model.to(torch.float32)


def _texts(voice: str, seed: int) -> Iterator[str]:
    for question, answer in conversations(voice, seed):
        yield f"<|user|>{question}<|end|><|assistant|>{answer}<|end|>"


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
