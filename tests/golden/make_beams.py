"""Makes beams.json: beam searches by transformers' `generate` on prompts of golden.json, in float32.

    python tests/golden/make_beams.py            (takes about two minutes on two cores)

A search turns on candidates whose scores lie close together far more often than greedy decoding does. Only searches are
stored in which what is kept and what is not are at least GAP apart at every step, and the results too.
"""

import itertools
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers

from model.source import resolve
from service.beam_search import Search
from service.engine_client import BeamSearch

TARGET = Path(__file__).with_name("beams.json")
GAP = 2e-4  # rounding in float32 adds up to a tenth of that
END_IDS = [2, 28, 30, 42]  # <|im_end|>, and what many sentences have: a comma, a full stop, a colon
TOKENS = [1, 8]


def smallest_gap(model: transformers.PreTrainedModel, prompt: list[int], options: BeamSearch, most: int) -> float:
    """Between the last that is kept and the first that is not, over all steps; and between results."""
    search, gap = Search(options, most, END_IDS), np.inf
    beams, scores = [list(prompt)], np.zeros(1, np.float32)
    while not search.is_over and gap >= GAP:
        with torch.inference_mode():
            lines = model(torch.tensor(beams)).logits[:, -1].float().log_softmax(-1)
        best = lines.topk(search.candidates)
        totals = (scores[:, None] + best.values.numpy()).reshape(-1)
        order = np.argsort(-totals, kind="stable")
        goes_on = order[~np.isin(best.indices.numpy().reshape(-1)[order], END_IDS)]
        for some in (order, goes_on):
            gap = min(gap, float(totals[some[options.width - 1]] - totals[some[options.width]]))
        scores = totals[goes_on[: options.width]]
        step = search.advance(best.indices.numpy().astype(np.int32), best.values.numpy())
        beams = [[*beams[parent], token] for parent, token in zip(step.parents, step.tokens, strict=True)]
    if gap < GAP:
        return gap
    results = [one.score for one in search.best(options.width)]
    return min(gap, *(before - after for before, after in itertools.pairwise(results)))


def generate(
    model: transformers.PreTrainedModel, prompt: list[int], options: BeamSearch, most: int
) -> list[dict[str, Any]]:
    made = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=most,
        num_beams=options.width,
        num_return_sequences=options.width,
        length_penalty=options.length_penalty,
        early_stopping=options.early_stopping,
        do_sample=False,
        eos_token_id=END_IDS,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    lengths = (made.beam_indices >= 0).sum(-1).tolist()
    return [
        {"tokens": row[len(prompt) : len(prompt) + length].tolist(), "score": round(score, 6)}
        for row, length, score in zip(made.sequences, lengths, made.sequences_scores.tolist(), strict=True)
    ]


def main() -> None:
    folder = resolve("smollm2", report=print).folder
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    golden = json.loads(TARGET.with_name("golden.json").read_text(encoding="utf-8"))["entries"]
    prompts = [entry["prompt"] for entry in golden if 4 <= len(entry["prompt"]) <= 55]
    entries = []
    ways: tuple[bool | Literal["never"], ...] = (False, True, "never")
    for number, (width, penalty) in enumerate(itertools.product((2, 4, 8), (0.0, 1.0, 2.0, -1.0))):
        early = ways[(number + number // 4) % 3]  # each way with each width, and with each penalty
        most = TOKENS[number != 5]
        options = BeamSearch(width, penalty, early)
        clear = (prompts[(number + i) % len(prompts)] for i in range(len(prompts)))
        prompt = next(prompt for prompt in clear if smallest_gap(model, prompt, options, most) >= GAP)
        facts = {"width": width, "length_penalty": penalty, "early_stopping": early}
        results = generate(model, prompt, options, most)
        entries.append({"prompt": prompt, "max_tokens": most, **facts, "results": results})
    versions = {name: version(name) for name in ("torch", "transformers")}
    content = {"model": folder.name, "versions": versions, "end_ids": END_IDS, "entries": entries}
    TARGET.write_text(
        json.dumps(content, separators=(",", ":")).replace('{"prompt"', '\n{"prompt"') + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
