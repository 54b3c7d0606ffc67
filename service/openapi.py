"""The description of the API (OpenAPI 3.1), made from the types of bodies (schema.py and siblings) and of answers
(answer_types.py). What those cannot say, because it is checked by hand, stands in `RANGES` and `REQUIRED`; a test holds
that the checks agree with them. A route that is not in `OPERATIONS` fails a test.

OpenAPI 3.1 has no form for streams: the schema of text/event-stream is that of one event, and the schema of the JSON in
its data is in `contentSchema`.
"""

import functools
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import msgspec

from service import answer_types as answers
from service import field_checks, schema
from service.anthropic_body import CountBody, MessagesBody
from service.errors import ErrorBody
from service.responses_body import ResponsesBody
from service.tools import MAX_TOOLS

REFERENCE = "#/components/schemas/{name}"
REQUEST_ID = {"name": "X-Request-Id", "in": "header", "description": "Comes back, and names the request in the log."}


class Operation(NamedTuple):
    """One method of one path, as its users see it."""

    summary: str
    body: type | None = None
    answer: Any = None  # None: an empty body
    media_type: str = "application/json"
    event: type | None = None  # with stream: true
    is_open: bool = False
    statuses: tuple[int, ...] = ()  # beside those that every route has
    is_anthropic: bool = False


GENERATES = (400, 404, 413, 415, 429, 503)
READS_BODY = (400, 404, 413, 415, 429, 503)
LATER = (400, 429)

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/completions"): Operation(
        "Continue texts or token ids", schema.CompletionBody, answers.Completion,
        event=answers.CompletionEvent, statuses=GENERATES,
    ),
    ("POST", "/v1/chat/completions"): Operation(
        "Answer a chat", schema.ChatBody, answers.ChatCompletion,
        event=answers.ChatCompletionEvent, statuses=GENERATES,
    ),
    ("POST", "/v1/responses"): Operation(
        "Answer a chat, in the form of the Responses API; stateless", ResponsesBody, answers.Response,
        event=answers.ResponseEvent, statuses=GENERATES,
    ),
    ("POST", "/v1/messages"): Operation(
        "Answer a chat, in the form of the Anthropic API", MessagesBody, answers.AnthropicMessage,
        event=answers.MessageEvent, statuses=GENERATES, is_anthropic=True,
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "Count the tokens of such a chat", CountBody, answers.InputTokens, statuses=READS_BODY, is_anthropic=True
    ),
    ("POST", "/v1/embeddings"): Operation("Not served by this version", statuses=LATER),
    ("GET", "/v1/models"): Operation("The names that the model is known by", answer=answers.ModelList, statuses=(503,)),
    ("GET", "/v1/models/{id}"): Operation("One of them", answer=answers.Model, statuses=(404, 503)),
    ("GET", "/v1/requests"): Operation(
        "Requests of the key that have not ended", answer=answers.OpenRequestList, statuses=(503,)
    ),
    ("GET", "/v1/requests/{id}"): Operation(
        "One of them", answer=answers.OpenRequestEntry, statuses=(404, 503)
    ),
    ("DELETE", "/v1/requests/{id}"): Operation(
        "End it; whoever waits for its answer gets an error", answer=answers.AbortedRequest, statuses=(503,)
    ),
    ("POST", "/v1/requests/{id}/fork"): Operation(
        "Branch a running request: a second answer from where it stands. That of a chat has the form of a chat",
        schema.ForkBody, answers.ForkedCompletion, event=answers.ForkedCompletionEvent, statuses=(*GENERATES, 409),
    ),
    ("POST", "/tokenize"): Operation(
        "The token ids of a text or a chat", schema.TokenizeBody, answers.Tokenized, statuses=READS_BODY
    ),
    ("POST", "/detokenize"): Operation(
        "The text of token ids", schema.DetokenizeBody, answers.Detokenized, statuses=READS_BODY
    ),
    ("GET", "/tokenizer_info"): Operation(
        "How text becomes token ids", answer=dict[str, Any], statuses=(503,)
    ),
    ("GET", "/"): Operation(
        "What this is, and where things are", answer=str, media_type="text/plain", is_open=True
    ),
    ("GET", "/live"): Operation("503 when only a restart helps", is_open=True, statuses=(503,)),
    ("GET", "/health"): Operation("200 once it can serve", is_open=True, statuses=(503,)),
    ("GET", "/ping"): Operation("The same as /health", is_open=True, statuses=(503,)),
    ("GET", "/ready"): Operation("200 when a request would be admitted now", is_open=True, statuses=(503,)),
    ("GET", "/version"): Operation("The server's version", answer=answers.Version, is_open=True),
    ("GET", "/load"): Operation("Requests that generate or wait", answer=answers.Load, is_open=True),
    ("GET", "/metrics"): Operation("Counts, for Prometheus", answer=str, media_type="text/plain", is_open=True),
    ("GET", "/openapi.json"): Operation("This description", answer=dict[str, Any], is_open=True),
    ("GET", "/docs"): Operation("This description as a page", answer=str, media_type="text/html", is_open=True),
}  # fmt: skip

_AT_LEAST_1 = {"minimum": 1}
_TOP_P = {"exclusiveMinimum": 0, "maximum": 1}

RANGES: Mapping[str, Mapping[str, Any]] = {
    "n": {"minimum": 1, "maximum": field_checks.MAX_CHOICES},
    "max_tokens": _AT_LEAST_1,
    "max_completion_tokens": _AT_LEAST_1,
    "max_output_tokens": _AT_LEAST_1,
    "min_tokens": {"minimum": 0},
    "timeout_s": {"exclusiveMinimum": 0},
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": _TOP_P,
    "typical_p": _TOP_P,
    "top_k": {"minimum": -1},
    "min_p": {"minimum": 0, "maximum": 1},
    "repetition_penalty": {"exclusiveMinimum": 0},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "priority": {"minimum": -field_checks.MAX_PRIORITY, "maximum": field_checks.MAX_PRIORITY},
    "choice": {"minimum": 0},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "beam_width": {"minimum": 2, "maximum": field_checks.MAX_BEAMS},
    "length_penalty": {"minimum": -field_checks.MAX_LENGTH_PENALTY, "maximum": field_checks.MAX_LENGTH_PENALTY},
    "tools": {"maxItems": MAX_TOOLS},
    "stop_sequences": {"maxItems": field_checks.MAX_STOPS},
    "stop_token_ids": {"maxItems": field_checks.MAX_STOP_TOKEN_IDS},
    "bad_words": {"maxItems": field_checks.MAX_BAD_WORDS},
    "allowed_token_ids": {"minItems": 1},
    "logit_bias": {"maxProperties": field_checks.MAX_BIASES},
    "truncate_prompt_tokens": {"minimum": -1},
    "cache_salt": {"pattern": rf"^[^@/\\\x00]{{1,{field_checks.MAX_SALT_CHARACTERS}}}$"},
    "request_id": {"pattern": rf"^{field_checks.REQUEST_ID.pattern}$"},
    "messages": {"minItems": 1},
}
"""Field of a body -> bounds of its value."""

BODY_RANGES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "CompletionBody": {"max_tokens": {"minimum": 0}},  # 0 with echo
    "ChatBody": {"tools": {"minItems": 1, "maxItems": MAX_TOOLS}},
    "TokenizeBody": {"tools": {"minItems": 1, "maxItems": MAX_TOOLS}},
    "MessagesBody": {"temperature": {"minimum": 0, "maximum": 1}},
}
"""The same, where a route differs."""

REQUIRED: Mapping[str, tuple[str, ...]] = {
    "CompletionBody": ("prompt",),
    "ChatBody": ("messages",),
    "ResponsesBody": ("input",),
    "MessagesBody": ("messages", "max_tokens"),
    "CountBody": ("messages",),
    "DetokenizeBody": ("tokens",),
}
"""Fields that must be there, and not null."""

LEFT_OUT: Mapping[str, Collection[str]] = {"ForkBody": schema.NOT_IN_FORKS}
"""Fields that a body has and that cannot be used in it."""

BODIES = (
    schema.CompletionBody, schema.ChatBody, schema.ForkBody, schema.TokenizeBody, schema.DetokenizeBody, ResponsesBody,
    MessagesBody, CountBody,
)  # fmt: skip

STATUS_WORDS: Mapping[int, str] = {
    400: "Malformed, out of range, or what can never fit; or known and not served yet (type NotImplementedError)",
    401: "No key, or a wrong one",
    404: "Unknown model, path or request",
    405: "The path has no such method; the Allow header has those that it has",
    409: "The request that is to be forked has not got its first token yet; try again",
    413: "The body is over the limit",
    415: "The body is no JSON",
    429: "The queue is full, or a limit of the key is reached; see Retry-After",
    500: "A fault of the server",
    503: "Loading, draining, or the engine is dead; see Retry-After. Also a request that was aborted",
}


@functools.lru_cache(maxsize=4)
def document(version: str, *, asks_key: bool = True) -> bytes:
    """The description as JSON. A server without keys (`asks_key` false) asks for none on any route, and says so."""
    named = [operation.body for operation in OPERATIONS.values() if operation.body is not None]
    named += [operation.answer for operation in OPERATIONS.values() if operation.answer is not None]
    named += [operation.event for operation in OPERATIONS.values() if operation.event is not None]
    kinds = [*dict.fromkeys([*named, ErrorBody, answers.AnthropicError])]
    references, components = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    of_kind = dict(zip(kinds, references, strict=True))
    for name in {kind.__name__ for kind in BODIES}:
        for field in LEFT_OUT.get(name, ()):
            del components[name]["properties"][field]
        _add_bounds(name, components[name])
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation, of_kind, asks_key)
    described = {
        "openapi": "3.1.0",
        "info": {
            "title": "Pagewalk",
            "version": version,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": (
                "A server for language models. Bodies are JSON; null stands for a field's default; unknown fields are "
                "refused. Every answer has X-Request-Id. Events of streams are `data:` lines of JSON; completions and "
                "chats end with `data: [DONE]`, and an error after the first event is the last event before it."
            ),
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return msgspec.json.encode(described)


def _operation(
    method: str, path: str, operation: Operation, of_kind: Mapping[Any, Any], asks_key: bool
) -> dict[str, Any]:
    is_open = operation.is_open or not asks_key
    parameters = [{"name": "id", "in": "path", "required": True, "schema": _ID}] if "{id}" in path else []
    name = path.strip("/") or "root"
    found: dict[str, Any] = {
        "operationId": f"{method.lower()}_{name.replace('/', '_').replace('{id}', 'id')}".replace(".", "_"),
        "summary": operation.summary,
        "parameters": [*parameters, REQUEST_ID | {"schema": {"type": "string"}}],
        "security": [] if is_open else [{"key": []}],
        "responses": {"200": _answer(operation, of_kind)},
    }
    if operation.body is not None:
        content = {"application/json": {"schema": of_kind[operation.body]}}
        found["requestBody"] = {"required": True, "content": content}
    if operation.summary.startswith("Not served"):
        del found["responses"]["200"]
    error = of_kind[answers.AnthropicError if operation.is_anthropic else ErrorBody]
    statuses = {*operation.statuses, 400, 405, 500, *(() if is_open else (401,))}
    for status in sorted(statuses):
        content = {"application/json": {"schema": error}}
        found["responses"][str(status)] = {"description": STATUS_WORDS[status], "content": content}
    return found


_ID = {"type": "string", "minLength": 1}


def _answer(operation: Operation, of_kind: Mapping[Any, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": "Well"}
    if operation.answer is not None:
        answer["content"] = {operation.media_type: {"schema": of_kind[operation.answer]}}
    if operation.event is not None:
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": of_kind[operation.event]}
        event = {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}
        answer["content"]["text/event-stream"] = {"schema": event}
    return answer


def _add_bounds(name: str, component: dict[str, Any]) -> None:
    """What is checked by hand."""
    bounds = {**RANGES, **BODY_RANGES.get(name, {})}
    for field, described in component["properties"].items():
        if field in bounds:
            _bounded(described).update(bounds[field])
    for field in REQUIRED.get(name, ()):
        described = component["properties"][field]
        kinds = [kind for kind in described.pop("anyOf") if kind != {"type": "null"}]
        described.pop("default")
        described.update(kinds[0] if len(kinds) == 1 else {"anyOf": kinds})
    if name in REQUIRED:
        component["required"] = list(REQUIRED[name])


def _bounded(described: dict[str, Any]) -> dict[str, Any]:
    """Of a value or null, the value: bounds of one kind mean nothing to others, so the first will do."""
    kind: dict[str, Any] = described["anyOf"][0]
    return kind
