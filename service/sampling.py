"""What a body asks of the engine, as the engine wants it: sampling parameters, seeds, beam search.

Everything that needs the vocabulary is checked here: ids, and whether a token is left that may be sampled at all. What
each parameter does, and in which order, is in docs/sampling.md.
"""

import hashlib
import random
import re
from typing import TypeVar

import msgspec

from model.step_plan import MAX_LOGPROBS, SamplingParameters
from service.engine_client import BeamSearch
from service.errors import BadRequest, quoted
from service.field_checks import MAX_BIAS, check_token_ids
from service.schema import GenerationBody
from service.tokenization import Tokenizer

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: logits further apart than 0.001 would differ by a factor of e**100 anyway."""

TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,18}")

_seeds = random.Random()

T = TypeVar("T")


def sampling_parameters(
    body: GenerationBody, defaults: SamplingParameters, tokenizer: Tokenizer, vocabulary: int, end_ids: list[int]
) -> SamplingParameters:
    """What the client asked, and the model's defaults for the rest. `end_ids`: any of these ends a Sequence.

    Raises BadRequest.
    """
    logprobs = -1 if body.top_choices is None else body.top_choices
    if body.use_beam_search:  # the likeliest sequences of the model as it is
        return SamplingParameters(temperature=0.0, logprobs=logprobs)
    temperature = _given(body.temperature, defaults.temperature)
    top_k = _given(body.top_k, defaults.top_k)
    min_tokens = _given(body.min_tokens, 0)
    parameters = SamplingParameters(
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_k=top_k if 0 < top_k < vocabulary else 0,
        top_p=_given(body.top_p, defaults.top_p),
        min_p=_given(body.min_p, defaults.min_p),
        typical_p=_given(body.typical_p, defaults.typical_p),
        repetition_penalty=_given(body.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_given(body.presence_penalty, defaults.presence_penalty),
        frequency_penalty=_given(body.frequency_penalty, defaults.frequency_penalty),
        logit_bias=_biases(body.logit_bias or {}, vocabulary),
        allowed_token_ids=_allowed(body.allowed_token_ids or [], vocabulary),
        bad_words=tokenizer.spellings(body.bad_words, param="bad_words") if body.bad_words else [],
        min_tokens=min_tokens,
        barred_ids=end_ids if min_tokens else [],
        logprobs=logprobs,
    )
    _check_something_is_left(parameters, vocabulary)
    return parameters


def forked_parameters(
    body: GenerationBody, parent: SamplingParameters, tokenizer: Tokenizer, vocabulary: int, end_ids: list[int]
) -> SamplingParameters:
    """Those of a fork: what the body says, and the parent's for the rest, but its least length. Raises BadRequest."""
    parameters = sampling_parameters(body, parent, tokenizer, vocabulary, end_ids)
    parameters = msgspec.structs.replace(
        parameters,
        logit_bias=parent.logit_bias if body.logit_bias is None else parameters.logit_bias,
        allowed_token_ids=parent.allowed_token_ids if body.allowed_token_ids is None else parameters.allowed_token_ids,
        bad_words=parent.bad_words if body.bad_words is None else parameters.bad_words,
    )
    _check_something_is_left(parameters, vocabulary)
    return parameters


def check_parameters(parameters: SamplingParameters, vocabulary: int) -> bool:
    """Whether parameters that were not made here, but read from a file, are such as a request could have had."""
    p = parameters
    ids = (*p.logit_bias, *p.allowed_token_ids, *p.barred_ids, *(token for word in p.bad_words for token in word))
    are_in_range = (
        0 <= p.temperature <= 2
        and 0 <= p.top_k < vocabulary
        and 0 < p.top_p <= 1
        and 0 <= p.min_p <= 1
        and 0 < p.typical_p <= 1
        and p.repetition_penalty > 0
        and abs(p.presence_penalty) <= 2
        and abs(p.frequency_penalty) <= 2
        and p.min_tokens >= 0
        and -1 <= p.logprobs <= MAX_LOGPROBS
        and 0 <= p.seed < 2**64
        and all(abs(bias) <= MAX_BIAS for bias in p.logit_bias.values())
        and all(p.bad_words)
    )
    return are_in_range and all(0 <= token < vocabulary for token in ids)


def with_seed(parameters: SamplingParameters, seed: int | None) -> SamplingParameters:
    """The same with the client's seed (64 bits, any sign), or with a fresh one."""
    return msgspec.structs.replace(parameters, seed=_seeds.getrandbits(64) if seed is None else seed % 2**64)


def sibling_seed(seed: int, choice: int) -> int:
    """The seed of a prompt's choice number `choice`; number 0 draws with `seed` (0 ... 2**64 - 1) itself.

    The first 8 bytes, little-endian, of SHA-256 over the seed (8 bytes) and the number (4 bytes), both little-endian:
    choices of the same or of neighbouring seeds share nothing, and anybody can compute it.
    """
    if choice == 0:
        return seed
    digest = hashlib.sha256(seed.to_bytes(8, "little") + choice.to_bytes(4, "little")).digest()
    return int.from_bytes(digest[:8], "little")


def beam_search(body: GenerationBody) -> BeamSearch | None:
    """The search that the client asked for, if it did."""
    if body.beams is None:
        return None
    return BeamSearch(
        width=body.beams,
        length_penalty=_given(body.length_penalty, 1.0),
        early_stopping=_given(body.early_stopping, False),
    )


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _biases(given: dict[str, float], vocabulary: int) -> dict[int, float]:
    biases = {}
    for name, bias in given.items():
        if not TOKEN_ID.fullmatch(name) or int(name) >= vocabulary:
            message = f"the keys of logit_bias must be token ids, 0 ... {vocabulary - 1}, got {quoted(name, 32)}."
            raise BadRequest(message, param="logit_bias")
        biases[int(name)] = min(max(bias, -MAX_BIAS), MAX_BIAS)
    return biases


def _allowed(ids: list[int], vocabulary: int) -> list[int]:
    if len(ids) > vocabulary:
        message = f"allowed_token_ids may have at most {vocabulary} items, got {len(ids)}."
        raise BadRequest(message, param="allowed_token_ids")
    check_token_ids(ids, vocabulary, param="allowed_token_ids", path="$.allowed_token_ids")
    return sorted(set(ids))


def _check_something_is_left(parameters: SamplingParameters, vocabulary: int) -> None:
    """Raises BadRequest if there could be a step in which every token is barred.

    For bad words of several tokens that depends on the tokens before, so their last tokens count as barred.
    """
    allowed = set(parameters.allowed_token_ids)
    if not allowed and len(parameters.bad_words) + len(parameters.barred_ids) < vocabulary:
        return
    left = allowed or set(range(vocabulary))
    barred = set(parameters.barred_ids)
    if left <= barred:
        field = "allowed_token_ids" if allowed else "min_tokens"
        raise BadRequest("min_tokens bars every token that may be sampled: all of them end the text.", param=field)
    if left <= barred | {word[-1] for word in parameters.bad_words}:
        message = "bad_words could bar every token that may be sampled: each of them ends a bad word"
        raise BadRequest(message + (" or the text." if barred else "."), param="bad_words")
