"""Chat templates and tokenizers of models that call tools and think: short, yet with the marks of real ones."""

import functools
from typing import Any, Literal

import msgspec
import tokenizers
from http_house import Server, Start
from scripted_engine import Script
from tiny_tokenizer import CONTROL, END, tiny_tokenizer

from service.call_readers import CallFormat
from service.chat_template import ChatTemplate
from service.tokenization import Tokenizer

HEAD = "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.reasoning_content %}(thought {{ m.reasoning_content }}){% endif %}"
    "{% for c in m.tool_calls or [] %}(call {{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = {"hermes": "<tool_call></tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
SPECIAL = {"hermes": [], "llama3": ["<|python_tag|>"], "mistral": ["[TOOL_CALLS]", "[ARGS]"]}
"""Control tokens: their text is not part of answers unless it is asked for."""

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
FORMATS: tuple[CallFormat, ...] = ("hermes", "llama3", "mistral")
ROME = ("get_weather", {"city": "Rome", "days": 2})
NOON = ("clock", {})
TOOLS = [WEATHER, CLOCK]


@functools.cache
def tool_tokenizer(
    call_format: CallFormat | None = "hermes", thinks: Literal["no", "by itself", "opened"] = "no"
) -> Tokenizer:
    """call_format None: a template without tools. thinks: whether the model marks reasoning, and who opens it."""
    source = TURNS if call_format is None else HEAD + f"{{# {MARKS[call_format]} #}}" + TURNS
    if thinks != "no":
        source += "{# <think></think> #}"
    if thinks == "opened":
        source += "{% if add_generation_prompt %}<think>\n{% endif %}"
    backend = tokenizers.Tokenizer.from_str(tiny_tokenizer().backend.to_str())
    if call_format is not None and SPECIAL[call_format]:
        backend.add_special_tokens(SPECIAL[call_format])
    return Tokenizer(backend, {"eos_token": CONTROL[2]}, ChatTemplate(source))


def call_text(call_format: CallFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    """What such a model writes to call these."""
    key = "parameters" if call_format == "llama3" else "arguments"
    objects = [msgspec.json.encode({"name": name, key: arguments}).decode() for name, arguments in calls]
    match call_format:
        case "hermes":
            return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
        case "llama3":
            return "<|python_tag|>" + "; ".join(objects)
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(objects)}]"


def writes(text: str, call_format: CallFormat | None = "hermes", thinks: Any = "no") -> Script:
    """Every Sequence says this text, then an end token."""
    tokenizer = tool_tokenizer(call_format, thinks)
    return lambda submit: [*tokenizer.encode(text, add_special_tokens=False), END]


async def model_that(
    start: Start, text: str, call_format: CallFormat | None = "hermes", thinks: Any = "no", context: int = 2000
) -> Server:
    tokenizer = tool_tokenizer(call_format, thinks)
    return await start(
        model={"tokenizer": tokenizer},
        engine={"script": writes(text, call_format, thinks)},
        limits={"vocabulary": tokenizer.vocabulary, "max_model_len": context, "max_request_tokens": context},
    )


def told(server: Server) -> str:
    """The last prompt, as text."""
    model = server.front_end.model
    assert model is not None
    return model.tokenizer.decode(server.engine.submitted[-1].prompt_ids, skip_special_tokens=False)
