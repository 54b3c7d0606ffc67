"""POST /v1/completions and /v1/chat/completions: read, check, run, answer. Whole and streamed.

body ──decode──▶ checked fields ──▶ prompt ids ──▶ Generation ──▶ Deltas ──▶ one JSON, or events
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec
import structlog
from aiohttp import web

from service.answers import ChatForm, CompletionForm, Form, Wishes, running_usage
from service.body import read_body
from service.chat_constraint import chat_constraint, schema_bytes
from service.choice import Choice, Delta, Said
from service.constraint import Constraint, constraint_of
from service.errors import BadRequest, InternalError, PagewalkError, told_as
from service.front_end import FRONT_END, FrontEnd
from service.generation import COMPLETION_DEFAULT_TOKENS, Generation
from service.grammars import SMALL_BYTES, GrammarRefused
from service.json_answers import encoded_answer
from service.logprobs import Spelling
from service.middleware import CALLER, CLIENT_LEFT, ID, NUMBERS
from service.prompts import Prompt, chat_prompt, completion_prompts
from service.schema import Body, ChatBody, CompletionBody, GenerationBody
from service.served_model import ServedModel
from service.sse import EventStream
from service.token_stream import TokenStream

log = structlog.get_logger("pagewalk.http")

_encode = msgspec.json.Encoder().encode

FormKind = Callable[..., Form]

OFF_LOOP_SCORES = 512
"""More log-probabilities than this are written in a thread: about 20 us each with 20 others beside it."""


async def create_completion(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    front_end = request.app[FRONT_END]
    model = front_end.ready_for_more()
    body = await read_body(request, CompletionBody)
    name = model.check_name(body.model)
    body.check_logprobs(front_end.settings.max_logprobs)
    prompts = await completion_prompts(body, model, request[CALLER].tenant)
    return await answer(request, body, prompts, model, name, CompletionForm, default_tokens=COMPLETION_DEFAULT_TOKENS)


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    front_end = request.app[FRONT_END]
    model = front_end.ready_for_more()
    body = await read_body(request, ChatBody)
    name = model.check_name(body.model)
    body.check_logprobs(front_end.settings.max_logprobs)
    prompt = await chat_prompt(body, model, request[CALLER].tenant)
    return await answer(request, body, [prompt], model, name, ChatForm, default_tokens=None)


B = TypeVar("B", bound=Body)


async def answer_as_chat(
    request: web.Request,
    kind: type[B],
    chat_of: Callable[[B], ChatBody],
    names: Mapping[str, str],
    form_kind: Callable[[B], FormKind],
) -> web.StreamResponse:
    """Answer a body of another API as the chat that it stands for. names: of our fields, as that API calls them."""
    model = request.app[FRONT_END].ready_for_more()
    body = await read_body(request, kind)
    name = model.check_name(body.model)
    with told_as(names):
        chat = chat_of(body)
        prompt = await chat_prompt(chat, model, request[CALLER].tenant)
        return await answer(request, chat, [prompt], model, name, form_kind(body), default_tokens=None)


async def answer(
    request: web.Request,
    body: GenerationBody,
    prompts: list[Prompt],
    model: ServedModel,
    name: str,
    form_kind: FormKind,
    *,
    default_tokens: int | None,
) -> web.StreamResponse:
    """Generate, and write what comes as the Form says. Raises what `Generation` does, and QueueFull."""
    front_end = request.app[FRONT_END]
    if body.request_id is not None:
        request[ID] = body.request_id
    front_end.check_room()
    caller = request[CALLER]
    constraint = await checked_constraint(body, prompts, model)
    generation = Generation.submit(
        body,
        prompts,
        model,
        request_id=request[ID],
        caller=caller,
        default_tokens=default_tokens,
        interval=front_end.settings.stream_interval if body.stream else 1,
        constraint=constraint,
    )
    form = form_of(form_kind, request, body, model, name)  # while the engine computes
    return await deliver(request, body, generation, form)


def form_of(
    kind: FormKind, request: web.Request, body: GenerationBody, model: ServedModel, name: str, **more: Any
) -> Form:
    """How this request is answered. more: further members of the answer."""
    return kind(
        request_id=request[ID],
        created=int(time.time()),
        model=name,
        fingerprint=f"pagewalk-{request.app[FRONT_END].settings.version}",
        wishes=Wishes.of(body, Spelling(model.tokenizer.token_bytes, as_ids=bool(body.return_tokens_as_token_ids))),
        **more,
    )


async def deliver(request: web.Request, body: GenerationBody, generation: Generation, form: Form) -> web.StreamResponse:
    """Write what comes, whole or streamed; the generation is closed at the end."""
    front_end, caller = request.app[FRONT_END], request[CALLER]
    numbers = request[NUMBERS] = {"stream": bool(body.stream)}
    front_end.generating += 1
    try:
        await front_end.spend(caller.tenant, generation.prompt_tokens)
        if body.stream:
            return await _answer_in_events(request, body, generation, form, front_end)
        return await _answer_whole(generation, form)
    finally:
        front_end.generating -= 1
        generation.close()
        numbers |= generation.numbers()
        for prompt in generation.by_prompt():
            front_end.metrics.prompt_ended(prompt)
        await front_end.spend(caller.tenant, generation.completion_tokens)


async def checked_constraint(body: GenerationBody, prompts: list[Prompt], model: ServedModel) -> Constraint | None:
    """What the output must be, once it is known that it can be. Raises BadRequest, QueueFull."""
    if isinstance(body, ChatBody):
        ask = partial(chat_constraint, body, prompts[0].reading, model.tokenizer)
        asked = ask() if schema_bytes(body) <= SMALL_BYTES else await asyncio.to_thread(ask)
    else:
        asked = constraint_of(body.response_format, body.structured_outputs)
    if asked is None:
        return None
    constraint, param = asked
    try:
        await model.grammars.check(constraint)
    except GrammarRefused as error:
        raise BadRequest(f"{param} cannot be kept to: {error}.", param=param) from None
    return constraint


async def _answer_whole(generation: Generation, form: Form) -> web.Response:
    said = [Said() for _ in generation.choices]

    def collect(ready: list[TokenStream]) -> bool:
        for choice, deltas in generation.read(ready):
            said[choice.index].add(deltas)
        return not generation.is_over

    await generation.inbox.read_with(collect)
    whole = [each.whole() for each in said]
    write = partial(form.whole, generation, whole)
    scores = sum(len(delta.scored) for delta in whole)
    scores += sum(len(choice.prompt.scores) for choice in generation.choices)
    body = await asyncio.to_thread(write) if scores > OFF_LOOP_SCORES else write()
    return encoded_answer(body)


async def _answer_in_events(
    request: web.Request, body: GenerationBody, generation: Generation, form: Form, front_end: FrontEnd
) -> web.StreamResponse:
    """Errors before the first byte are raised; later ones are the last event."""
    with EventStream(request, keep_alive_s=front_end.settings.sse_keep_alive_s, wake=generation.inbox.wake) as events:
        try:
            await _send_events(events, body, generation, form)
        except ConnectionError:  # the client has left; aiohttp cancels the handler too, whichever is first
            request[NUMBERS]["status"] = CLIENT_LEFT
        except Exception as error:
            if not events.is_started:
                raise
            request[NUMBERS]["error"] = str(error)
            if not isinstance(error, PagewalkError):
                log.error("stream failed", request_id=request[ID], exc_info=error)
                error = InternalError(f"The server failed on this request, {request[ID]}.")
            await events.write(form.failure(error))
        return events.response


async def _send_events(events: EventStream, body: GenerationBody, generation: Generation, form: Form) -> None:
    """All events of a stream. What waits goes out in one write.

    As long as the client reads what it is sent, events are written by a plain function, once for all tokens of a step
    (Inbox.read_with); this task does what has to wait: for a client that lags, for a thread, for the silence.
    """
    writer = _EventWriter(body, generation, form)
    await events.prepare()

    def pass_on(ready: list[TokenStream]) -> bool:
        data = writer.text_event()
        if data:
            events.write_now(data)
            return events.is_flowing
        data = writer.events(generation.read(ready))
        if data:
            events.write_now(data)
        return events.is_flowing and not generation.is_over

    while not generation.is_over:
        if not body.scores_echo and events.is_flowing:  # scores may take a thread
            await generation.inbox.read_with(pass_on)
            data = b""
        else:
            news = await generation.next()
            data = writer.events(news) if writer.is_quick else await asyncio.to_thread(writer.events, news)
        if data:
            await events.write(data)
        else:
            await events.keep_alive()


class _EventWriter:
    """Turns what choices say into the events of one stream."""

    __slots__ = (
        "_around_text",
        "_completion_tokens",
        "_form",
        "_generation",
        "_is_counting",
        "_only_choice",
        "_opened",
        "_prompt_tokens",
        "_so_far",
        "_with_usage",
    )

    def __init__(self, body: GenerationBody, generation: Generation, form: Form) -> None:
        options = body.stream_options
        self._with_usage = options is not None and bool(options.include_usage)
        self._is_counting = options is not None and bool(options.continuous_usage_stats)
        self._generation = generation
        self._form = form
        self._prompt_tokens, self._completion_tokens = generation.prompt_tokens, 0
        self._opened = [False] * len(generation.choices)
        self._so_far = running_usage(self._prompt_tokens, 0) if self._is_counting else None
        self._only_choice = generation.choices[0]
        self._around_text: tuple[bytes, bytes] | None = None  # once the first event of an only choice is written

    @property
    def is_quick(self) -> bool:
        """Whether `events` belongs on the event loop: no scores of a long prompt are to be written."""
        choices = zip(self._generation.choices, self._opened, strict=True)
        return all(is_open or len(choice.prompt.scores) <= OFF_LOOP_SCORES for choice, is_open in choices)

    def text_event(self) -> bytes:
        """The event of one token, where its text is all that is new; else nothing, and nothing is read."""
        if self._around_text is None or (text := self._only_choice.read_text()) is None:
            return b""
        before, behind = self._around_text
        return before + _encode(text) + behind

    def events(self, news: list[tuple[Choice, list[Delta]]]) -> bytes:
        """The events of these deltas, perhaps none; with the last of the stream, its end."""
        parts: list[bytes] = []
        for choice, deltas in news:
            for delta in deltas:
                is_first = not self._opened[choice.index]
                if is_first:
                    self._opened[choice.index] = True
                    parts.append(self._form.opening(choice, self._so_far))
                    if len(self._opened) == 1 and not self._is_counting:
                        self._around_text = self._form.around_text(choice)
                if self._is_counting:
                    self._completion_tokens += len(delta.token_ids)
                    self._so_far = running_usage(self._prompt_tokens, self._completion_tokens)
                parts.append(self._form.event(choice, delta, self._so_far, is_first=is_first))
        if self._generation.is_over:
            parts.append(self._form.closing(self._generation, with_usage=self._with_usage))
        return b"".join(parts)
