"""Makes golden.json: 24 prompts of 1 to 1,500 tokens and what transformers' `generate` answers, greedy, in float32.

    python tests/golden/make_golden.py            (takes about three minutes on two cores)

The model is SmolLM2-135M-Instruct as `model.source` converts it, so both sides compute with the same weights. Stored
per output position: the token and the gap between the two largest logits. Where the gap is under 1e-3 another order of
additions may rightly choose otherwise (near ties, DESIGN): `conftest.Golden.check` knows that.
"""

import json
import random
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer

from model.source import resolve

TARGET = Path(__file__).with_name("golden.json")

CHATS = [
    "What is the capital of France?",
    "Write a haiku about a paging file.",
    "Give me three uses for an old brick, as a numbered list.",
    "Explain in two sentences why the sky is blue.",
    "Translate 'good morning' into Spanish, German and Italian.",
    "A train leaves at 9:40 and arrives at 12:05. How long does it take?",
    "Continue: 1, 1, 2, 3, 5, 8,",
    "¿Cuál es la diferencia entre una página y un marco? 🙂",
]
TEXTS = [
    "The",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n: int) -> int:\n    ",
    "0123456789 " * 4,
    '{"name": "page", "frames": [1, 2, 3],',
    "To be or not to be, that is",
]
SUBJECTS = ["The librarian", "A young engineer", "The old clock", "My neighbour", "The river", "Nobody in the town"]
VERBS = ["found", "counted", "repaired", "forgot", "painted", "measured", "returned"]
OBJECTS = ["seven blue doors", "the map of the harbour", "a box of letters", "every page", "the broken bridge"]
LENGTHS = [16, 31, 64, 129, 250, 400, 512, 777, 1000, 1500]
"""Tokens of the long prompts: page edges, chunk edges, and one past each."""


def story(seed: int, tokens: int, tokenizer: Tokenizer) -> list[int]:
    draw = random.Random(seed)
    words = ""
    while True:
        ids = tokenizer.encode(words).ids
        if len(ids) >= tokens:
            return ids[:tokens]
        for _ in range(1 + tokens // 16):
            words += (
                f"{draw.choice(SUBJECTS)} {draw.choice(VERBS)} {draw.choice(OBJECTS)} on day {draw.randrange(99)}. "
            )


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    chats = [f"{system}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in CHATS]
    found = [tokenizer.encode(text).ids for text in chats + TEXTS]
    return found + [story(seed, tokens, tokenizer) for seed, tokens in enumerate(LENGTHS)]


def main() -> None:
    folder = resolve("smollm2", report=print).folder
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # fixed lengths: what follows an end token is computed too
    entries = []
    for ids in prompts(tokenizer):
        wanted = 32 if len(ids) <= 512 else 12
        made = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=wanted,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack([step[0].topk(2).values for step in made.logits])
        gaps = [round(gap, 6) for gap in (best[:, 0] - best[:, 1]).tolist()]
        tokens = made.sequences[0, len(ids) :].tolist()
        entries.append({"prompt": ids, "tokens": tokens, "gaps": gaps})
    versions = {name: version(name) for name in ("torch", "transformers")}
    content = {"model": folder.name, "dtype": "float32", "versions": versions, "entries": entries}
    TARGET.write_text(
        json.dumps(content, separators=(",", ":")).replace('{"prompt"', '\n{"prompt"') + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
