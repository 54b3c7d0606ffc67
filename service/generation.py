"""From a checked body to running Sequences: prompt ids, the length rules, sampling parameters, and the open choices.

Length rules, the same on both routes (M = max_model_len, W = the smaller of M and what the whole KV pool holds):
  1. prompt + max_tokens > M, or a prompt of M tokens or more: refused.
  2. prompt + max_tokens > W: refused; such a request could not run alone on an empty server.
  3. max_tokens absent: chat takes W - prompt, completions at most 16 tokens of it.
A text so long that it must break rule 1 is refused before it is tokenized.
"""

import random
import time
from functools import partial
from typing import Any

from model.step_plan import SamplingParameters
from service.choice import Choice, Delta
from service.engine_client import DEFAULT_TENANT, EndReason, Limits, Submit
from service.errors import BadRequest, EngineDead
from service.schema import ChatBody, CompletionBody, GenerationBody, TokenizeBody, check_token_ids, template_messages
from service.served_model import ServedModel
from service.token_stream import Inbox, TokenStream
from service.tokenization import StopMatcher

COMPLETION_DEFAULT_TOKENS = 16
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: logits further apart than 0.001 would differ by a factor of e**100 anyway."""

CHARACTERS_PER_TOKEN = 128
"""The longest tokens of common vocabularies are runs of 128 spaces: no text has fewer tokens than length / 128."""

_seeds = random.Random()


# ---------------------------------------------------------------- prompts


async def completion_prompts(body: CompletionBody, model: ServedModel) -> list[list[int]]:
    """Token ids of every prompt. Raises BadRequest."""
    limits = model.client.limits
    prompts: list[list[int]] = []
    for path, prompt in body.prompts():
        if isinstance(prompt, str):
            check_text_length(len(prompt), limits)
            ids = await model.tokenizer.encode_async(prompt, add_special_tokens=body.add_special_tokens is not False)
            if not ids:
                raise BadRequest(f"prompt must not be empty: this text has no tokens - at `{path}`", param="prompt")
        else:
            check_token_ids(prompt, limits.vocabulary, param="prompt", path=path)
            ids = prompt
        prompts.append(ids)
    return prompts


async def chat_prompt(body: ChatBody | TokenizeBody, model: ServedModel) -> list[int]:
    """Token ids that the model's template makes of the messages. Raises BadRequest."""
    limits = model.client.limits
    if len(body.messages or ()) > limits.max_model_len:
        raise BadRequest(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, you requested "
            f"{len(body.messages or ())} messages, which cannot fit. Please leave some out.",
            param="max_tokens",
        )
    messages = template_messages(body)
    check_text_length(sum(len(message["content"]) for message in messages), limits)
    ids = await model.tokenizer.render_chat_async(
        messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        kwargs=body.chat_template_kwargs,
    )
    if not ids:
        raise BadRequest("the chat template made no tokens of these messages.", param="messages")
    return ids


def check_text_length(characters: int, limits: Limits) -> None:
    """Refuse a text that no tokenizer could fit into the context, before work in proportion to it is done."""
    if characters > CHARACTERS_PER_TOKEN * limits.max_model_len:
        raise BadRequest(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, you requested a prompt of "
            f"{characters} characters, which cannot fit. Please shorten it.",
            param="max_tokens",
        )


def output_tokens(prompt_tokens: int, asked: int | None, limits: Limits, *, default: int | None) -> int:
    """How many tokens the output may have, at least 1. `default`: at most this when nothing was asked; None: the rest.

    Raises BadRequest by the length rules above; the message has the true numbers.
    """
    limits.check_fits(prompt_tokens, 1 if asked is None else asked, DEFAULT_TENANT)
    if asked is not None:
        return asked
    rest = limits.request_tokens(DEFAULT_TENANT) - prompt_tokens
    return rest if default is None else min(default, rest)


# ---------------------------------------------------------------- sampling


def sampling_parameters(body: GenerationBody, defaults: SamplingParameters, vocabulary: int) -> SamplingParameters:
    """What the client asked, the model's defaults for the rest, and a fresh seed if none was given."""
    temperature = defaults.temperature if body.temperature is None else body.temperature
    top_k = defaults.top_k if body.top_k is None else body.top_k
    seed = _seeds.getrandbits(64) if body.seed is None else body.seed % 2**64
    return SamplingParameters(
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_k=top_k if 0 < top_k < vocabulary else 0,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        seed=seed,
    )


# ---------------------------------------------------------------- running


class Generation:
    """The running Sequences of one request. Close it whatever happens: that cancels what has not ended."""

    def __init__(
        self,
        body: GenerationBody,
        prompts: list[list[int]],
        model: ServedModel,
        *,
        request_id: str,
        default_tokens: int | None,
    ) -> None:
        """Submit one Sequence per prompt, or none. Raises BadRequest, QueueFull, Loading, Draining or EngineDead."""
        limits = model.client.limits
        check_token_ids(body.stop_token_ids or [], limits.vocabulary, param="stop_token_ids", path="$.stop_token_ids")
        budgets = [output_tokens(len(ids), body.asked_tokens, limits, default=default_tokens) for ids in prompts]
        sampling = sampling_parameters(body, model.defaults, limits.vocabulary)
        model.client.check_admission(len(prompts))
        self.inbox = Inbox()
        self.choices: list[Choice] = []
        self._submitted_s = time.monotonic()
        self._first_token_s: float | None = None
        self._is_lost = False  # the engine has died under it
        self._by_stream: dict[TokenStream, Choice] = {}
        try:
            for ids, max_tokens in zip(prompts, budgets, strict=True):
                self._submit(body, ids, max_tokens, sampling, model, request_id)
        except BaseException:
            self.close()
            raise

    def _submit(
        self,
        body: GenerationBody,
        prompt_ids: list[int],
        max_tokens: int,
        sampling: SamplingParameters,
        model: ServedModel,
        request_id: str,
    ) -> None:
        sequence_id = model.client.next_sequence_id()
        stream = TokenStream(partial(model.client.cancel, sequence_id), self.inbox)
        # an end token is reported as null even if the client named it too
        own_ends = () if body.ignore_eos else model.end_ids
        client_ends = frozenset(body.stop_token_ids or ()).difference(own_ends)
        include_stop = bool(body.include_stop_str_in_output)
        choice = Choice(
            index=len(self.choices),
            prompt_ids=prompt_ids,
            stream=stream,
            detokenizer=model.tokenizer.detokenizer(skip_special_tokens=body.skip_special_tokens is not False),
            matcher=StopMatcher(body.stops, include=include_stop) if body.stops else None,
            include_stop=include_stop,
            stop_token_ids=client_ends,
            finish=partial(model.client.finish, sequence_id),
            ends_complete=bool(body.return_cache_info),
        )
        message = Submit(
            sequence_id=sequence_id,
            request_id=request_id,
            prompt_ids=prompt_ids,
            max_tokens=max_tokens,
            sampling=sampling,
            end_ids=[*own_ends, *sorted(client_ends)],
            prefix_cache=body.prefix_cache is not False,
            cache_salt=body.cache_salt or "",
        )
        model.client.submit(message, stream)
        self.choices.append(choice)
        self._by_stream[stream] = choice

    @property
    def is_over(self) -> bool:
        """Whether the engine has reported the end of every choice."""
        return not self._by_stream

    async def next(self) -> list[tuple[Choice, list[Delta]]]:
        """Wait for news of any choice. Empty after `inbox.wake()`, and for news that have no text to send.

        Raises EngineDead, InternalError or ServiceUnavailable.
        """
        news = []
        for stream in await self.inbox.next_ready():
            choice = self._by_stream[stream]
            try:
                deltas = choice.read()
            except EngineDead:
                self._is_lost = True
                raise
            if self._first_token_s is None and choice.completion_tokens:
                self._first_token_s = time.monotonic()
            if deltas:
                news.append((choice, deltas))
            if choice.ended is not None:
                del self._by_stream[stream]
        return news

    def close(self) -> None:
        """Cancel what has not ended. Idempotent."""
        for stream in self._by_stream:
            stream.close()

    # -- numbers

    @property
    def prompt_tokens(self) -> int:
        """Over all prompts; a prompt counts once however many choices it has."""
        return sum(len(choice.prompt_ids) for choice in self.choices)

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices so far, with end tokens, without what was made past a stop string."""
        return sum(choice.completion_tokens for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose keys and values were found in the page cache; known once the choices have ended."""
        return sum(choice.ended.cached_tokens for choice in self.choices if choice.ended is not None)

    def numbers(self) -> dict[str, Any]:
        """For the request's log line. Times in milliseconds; None for what never happened or nobody has told."""
        ends = [choice.ended for choice in self.choices if choice.ended is not None]
        numbers: dict[str, Any] = {
            "choices": len(self.choices),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "finish_reasons": sorted({self._outcome(choice) for choice in self.choices}),
            "preemptions": sum(end.preemptions for end in ends),
            "queue_ms": round(max(end.queue_s for end in ends) * 1000, 1) if ends else None,
            "ttft_ms": None,
        }
        if self._first_token_s is not None:  # as the handler saw it: it counts for aborted requests too
            numbers["ttft_ms"] = round((self._first_token_s - self._submitted_s) * 1000, 1)
        return numbers

    def _outcome(self, choice: Choice) -> EndReason:
        """How a choice ended, also where no client is told."""
        if choice.finish_reason is not None:
            return choice.finish_reason
        if choice.ended is not None:
            return choice.ended.reason
        return "error" if self._is_lost else "abort"
