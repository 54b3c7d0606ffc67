"""POST /v1/completions and /v1/chat/completions: read, check, run, answer. Whole and streamed.

body ──decode──▶ checked fields ──▶ prompt ids ──▶ Generation ──▶ Deltas ──▶ one JSON, or events
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial

import structlog
from aiohttp import web

from service.answers import ChatForm, CompletionForm, Form, Wishes, running_usage
from service.body import read_body
from service.choice import Delta, merged
from service.errors import InternalError, PagewalkError
from service.front_end import FRONT_END, FrontEnd
from service.generation import COMPLETION_DEFAULT_TOKENS, Generation
from service.logprobs import Spelling
from service.middleware import CALLER, CLIENT_LEFT, ID, NUMBERS
from service.prompts import Prompt, chat_prompt, completion_prompts
from service.schema import ChatBody, CompletionBody, GenerationBody
from service.served_model import ServedModel
from service.sse import EventStream

log = structlog.get_logger("pagewalk.http")

FormKind = Callable[..., Form]

OFF_LOOP_SCORES = 512
"""More log-probabilities than this are written in a thread: about 20 us each with 20 others beside it."""


async def create_completion(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    model = request.app[FRONT_END].ready()
    body = await read_body(request, CompletionBody)
    name = model.check_name(body.model)
    body.check_logprobs(request.app[FRONT_END].settings.max_logprobs)
    prompts = await completion_prompts(body, model, request[CALLER].tenant)
    return await answer(request, body, prompts, model, name, CompletionForm, default_tokens=COMPLETION_DEFAULT_TOKENS)


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    model = request.app[FRONT_END].ready()
    body = await read_body(request, ChatBody)
    name = model.check_name(body.model)
    body.check_logprobs(request.app[FRONT_END].settings.max_logprobs)
    prompt = await chat_prompt(body, model, request[CALLER].tenant)
    return await answer(request, body, [prompt], model, name, ChatForm, default_tokens=None)


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
    form = form_kind(
        request_id=request[ID],
        created=int(time.time()),
        model=name,
        fingerprint=f"pagewalk-{front_end.settings.version}",
        wishes=Wishes.of(body, Spelling(model.tokenizer.token_bytes, as_ids=bool(body.return_tokens_as_token_ids))),
    )
    front_end.check_room()
    caller = request[CALLER]
    generation = Generation(body, prompts, model, request_id=request[ID], caller=caller, default_tokens=default_tokens)
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


async def _answer_whole(generation: Generation, form: Form) -> web.Response:
    said: list[list[Delta]] = [[] for _ in generation.choices]
    while not generation.is_over:
        for choice, deltas in await generation.next():
            said[choice.index] += deltas
    write = partial(form.whole, generation, [merged(deltas) for deltas in said])
    scores = sum(len(delta.scored) for deltas in said for delta in deltas)
    scores += sum(len(choice.prompt.scores) for choice in generation.choices)
    body = await asyncio.to_thread(write) if scores > OFF_LOOP_SCORES else write()
    return web.Response(body=body, content_type="application/json")


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
    """All events of a stream. What waits goes out in one write."""
    options = body.stream_options
    with_usage = options is not None and bool(options.include_usage)
    is_counting = options is not None and bool(options.continuous_usage_stats)
    prompt_tokens, completion_tokens = generation.prompt_tokens, 0
    opened = [False] * len(generation.choices)
    so_far = running_usage(prompt_tokens, 0) if is_counting else None
    while not generation.is_over:
        parts: list[bytes] = []
        for choice, deltas in await generation.next():
            for delta in deltas:
                is_first = not opened[choice.index]
                if is_first:
                    opened[choice.index] = True
                    write = partial(form.opening, choice, so_far)
                    is_long = len(choice.prompt.scores) > OFF_LOOP_SCORES
                    parts.append(await asyncio.to_thread(write) if is_long else write())
                if is_counting:
                    completion_tokens += len(delta.token_ids)
                    so_far = running_usage(prompt_tokens, completion_tokens)
                parts.append(form.event(choice, delta, so_far, is_first=is_first))
        if generation.is_over:
            parts.append(form.closing(generation, with_usage=with_usage))
        if data := b"".join(parts):  # a form may have nothing to say of a token
            await events.write(data)
        else:
            await events.keep_alive()
