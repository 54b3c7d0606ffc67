"""The running Sequences of one request: submitted together, read together, and none left behind.

A prompt is one message to the engine, however many choices it has: n Sequences that share its pages. Choices are
numbered prompt by prompt (index = prompt * n + choice).
"""

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from model.step_plan import SamplingParameters
from service.admin_bodies import RestoreFrom
from service.auth import Caller
from service.byte_detokenizer import IncrementalDecoder
from service.choice import MERGE_ABOVE, Choice, Delta, FinishReason, TextRules, cut_at_stop
from service.constraint import Constraint
from service.engine_client import AnswerForm, EndReason, Limits, Sibling, Submit, TextWishes
from service.errors import BadRequest, EngineDead, NotFound, quoted
from service.field_checks import check_token_ids
from service.prompts import Prompt, output_tokens, thinking_reading
from service.questions import PARENT_HAS_ENDED, Answerer, Fork, Forked, Parent, Restore, Restored
from service.sampling import beam_search, forked_parameters, sampling_parameters, sibling_seed, with_seed
from service.schema import ChatBody, ForkBody, GenerationBody
from service.served_model import ServedModel
from service.stop_strings import StopMatcher
from service.token_stream import Inbox, TokenStream

COMPLETION_DEFAULT_TOKENS = 16


class PromptNumbers(NamedTuple):
    """One prompt with all its choices, for the counters (metrics.py)."""

    choices: int
    prompt_tokens: int
    cached_tokens: int
    max_tokens: int
    longest_output: int
    is_answered: bool  # a token came


class Generation:
    """The choices of one request. Close it whatever happens: that cancels what has not ended."""

    def __init__(self, body: GenerationBody, model: ServedModel, rules: TextRules, interval: int) -> None:
        """Of no choices yet: `submit` and `fork` make whole ones. interval: tokens of a choice that come together."""
        self._interval = interval
        self._rules = rules
        self._budgets: list[int] = []  # tokens that each prompt's output may have
        self.prompts: Sequence[Prompt] = []
        self.choices_per_prompt = body.choices_per_prompt
        self.forked_at = 0  # of a fork: tokens that its parent had made
        self.inbox = Inbox(model.client.turn)
        self.choices: list[Choice] = []
        self._submitted_s = time.monotonic()
        self._first_token_s: float | None = None
        self._is_lost = False  # the engine has died under it
        self._by_stream: dict[TokenStream, Choice] = {}
        self._shows_scores = body.scores_echo  # of the prompt, before anything else
        self._early: list[TokenStream] = []  # with news that come before them

    @classmethod
    def submit(
        cls,
        body: GenerationBody,
        prompts: Sequence[Prompt],
        model: ServedModel,
        *,
        request_id: str,
        caller: Caller,
        default_tokens: int | None,
        interval: int = 1,
        constraint: Constraint | None = None,
    ) -> "Generation":
        """All Sequences, or none. Raises BadRequest, QueueFull, Loading, Draining or EngineDead.

        interval: tokens of a choice that come together, but for its first. constraint: one that can be kept to.
        """
        limits = model.client.limits
        budgets = [
            output_tokens(len(prompt.ids), body, limits, caller.tenant, default=default_tokens) for prompt in prompts
        ]
        _check_together(body, budgets, limits)
        rules, template = _asked(body, model, request_id, caller, interval)
        template = msgspec.structs.replace(template, constraint=constraint)
        generation = cls(body, model, rules, interval)
        generation.prompts, generation._budgets = prompts, budgets
        model.client.check_admission(len(prompts) * body.choices_per_prompt, generation.prompt_tokens)
        try:
            for prompt, max_tokens in zip(prompts, budgets, strict=True):
                generation._submit(body, template, prompt, max_tokens, model)
        except BaseException:
            generation.close()
            raise
        return generation

    @classmethod
    async def fork(
        cls,
        body: ForkBody,
        parent: Parent,
        model: ServedModel,
        engine: Answerer,
        *,
        request_id: str,
        caller: Caller,
        interval: int = 1,
    ) -> "Generation":
        """One Sequence that goes on from where `parent` stands. Raises what `submit` does, and NotFound."""
        client = model.client
        rules, asked = _asked(body, model, request_id, caller, interval, parent.sampling)
        generation = cls(body, model, rules, interval)
        sequence_id = client.next_sequence_id()
        stream = TokenStream(partial(client.cancel, sequence_id), generation.inbox, interval=interval)
        client.expect(sequence_id, stream)
        question = Fork(
            owner=caller.owner,
            client=caller.address,
            parent=parent.key,
            sequence_id=sequence_id,
            request_id=request_id,
            sampling=with_seed(asked.sampling, body.seed),
            end_ids=asked.end_ids,
            max_tokens=body.asked_tokens,
            priority=asked.priority,
            timeout_s=asked.timeout_s,
            text=asked.text,
        )
        try:
            forked = await engine.ask(question)
        except BaseException:
            stream.close()  # it may have begun although nobody could say so
            raise
        generation._follow(forked, parent.form, stream, sequence_id, body, model)
        if parent.text.stops and generation._is_past_stop(parent, forked, model):
            generation.close()
            raise NotFound(PARENT_HAS_ENDED)
        generation.forked_at = forked.forked_at
        return generation

    def _is_past_stop(self, parent: Parent, forked: Forked, model: ServedModel) -> bool:
        """Whether the answer of its parent ends before here: the engine goes on until it hears of a text stop."""
        answer = forked.tokens[forked.answer_begin :]
        detokenizer = _detokenizer(model, self.prompts[0], shows_special=not parent.text.skip_special_tokens)
        texts = list(map(detokenizer.push, answer))
        own = len(forked.tokens) - parent.text_begin
        return cut_at_stop(texts, StopMatcher(parent.text.stops), own, parent.sampling.min_tokens) is not None

    @classmethod
    async def restore(
        cls, body: RestoreFrom, model: ServedModel, engine: Answerer, *, caller: Caller, interval: int = 1
    ) -> "tuple[Generation, Restored, ForkBody]":
        """One Sequence that goes on from a checkpoint; what that says; and the body that asks for such an answer.

        Raises NotFound, PermissionDenied and what `submit` does.
        """
        client = model.client
        sequence_id, inbox = client.next_sequence_id(), Inbox(client.turn)
        stream = TokenStream(partial(client.cancel, sequence_id), inbox, interval=interval)
        client.expect(sequence_id, stream)
        question = Restore(body.path, sequence_id, body.request_id or "", caller.owner, caller.address)
        asked = asyncio.ensure_future(engine.ask(question))
        try:
            restored = await asyncio.shield(asked)
            told = _body_of(body, restored)
            own, min_tokens = len(restored.tokens) - restored.text_begin, restored.sampling.min_tokens
            least = max(0, min_tokens - (len(restored.tokens) - restored.answer_begin))
            generation = cls(
                told, model, _rules(told, frozenset(restored.text.stop_token_ids), least, interval), interval
            )
            generation.inbox = inbox
            generation._follow(
                restored, restored.form, stream, sequence_id, told, model, own=own, min_tokens=min_tokens
            )
        except BaseException:
            asked.add_done_callback(lambda done: _close(stream, done))  # before, there may be nothing to cancel yet
            raise
        return generation, restored, told

    def _follow(
        self,
        begun: Forked | Restored,
        form: AnswerForm,
        stream: TokenStream,
        sequence_id: int,
        body: GenerationBody,
        model: ServedModel,
        *,
        own: int = 0,
        min_tokens: int = 0,
    ) -> None:
        """The one choice is the rest of an answer that has begun elsewhere. own, min_tokens: as in Choice.follow."""
        reading = None
        if form in ("thinking", "hidden_thinking"):
            asked = begun.tokens[: begun.answer_begin]
            reading = thinking_reading(asked, model, shows_reasoning=form == "thinking")
        prompt = Prompt(begun.tokens, reading=reading)
        choice = self._choice(0, prompt, stream, sequence_id, body, model)
        choice.follow(begun.tokens[begun.answer_begin :], own=own, min_tokens=min_tokens)
        self.prompts, self._budgets = [prompt], [begun.max_tokens]
        self.choices, self._by_stream = [choice], {stream: choice}

    def _choice(
        self,
        index: int,
        prompt: Prompt,
        stream: TokenStream,
        sequence_id: int,
        body: GenerationBody,
        model: ServedModel,
    ) -> Choice:
        return Choice(
            index=index,
            prompt=prompt,
            stream=stream,
            detokenizer=_detokenizer(model, prompt, shows_special=body.skip_special_tokens is False),
            rules=self._rules,
            finish=partial(model.client.finish, sequence_id),
        )

    def _submit(
        self, body: GenerationBody, template: Submit, prompt: Prompt, max_tokens: int, model: ServedModel
    ) -> None:
        """One prompt with its choices."""
        client = model.client
        first, choices = len(self.choices), []
        ids = [client.next_sequence_id() for _ in range(self.choices_per_prompt)]
        for i, id_ in enumerate(ids):
            stream = TokenStream(partial(client.cancel, id_), self.inbox, prompt.scores, interval=self._interval)
            choices.append(self._choice(first + i, prompt, stream, id_, body, model))
        sampling = with_seed(template.sampling, body.seed)
        message = msgspec.structs.replace(
            template,
            sequence_id=ids[0],
            form=_form_of(body, prompt),
            first_choice=first,
            prompt_ids=prompt.ids,
            max_tokens=max(1, max_tokens),
            sampling=sampling,
            siblings=[Sibling(id_, sibling_seed(sampling.seed, i)) for i, id_ in enumerate(ids[1:], 1)],
        )
        client.submit(message, *(choice.stream for choice in choices))
        self.choices += choices
        self._by_stream |= {choice.stream: choice for choice in choices}

    @property
    def is_over(self) -> bool:
        """Whether the engine has reported the end of every choice."""
        return not self._by_stream

    async def next(self) -> list[tuple[Choice, list[Delta]]]:
        """Wait for news of any choice. Empty after `inbox.wake()`, and for news that have no text to send.

        Raises EngineDead, InternalError, QueueFull or ServiceUnavailable.
        """
        return self.read(await self.inbox.next_ready())

    def read(self, ready: list[TokenStream]) -> list[tuple[Choice, list[Delta]]]:
        """What these streams have. Raises as `next` does."""
        news = []
        if self._early:
            ready, self._early = [*ready, *self._early], []
        if self._shows_scores:  # a first choice before its siblings: its end lets them go
            ready.sort(key=lambda stream: self._by_stream[stream].index)
        for stream in ready:
            choice = self._by_stream[stream]
            if self._shows_scores and self._is_early(choice):
                self._early.append(stream)
                continue
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

    def _is_early(self, choice: Choice) -> bool:
        """Whether scores of its prompt are still to come.

        They come before any token of the prompt's first choice. If that one was preempted, a sibling may be ahead.
        """
        first = self.choices[choice.index - choice.index % self.choices_per_prompt]
        return choice is not first and not choice.prompt.is_scored and first.stream in self._by_stream

    def close(self) -> None:
        """Cancel what has not ended. Idempotent."""
        for stream in self._by_stream:
            stream.close()

    # -- numbers

    @property
    def prompt_tokens(self) -> int:
        """Over all prompts; a prompt counts once however many choices it has."""
        return sum(len(prompt.ids) for prompt in self.prompts)

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices so far, with end tokens, without what was made past a stop string."""
        return sum(choice.completion_tokens for choice in self.choices)

    @property
    def reasoning_tokens(self) -> int | None:
        """Of the completion tokens, those of reasoning, marks included; None for a model that does not mark it."""
        if all(prompt.reading is None or prompt.reading.thinking is None for prompt in self.prompts):
            return None
        return sum(choice.reasoning_tokens for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose keys and values were found in the page cache; known once the choices have ended.

        A prompt's first choice tells: what its siblings find is what that one has just computed.
        """
        return sum(self._cached(choice) for choice in self.choices[:: self.choices_per_prompt])

    @staticmethod
    def _cached(choice: Choice) -> int:
        return 0 if choice.ended is None else choice.ended.cached_tokens

    def by_prompt(self) -> list[PromptNumbers]:
        """The numbers of each prompt so far."""
        n, found = self.choices_per_prompt, []
        for i, (prompt, max_tokens) in enumerate(zip(self.prompts, self._budgets, strict=True)):
            choices = self.choices[i * n : (i + 1) * n]
            longest = max(choice.completion_tokens for choice in choices)
            is_answered = longest > 0 or (self._rules.is_echo_only and choices[0].finish_reason is not None)
            numbers = PromptNumbers(n, len(prompt.ids), self._cached(choices[0]), max_tokens, longest, is_answered)
            found.append(numbers)
        return found

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

    def _outcome(self, choice: Choice) -> EndReason | FinishReason:
        """How a choice ended, also where no client is told."""
        if choice.ended is not None and choice.ended.reason == "timeout" and choice.finish_reason == "length":
            return "timeout"
        if choice.finish_reason is not None:
            return choice.finish_reason
        if choice.ended is not None:
            return choice.ended.reason
        return "error" if self._is_lost else "abort"


def _asked(
    body: GenerationBody,
    model: ServedModel,
    request_id: str,
    caller: Caller,
    interval: int,
    parent: SamplingParameters | None = None,
) -> tuple[TextRules, Submit]:
    """How tokens become text, and a message without a prompt. parent: of a fork, what it does not say is as there.

    Raises BadRequest.
    """
    limits = model.client.limits
    check_token_ids(body.stop_token_ids or [], limits.vocabulary, param="stop_token_ids", path="$.stop_token_ids")
    if body.priority and not limits.takes_priority:
        message = f"priority must be 0: this server goes by arrival, got {quoted(body.priority, 32)}."
        raise BadRequest(message, param="priority")
    # an end token is reported as null even if the client named it too
    own_ends = () if body.ignore_eos else model.end_ids
    client_ends = frozenset(body.stop_token_ids or ()).difference(own_ends)
    end_ids = [*own_ends, *sorted(client_ends)]
    if parent is None:
        sampling = sampling_parameters(body, model.defaults, model.tokenizer, limits.vocabulary, end_ids)
    else:
        sampling = forked_parameters(body, parent, model.tokenizer, limits.vocabulary, end_ids)
    rules = _rules(body, client_ends, sampling.min_tokens, interval)
    scored = [body.prompt_logprobs, body.top_choices if body.scores_echo else None]
    template = Submit(
        sequence_id=0,
        request_id=request_id,
        tenant=caller.tenant,
        owner=caller.owner,
        client=caller.address,
        prompt_ids=[],
        max_tokens=0,
        sampling=sampling,
        end_ids=[] if rules.is_echo_only else end_ids,
        text=TextWishes(body.stops, rules.include_stop, sorted(client_ends), body.skip_special_tokens is not False),
        prefix_cache=body.prefix_cache is not False,
        cache_salt=body.cache_salt or "",
        beam_search=beam_search(body),
        prompt_logprobs=max(-1 if likeliest is None else likeliest for likeliest in scored),
        priority=body.priority or 0,
        timeout_s=body.timeout_s,
    )
    return rules, template


def _detokenizer(model: ServedModel, prompt: Prompt, *, shows_special: bool) -> IncrementalDecoder:
    marks = frozenset() if prompt.reading is None else prompt.reading.marks
    return model.tokenizer.detokenizer(skip_special_tokens=not shows_special, shown=marks)


def _close(stream: TokenStream, asked: "asyncio.Future[Restored]") -> None:
    if not asked.cancelled():
        asked.exception()  # whoever would be told has left
    stream.close()


def _rules(body: GenerationBody, client_ends: frozenset[int], min_tokens: int, interval: int) -> TextRules:
    include_stop = bool(body.include_stop_str_in_output)
    return TextRules(
        matcher=StopMatcher(body.stops, include=include_stop) if body.stops else None,
        include_stop=include_stop,
        stop_token_ids=client_ends,
        min_tokens=min_tokens,
        ends_complete=bool(body.return_cache_info),
        merge_above=MERGE_ABOVE if interval == 1 else 1,
        is_echo_only=body.asked_tokens == 0,
    )


def _body_of(body: RestoreFrom, restored: Restored) -> ForkBody:
    """A body that asks for what the restored request had asked for, told as `body` says."""
    text, logprobs = restored.text, restored.sampling.logprobs
    return ForkBody(
        stop=text.stops or None,
        include_stop_str_in_output=text.include_stop,
        stop_token_ids=text.stop_token_ids or None,
        skip_special_tokens=text.skip_special_tokens,
        logprobs=None if logprobs < 0 else logprobs,
        stream=body.stream,
        stream_options=body.stream_options,
        return_token_ids=body.return_token_ids,
        return_tokens_as_token_ids=body.return_tokens_as_token_ids,
    )


def _form_of(body: GenerationBody, prompt: Prompt) -> AnswerForm:
    if not isinstance(body, ChatBody):
        return "completion"
    if prompt.reading is None:
        return "chat"
    if prompt.reading.call_reader is not None:
        return "tools"
    return "thinking" if prompt.reading.shows_reasoning else "hidden_thinking"


def _check_together(body: GenerationBody, budgets: Sequence[int], limits: Limits) -> None:
    """What no field can say alone. Raises BadRequest."""
    shortest = min(budgets)
    if body.min_tokens is not None and body.min_tokens > shortest:
        message = f"min_tokens must be at most max_tokens, here {shortest}, got {quoted(body.min_tokens, 32)}."
        raise BadRequest(message, param="min_tokens")
    if body.beams is not None and body.beams > limits.max_running:
        message = f"This server runs {limits.max_running} beams at once, got {body.beams}."
        raise BadRequest(message, param="n" if body.beam_width is None else "beam_width")
    choices, most = len(budgets) * body.choices_per_prompt, limits.max_queue_requests
    if choices > max(1, most):
        message = (
            f"This server takes at most {most} choices at once, got {choices}: {len(budgets)} prompts, n = {body.n}."
        )
        raise BadRequest(message, param="n" if body.n is not None and body.n > 1 else "prompt")
