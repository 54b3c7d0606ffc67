"""The search alone: tokens and scores are those of transformers' `generate`, whatever the parameters."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from service.beam_search import Hypothesis, Search
from service.engine_client import BeamSearch

VOCABULARY = 41
END = (14, 20)  # tokens that this model likes

Model = Callable[[list[list[int]]], np.ndarray]


@pytest.fixture(scope="module")
def llama() -> transformers.LlamaForCausalLM:
    """Random weights, large enough that some tokens are far likelier than others."""
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.7,
    )
    return transformers.LlamaForCausalLM(config).eval()


def search(
    model: transformers.LlamaForCausalLM, prompt: list[int], options: BeamSearch, most: int, ends: Any
) -> Search:
    """Run a Search to its end; the model computes every beam from the start."""
    found = Search(options, most, list(ends))
    beams = [list(prompt)]
    while not found.is_over:
        with torch.inference_mode():
            scores = model(torch.tensor(beams)).logits[:, -1].float().log_softmax(-1)
        best = scores.topk(min(found.candidates, scores.shape[1]))
        step = found.advance(best.indices.numpy().astype(np.int32), best.values.numpy())
        beams = [[*beams[parent], token] for parent, token in zip(step.parents, step.tokens, strict=True)]
    return found


def generated(
    model: transformers.LlamaForCausalLM, prompt: list[int], options: BeamSearch, most: int, ends: Any
) -> list[Hypothesis]:
    """The same by transformers."""
    made = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=most,
        num_beams=options.width,
        num_return_sequences=options.width,
        length_penalty=options.length_penalty,
        early_stopping=options.early_stopping,
        do_sample=False,
        eos_token_id=list(ends) or None,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    results = []
    for row, indices, score in zip(made.sequences, made.beam_indices, made.sequences_scores, strict=True):
        length = int((indices >= 0).sum())
        tokens = row[len(prompt) : len(prompt) + length].tolist()
        results.append(Hypothesis(tokens, float(score), bool(tokens) and tokens[-1] in ends))
    return results


def check_equal(ours: list[Hypothesis], theirs: list[Hypothesis]) -> None:
    assert [one.tokens for one in ours] == [one.tokens for one in theirs]
    assert [one.is_ended for one in ours] == [one.is_ended for one in theirs]
    assert [one.score for one in ours] == pytest.approx([one.score for one in theirs], abs=1e-4)


@pytest.mark.parametrize(
    "ends", [(), END[:1], END, (10, 14, 20, 22)], ids=["no end", "one end", "two ends", "four ends"]
)
@pytest.mark.parametrize("width", [2, 4, 8])
def test_tokens_and_scores_equal_transformers(
    llama: transformers.LlamaForCausalLM, width: int, ends: tuple[int, ...]
) -> None:
    ended = 0
    for number, (penalty, early, most) in enumerate(
        itertools.product((0.0, 1.0, 2.0, -1.0), (False, True, "never"), (1, 12))
    ):
        prompt = ([7, 8, 9], [30, 2], [5])[number % 3]
        options = BeamSearch(width, penalty, early)  # type: ignore[arg-type]
        ours = search(llama, prompt, options, most, ends).best(width)
        check_equal(ours, generated(llama, prompt, options, most, ends))
        ended += sum(one.is_ended for one in ours)
    assert bool(ends) == (ended > 0)


def test_it_ends_within_its_limit_and_the_best_comes_first(llama: transformers.LlamaForCausalLM) -> None:
    """C17 (c)."""
    found = search(llama, [1, 2, 3], BeamSearch(4), 10, END)
    results = found.best(4)
    assert max(len(one.tokens) for one in results) <= 10
    assert [one.score for one in results] == sorted((one.score for one in results), reverse=True)


def step(found: Search, *lines: list[float]) -> Any:
    """Advance by log-probabilities for each token id, one line for each beam."""
    values = np.array(lines, np.float32)
    order = np.argsort(-values, axis=1, kind="stable")[:, : found.candidates]
    return found.advance(order.astype(np.int32), np.take_along_axis(values, order, axis=1))


def test_a_parent_may_have_several_children_and_another_none() -> None:
    found = Search(BeamSearch(2), 5, [])
    assert step(found, [-1.0, -2.0, -9.0]).tokens == [0, 1]
    following = step(found, [-1.0, -1.5, -9.0], [-1.6, -9.0, -9.0])
    assert (following.parents, following.tokens) == ([0, 0], [0, 1])


def test_equal_scores_go_to_the_better_beam_and_the_lower_id() -> None:
    found = Search(BeamSearch(2), 5, [])
    assert step(found, [-1.0, -1.0, -1.0]).tokens == [0, 1]
    following = step(found, [-1.0, -1.0, -9.0], [-1.0, -1.0, -9.0])
    assert (following.parents, following.tokens) == ([0, 0], [0, 1])


def test_a_vocabulary_smaller_than_the_width_gives_fewer_beams_at_first() -> None:
    found = Search(BeamSearch(4), 2, [])
    assert len(step(found, [-1.0, -2.0]).parents) == 2
    step(found, [-1.0, -2.0], [-1.0, -2.0])
    assert found.is_over
    assert [one.tokens for one in found.best(4)] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    only = Search(BeamSearch(4), 1, [])
    step(only, [-1.0, -2.0])
    assert len(only.best(4)) == 2


def test_tokens_that_cannot_come_are_no_candidates() -> None:
    found = Search(BeamSearch(2), 5, [])
    assert step(found, [-0.1, -np.inf, -np.inf]).tokens == [0]
    assert step(found, [-np.inf, -np.inf, -np.inf]).tokens == []
    assert found.is_over
    assert found.best(2) == []


def test_the_best_so_far_are_finished_ones_and_beams_as_they_are() -> None:
    found = Search(BeamSearch(2, length_penalty=0.0), 9, [0])
    assert found.best(2) == []
    step(found, [-1.0, -0.5, -3.0])
    assert [(one.tokens, one.is_ended) for one in found.best(3)] == [([1], False), ([0], True), ([2], False)]


def test_candidates_are_enough_for_every_end_and_never_more_than_a_step_reports() -> None:
    assert Search(BeamSearch(4), 9, [1]).candidates == 8
    assert Search(BeamSearch(2), 9, [1, 2, 3, 4, 5]).candidates == 7
    assert Search(BeamSearch(16), 9, list(range(40))).candidates == 32
