"""A model's chat template: messages to one text, in Jinja's sandbox, as transformers renders it.

Templates come with models from anywhere, so they run without access to Python's internals and see plain JSON only.
What a template may use beyond plain Jinja is what transformers gives it: `raise_exception`, `strftime_now`, a `tojson`
that leaves HTML alone, loop controls, and `{% generation %}` blocks (which mark text for training and print it here).
Source: transformers, `utils/chat_template_utils.py`; tests compare the ids.
"""

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from service.errors import BadRequest, quoted

Message = dict[str, Any]

MAX_RENDERED_CHARACTERS = 1 << 26
"""Twice as many as the longest body has by default: templates add little to what they are given."""

RENDER_TIMEOUT_S = 10.0
"""Looked at whenever the template has made a piece of text; a chat of a million characters takes some milliseconds."""

FILES = "chat_template.jinja", "additional_chat_templates/tool_use.jinja"
"""In a model's folder: for all chats, and for those with tools."""

END_OF_FINAL = "\uf8ffEND_OF_FINAL_MESSAGE "
"""Stands behind the message to be continued while the template runs. The space tells whether the template trims."""


class TemplateNotUsable(Exception):
    """The template has a syntax error, or there are several and no default."""


class ChatTemplate:
    """One compiled template, and the one for chats with tools where the model has two."""

    def __init__(self, source: str, with_tools: str | None = None) -> None:
        self.source = source
        self.all_sources = source if with_tools is None else source + with_tools
        self.takes_tools = with_tools is not None or re.search(r"\btools\b", source) is not None
        self._plain = _compile(source)
        self._with_tools = self._plain if with_tools is None else _compile(with_tools)
        # `developer` is the newer name of the system role; templates from before it know `system` only.
        self._knows_developer = "developer" in source

    @classmethod
    def of(
        cls, files: Mapping[str, bytes], config: dict[str, Any], override: str | None = None
    ) -> "ChatTemplate | None":
        """The template of a model, by precedence: override, chat_template.jinja, tokenizer_config.json.

        files: what is there of FILES. config: the content of tokenizer_config.json. Raises TemplateNotUsable.
        """
        if override is not None:
            return cls(override)
        plain, with_tools = [files[name].decode("utf-8") if name in files else None for name in FILES]
        if plain is not None:
            return cls(plain, with_tools)
        given = config.get("chat_template")
        if isinstance(given, list):  # older models: a list of named templates
            given = {entry["name"]: entry["template"] for entry in given}
        if isinstance(given, dict):
            if "default" not in given:
                raise TemplateNotUsable(f"the model has the chat templates {sorted(given)} and none named default")
            return cls(given["default"], given.get("tool_use"))
        return None if given is None else cls(given)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: dict[str, Any],
    ) -> str:
        """The prompt text. Raises BadRequest with the template's own words if it refuses the messages."""
        if not messages:
            raise BadRequest("messages must hold at least one message.", param="messages")
        # Clients send null for what they leave out. Templates handle a missing key, and print "None" for null.
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        for message in chat:
            message.setdefault("content", "")
            if message.get("role") == "developer" and not self._knows_developer:
                message["role"] = "system"
        final = chat[-1]["content"]
        if continue_final_message:
            if not isinstance(final, str):
                raise BadRequest("continue_final_message needs a last message of text.", param="continue_final_message")
            chat[-1]["content"] = final + END_OF_FINAL
        template = self._with_tools if tools else self._plain
        given = {"messages": chat, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        try:
            text = _joined(template.generate({**variables, **given}))
        except BadRequest:
            raise
        except Exception as error:
            # Any exception: the template is a program of somebody else's, run on a client's data.
            reason = error.message if isinstance(error, jinja2.TemplateError) and error.message else str(error)
            raise BadRequest(
                f"The model's chat template refuses these messages: {quoted(reason, 500)}", param="messages"
            ) from error
        return _cut_at_end_of_final(text, final) if continue_final_message else text


def _joined(pieces: Iterator[str]) -> str:
    """The whole text. A client's data may make a template's loops long: neither time nor memory is without bound."""
    end, characters, taken = time.monotonic() + RENDER_TIMEOUT_S, 0, []
    for piece in pieces:
        characters += len(piece)
        if characters > MAX_RENDERED_CHARACTERS:
            words = f"more than {MAX_RENDERED_CHARACTERS} characters"
            raise BadRequest(f"The model's chat template makes {words} of these messages.", param="messages")
        if time.monotonic() > end:
            words = f"longer than {RENDER_TIMEOUT_S:g} s"
            raise BadRequest(f"The model's chat template works {words} on these messages.", param="messages")
        taken.append(piece)
    return "".join(taken)


def _cut_at_end_of_final(text: str, final: str) -> str:
    at = text.rfind(END_OF_FINAL.rstrip())
    if at < 0 or final.strip() not in text:
        raise BadRequest(
            "The model's chat template leaves out parts of the last message, so it cannot be continued.",
            param="continue_final_message",
        )
    # A template that trims messages has eaten the mark's space, and would eat the message's own last spaces too.
    return text[:at] if text.startswith(END_OF_FINAL, at) else text[:at].rstrip()


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` prints what stands in it."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateNotUsable(f"the chat template has an error in line {error.lineno}: {error.message}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().astimezone().strftime(format)
