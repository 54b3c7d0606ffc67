"""From a body to prompts: token ids, what an echo shows of them, and the length rules.

Length rules, the same on both routes (M = max_model_len, P = what the KV pool holds, or the tenant's share of it):
  1. prompt + max_tokens > M, or a prompt of M tokens or more: refused.
  2. prompt + max_tokens > P: refused; such a request could not run alone on an empty server.
  3. max_tokens absent: chat takes what both leave, completions at most 16 tokens of it.
With beam search the output counts once for each beam in what concerns P. `truncate_prompt_tokens` is applied
first. A text so long that it must break rule 1 is refused before it is tokenized, even if it were truncated.
"""

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from service.answer_parts import Reading
from service.body_values import check_values
from service.call_readers import READERS
from service.engine_client import Limits, Scores
from service.errors import BadRequest, quoted
from service.field_checks import MAX_PROMPTS, check_token_ids
from service.schema import ChatBody, CompletionBody, GenerationBody, TokenizeBody, template_messages
from service.served_model import ServedModel
from service.tokenization import OFF_LOOP_CHARACTERS, json_length

CHARACTERS_PER_TOKEN = 128
"""The longest tokens of common vocabularies are runs of 128 spaces: no text has fewer tokens than length / 128."""

OFF_LOOP_IDS = 65_536
"""More token ids than this in one body are checked in a thread: 60 ns each."""

OFF_LOOP_PARTS = 1_000
"""More messages, parts of them and calls than this in one chat are read in a thread: 2 us each."""


@dataclass(slots=True)
class Prompt:
    """What one or several choices go on from, and what the engine tells of it."""

    ids: list[int]
    echo: str = ""  # what the choices' texts begin with
    offsets: list[int] = field(default_factory=list)  # of each id in `echo`; empty unless log-probabilities need them
    scores: list[Scores] = field(default_factory=list)  # of ids[1:], as far as they have come
    reading: Reading | None = None  # of a chat whose answers are taken apart

    @property
    def is_scored(self) -> bool:
        """Whether all scores have come."""
        return len(self.scores) >= len(self.ids) - 1

    def scores_by_place(self) -> list[Scores | None]:
        """One for each id: None for the first, which follows nothing, and where none have come."""
        missing = len(self.ids) - 1 - len(self.scores)
        return [None, *self.scores, *[None] * missing]


async def completion_prompts(body: CompletionBody, model: ServedModel, tenant: str) -> list[Prompt]:
    """Every prompt, truncated as asked. Raises BadRequest."""
    limits = model.client.limits
    prompts: list[Prompt] = []
    read = partial(_given_prompts, body, limits)
    all_given = await asyncio.to_thread(read) if _count_ids(body) > OFF_LOOP_IDS else read()
    characters = sum(len(given) for _, given in all_given if isinstance(given, str))
    for path, given in all_given:
        if isinstance(given, str):
            ids = await model.tokenizer.encode_async(
                given, add_special_tokens=body.add_special_tokens is not False, among=characters
            )
            if not ids:
                raise BadRequest(f"prompt must not be empty: this text has no tokens - at `{path}`", param="prompt")
        else:
            ids = given
        whole, ids = ids, truncated(ids, body, limits, tenant)
        output_tokens(len(ids), body, limits, tenant, default=1)  # one that cannot fit spares the others the work
        is_text = isinstance(given, str) and len(ids) == len(whole)
        prompt = Prompt(ids)
        if body.echo:
            await _add_echo(prompt, body, model, given if is_text and isinstance(given, str) else None)
        prompts.append(prompt)
    return prompts


def _given_prompts(body: CompletionBody, limits: Limits) -> list[tuple[str, str | list[int]]]:
    """(path, prompt) of each. Raises BadRequest for texts that are too long, and for ids that there are not."""
    all_given = body.prompts()
    for path, given in all_given:
        if isinstance(given, str):
            check_text_length(len(given), limits, param="prompt")
        else:
            check_token_ids(given, limits.vocabulary, param="prompt", path=path)
    return all_given


def _count_ids(body: CompletionBody) -> int:
    """How many token ids there are in all prompts, about."""
    prompt = body.prompt or ()
    if not prompt or not isinstance(prompt[0], list) or len(prompt) > MAX_PROMPTS:
        return len(prompt)
    return sum(len(one) for one in prompt if isinstance(one, list))


async def _add_echo(prompt: Prompt, body: CompletionBody, model: ServedModel, text: str | None) -> None:
    """`text`: what the client wrote, if the ids are all of it: it is shown as it was. Other ids are decoded."""
    skip = body.skip_special_tokens is not False
    if not body.scores_echo:
        prompt.echo = model.tokenizer.decode(prompt.ids, skip_special_tokens=skip) if text is None else text
        return
    pieces = await model.tokenizer.pieces_async(
        prompt.ids,
        skip_special_tokens=skip and text is None,
        is_encoded_text=text is not None and body.add_special_tokens is not False,
    )
    prompt.echo = "".join(pieces) if text is None else text
    at = 0
    for piece in pieces:
        prompt.offsets.append(min(at, len(prompt.echo)))  # a tokenizer may decode to other characters than it was given
        at += len(piece)


async def chat_prompt(body: ChatBody | TokenizeBody, model: ServedModel, tenant: str) -> Prompt:
    """What the model's template makes of the messages, truncated as asked. Raises BadRequest."""
    read = partial(_for_template, body, model)
    messages, tools = await asyncio.to_thread(read) if _takes_long(body) else read()
    variables = dict(body.chat_template_kwargs or {})
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        template = model.tokenizer.template
        if template is not None and "reasoning_effort" not in template.source:
            message = "This model's chat template knows no reasoning_effort."
            raise BadRequest(message, param="reasoning_effort")
        variables["reasoning_effort"] = body.reasoning_effort
    ids = await model.tokenizer.render_chat_async(
        messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        tools=tools,
        kwargs=variables,
        add_special_tokens=isinstance(body, ChatBody) and bool(body.add_special_tokens),
    )
    if not ids:
        raise BadRequest("the chat template made no tokens of these messages.", param="messages")
    if isinstance(body, TokenizeBody):
        return Prompt(ids)
    ids = truncated(ids, body, model.client.limits, tenant)
    return Prompt(ids, echo=messages[-1]["content"] if body.echo else "", reading=_reading(body, ids, model))


def _takes_long(body: ChatBody | TokenizeBody) -> bool:
    """Whether to read a chat for its template is more than the loop has time for."""
    parts = characters = 0
    for message in body.messages or ():
        calls = message.tool_calls or ()
        parts += 1 + len(calls) + (len(message.content) if isinstance(message.content, list) else 0)
        characters += sum(len(call.function.arguments) for call in calls)
    return parts > OFF_LOOP_PARTS or characters > OFF_LOOP_CHARACTERS


def _for_template(
    body: ChatBody | TokenizeBody, model: ServedModel
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The messages and the tools as the chat template gets them. Raises BadRequest and PayloadTooLarge."""
    limits = model.client.limits
    if len(body.messages or ()) > limits.max_model_len:
        raise BadRequest(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, you requested "
            f"{len(body.messages or ())} messages, which cannot fit. Please leave some out.",
            param="messages",
        )
    _check_arguments(body, limits)
    messages = template_messages(body)
    check_text_length(sum(len(message["content"]) for message in messages), limits, param="messages")
    tools = _template_tools(body, model)
    check_text_length(json_length(tools), limits, param="tools")
    return messages, tools


def _check_arguments(body: ChatBody | TokenizeBody, limits: Limits) -> None:
    """What earlier calls were given is JSON in strings, which is decoded for the template. Raises BadRequest and
    PayloadTooLarge.
    """
    calls = (call for message in body.messages or () for call in message.tool_calls or ())
    texts = [call.function.arguments for call in calls]
    check_text_length(sum(map(len, texts)), limits, param="messages")
    check_values("".join(texts).encode())


def _template_tools(body: ChatBody | TokenizeBody, model: ServedModel) -> list[dict[str, Any]] | None:
    """The tools as the chat template gets them. Raises BadRequest."""
    if not body.offered_tools:
        return None
    template = model.tokenizer.template
    if template is not None and not template.takes_tools:
        raise BadRequest("This model's chat template has no place for tools.", param="tools")
    if template is not None and isinstance(body, ChatBody) and model.tokenizer.call_format is None:
        words = "It is not known how this model writes calls of tools: start the server with --tool-call-format."
        raise BadRequest(words, param="tools")
    return [tool.for_template() for tool in body.offered_tools]


def _reading(body: ChatBody, ids: list[int], model: ServedModel) -> Reading | None:
    """How the answers to a chat are taken apart; None where they are nothing but content."""
    tokenizer = model.tokenizer
    thinking, call_format = tokenizer.thinking_marks, tokenizer.call_format if body.offered_tools else None
    if body.structured_outputs is not None and body.structured_outputs.grammar is not None:
        thinking = None  # the grammar is of the whole answer
    if thinking is None and call_format is None:
        return None
    make, marks = None, [] if thinking is None else [*thinking]
    if call_format is not None:
        reader = READERS[call_format]
        make, marks = partial(reader, body.callable_names, body.most_calls), [*marks, *reader.spelled]
    return Reading(
        thinking=thinking,
        is_thinking=thinking is not None and tokenizer.ends_with(ids, thinking.begin),
        shows_reasoning=body.include_reasoning is not False,
        call_reader=make,
        marks=frozenset(marks),
    )


def thinking_reading(ids: list[int], model: ServedModel, *, shows_reasoning: bool) -> Reading:
    """How the reasoning is split off from the answers to a chat without tools. ids: its prompt."""
    thinking = model.tokenizer.thinking_marks
    assert thinking is not None, "a form that this model's chats do not have"
    is_thinking = model.tokenizer.ends_with(ids, thinking.begin)
    return Reading(thinking, is_thinking, shows_reasoning, marks=frozenset(thinking))


def check_text_length(characters: float, limits: Limits, *, param: str) -> None:
    """Refuse a text that no tokenizer could fit into the context, before work in proportion to it is done."""
    if characters > CHARACTERS_PER_TOKEN * limits.max_model_len:
        raise BadRequest(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, you requested a prompt of "
            f"{characters} characters, which cannot fit. Please shorten it.",
            param=param,
        )


def truncated(ids: list[int], body: GenerationBody, limits: Limits, tenant: str) -> list[int]:
    """The last (or first) ids, as many as `truncate_prompt_tokens` says. -1: what fits beside max_tokens, or one."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return ids
    if keep == -1:
        output, pool = max(1, body.asked_tokens or 1), limits.pool_tokens(tenant)
        # if even that is too long, the length rules say so
        keep = max(1, min(limits.max_model_len - output, pool - output * (body.beams or 1)))
    return ids[:keep] if body.truncation_side == "right" else ids[-keep:]


def output_tokens(prompt_tokens: int, body: GenerationBody, limits: Limits, tenant: str, *, default: int | None) -> int:
    """How many tokens the output may have: 0 only where the client asked for 0.

    default: at most this when nothing was asked; None: the rest. Raises BadRequest by the length rules above; the
    message has the true numbers.
    """
    asked, beams = body.asked_tokens, body.beams or 1
    length, pool = limits.max_model_len, limits.pool_tokens(tenant)
    output = max(1, 1 if asked is None else asked)  # an echo of the prompt alone takes a step too
    needed, together = prompt_tokens + output, prompt_tokens + output * beams
    if needed > length or together > pool:
        for_output = quoted(output, 32) if beams == 1 else f"{quoted(output, 32)} for each of {beams} beams"
        for_what = "the step that an echo takes" if asked == 0 else "the output"
        of_prompt = "messages" if isinstance(body, ChatBody) else "prompt"
        raise BadRequest(
            f"{limits.exceeded(needed, tenant)} However, you requested {quoted(together, 32)} tokens "
            f"({prompt_tokens} in the prompt, {for_output} for {for_what}). Please shorten one of them.",
            param=of_prompt if prompt_tokens + 1 > length or prompt_tokens + beams > pool else "max_tokens",
        )
    if asked is not None:
        return asked
    rest = min(length - prompt_tokens, (pool - prompt_tokens) // beams)
    return rest if default is None else min(default, rest)
