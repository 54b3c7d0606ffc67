"""What the fields of a generation may be: bounds, and which go together. schema.py says which fields there are.

By hand, because a message should say what was sent. All raise BadRequest. None needs a tokenizer or the engine, but for
`check_token_ids`, which is told the vocabulary.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from service.constraint import constraint_of
from service.errors import BadRequest, quoted

if TYPE_CHECKING:
    from service.schema import Body, GenerationBody

MAX_PROMPTS = 1024
MAX_CHOICES = 64
MAX_BEAMS = 16
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024  # held back text is bounded by the longest stop
MAX_STOP_TOKEN_IDS = 128  # the engine compares every sampled token with them, each step
MAX_BIASES = 1024
MAX_BIAS = 100.0  # larger ones are taken as this
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 128
MAX_LENGTH_PENALTY = 10.0  # a length to this power is still a number
MAX_ID_CHARACTERS = 128
MAX_SALT_CHARACTERS = 128
MAX_PRIORITY = 1000
SEEDS = range(-(2**63), 2**63)

CACHE_SALT = re.compile(rf"[^@/\\\0]{{1,{MAX_SALT_CHARACTERS}}}")
REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_ID_CHARACTERS}}}")


def first_beside(body: "Body", neutral: Mapping[str, tuple[Any, ...]]) -> str | None:
    """The first of these fields that is neither null nor one of its neutral values."""
    for name, values in neutral.items():
        value = getattr(body, name)
        if value is not None and value not in values:
            return name
    return None


def check_range(name: str, value: float | None, low: float, high: float | None, words: str) -> None:
    """`value` is in low ... high, or null."""
    if value is not None and (value < low or (high is not None and value > high)):
        raise BadRequest(f"{name} must be {words}, got {quoted(value)}.", param=name)


def _check_share(name: str, value: float | None) -> None:
    if value is not None and not 0 < value <= 1:
        raise BadRequest(f"{name} must be in (0, 1], got {quoted(value)}.", param=name)


def check_lengths(body: "GenerationBody") -> None:
    """How long prompt and output may be, and how long it may take."""
    check_range("max_tokens", body.max_tokens, body.least_tokens, None, f"at least {body.least_tokens}")
    check_range("min_tokens", body.min_tokens, 0, None, "at least 0")
    if body.min_tokens is not None and body.asked_tokens is not None and body.min_tokens > body.asked_tokens:
        message = f"min_tokens must be at most max_tokens, {quoted(body.asked_tokens)}, got {quoted(body.min_tokens)}."
        raise BadRequest(message, param="min_tokens")
    if body.timeout_s is not None and body.timeout_s <= 0:
        raise BadRequest(f"timeout_s must be above 0, got {quoted(body.timeout_s)}.", param="timeout_s")
    cut = body.truncate_prompt_tokens
    if cut is not None and cut != -1 and cut < 1:
        message = f"truncate_prompt_tokens must be at least 1, or -1 for what fits, got {quoted(cut)}."
        raise BadRequest(message, param="truncate_prompt_tokens")
    if cut is None and body.truncation_side == "right":
        raise BadRequest("truncation_side needs truncate_prompt_tokens.", param="truncation_side")


def check_sampling(body: "GenerationBody") -> None:
    """How tokens are drawn."""
    check_range("temperature", body.temperature, 0, 2, "in [0, 2]")
    _check_share("top_p", body.top_p)
    check_range("top_k", body.top_k, -1, None, "at least -1 (0 and -1 are off)")
    check_range("min_p", body.min_p, 0, 1, "in [0, 1]")
    _check_share("typical_p", body.typical_p)
    check_range("presence_penalty", body.presence_penalty, -2, 2, "in [-2, 2]")
    check_range("frequency_penalty", body.frequency_penalty, -2, 2, "in [-2, 2]")
    if body.repetition_penalty is not None and body.repetition_penalty <= 0:
        message = f"repetition_penalty must be above 0, got {quoted(body.repetition_penalty)}."
        raise BadRequest(message, param="repetition_penalty")
    if body.seed is not None and body.seed not in SEEDS:
        raise BadRequest(f"seed must fit into 64 bits with its sign, got {quoted(body.seed)}.", param="seed")


def check_token_lists(body: "GenerationBody") -> None:
    """Counts and sizes; ids are compared with the vocabulary later."""
    if body.logit_bias is not None and len(body.logit_bias) > MAX_BIASES:
        message = f"logit_bias may have at most {MAX_BIASES} entries, got {len(body.logit_bias)}."
        raise BadRequest(message, param="logit_bias")
    if body.allowed_token_ids is not None and not body.allowed_token_ids:
        raise BadRequest("allowed_token_ids must not be empty: nothing could be sampled.", param="allowed_token_ids")
    words = body.bad_words or []
    if len(words) > MAX_BAD_WORDS:
        raise BadRequest(f"bad_words may have at most {MAX_BAD_WORDS} items, got {len(words)}.", param="bad_words")
    for i, word in enumerate(words):
        if not 1 <= len(word) <= MAX_BAD_WORD_CHARACTERS:
            message = f"a bad word must have 1 to {MAX_BAD_WORD_CHARACTERS} characters, got {len(word)}"
            raise BadRequest(f"{message} - at `$.bad_words[{i}]`", param="bad_words")


_BEAM_FIELDS: Mapping[str, tuple[Any, ...]] = {"beam_width": (), "length_penalty": (1.0,), "early_stopping": (False,)}
"""Fields that mean something with beam search only -> values that change nothing without it."""

_NOT_WITH_BEAMS: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,),
    "temperature": (0.0,),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "min_tokens": (0,),
    "seed": (),
    "prompt_logprobs": (),
}
"""Fields that beam search has no use for -> values that it can take, since they say what it does anyway."""


def check_beams(body: "GenerationBody") -> None:
    """Beam search, and what has no meaning with it or without."""
    if not body.use_beam_search:
        if name := first_beside(body, _BEAM_FIELDS):
            raise BadRequest(f"{name} needs use_beam_search: true.", param=name)
        return
    check_range("beam_width", body.beam_width, 2, MAX_BEAMS, f"2 to {MAX_BEAMS}")
    check_range(
        "length_penalty", body.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY,
        f"in [-{MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}]",
    )  # fmt: skip
    beams = MAX_BEAMS if body.beam_width is None else body.beam_width
    if body.choices_per_prompt > beams:
        message = f"n must be at most the number of beams, {beams}, got {body.choices_per_prompt}."
        raise BadRequest(message, param="n")
    if name := first_beside(body, _NOT_WITH_BEAMS):
        raise BadRequest(f"{name} cannot be used with use_beam_search.", param=name)
    if body.top_choices is not None:
        raise BadRequest("logprobs cannot be used with use_beam_search.", param="logprobs")


def check_constraint(body: "GenerationBody") -> None:
    """What the output must be: not with beam search."""
    asked = constraint_of(body.response_format, body.structured_outputs)
    if asked is not None and body.use_beam_search:
        raise BadRequest(f"{asked[1]} cannot be used with use_beam_search.", param=asked[1])


def check_stops(body: "GenerationBody") -> None:
    """Where it ends."""
    if len(body.stops) > MAX_STOPS:
        raise BadRequest(f"stop may have at most {MAX_STOPS} items, got {len(body.stops)}.", param="stop")
    for i, stop in enumerate(body.stops):
        path = "$.stop" if isinstance(body.stop, str) else f"$.stop[{i}]"
        if not stop:
            raise BadRequest(f"a stop string must not be empty - at `{path}`", param="stop")
        if len(stop) > MAX_STOP_CHARACTERS:
            message = f"a stop string may have at most {MAX_STOP_CHARACTERS} characters, got {len(stop)} - at `{path}`"
            raise BadRequest(message, param="stop")
    count = len(body.stop_token_ids or [])
    if count > MAX_STOP_TOKEN_IDS:
        message = f"stop_token_ids may have at most {MAX_STOP_TOKEN_IDS} items, got {count}."
        raise BadRequest(message, param="stop_token_ids")


def check_token_ids(ids: Sequence[int], vocabulary: int, *, param: str, path: str) -> None:
    """Raises BadRequest if an id is not in 0 ... vocabulary - 1. `path` names the list, as `$.prompt[2]`."""
    if not ids or (min(ids) >= 0 and max(ids) < vocabulary):
        return
    at = next(i for i, token in enumerate(ids) if not 0 <= token < vocabulary)
    message = f"token ids must be in 0 ... {vocabulary - 1}, got {quoted(ids[at])} - at `{path}[{at}]`"
    raise BadRequest(message, param=param)


def check_request_id(request_id: str) -> None:
    """An id goes into a header, a log line and the answer's `id`. Raises BadRequest."""
    if not REQUEST_ID.fullmatch(request_id):
        message = f"request_id must be 1 to {MAX_ID_CHARACTERS} visible ASCII characters."
        raise BadRequest(message, param="request_id")
