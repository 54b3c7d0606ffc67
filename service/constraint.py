"""What an output must be: the one form in which it travels, and how it is read from a request's body.

Two fields ask for it, `response_format` (OpenAI) and `structured_outputs`; both become a `Constraint`. What is said
here needs no tokenizer; whether the constraint can be met is found out when it is compiled (grammars.py).
"""

from typing import Any, Literal

import msgspec

from service.errors import BadRequest, quoted

MAX_CONSTRAINT_BYTES = 128 << 10
"""Of a constraint's text. Compiling takes time in proportion: one of this size half a second."""

MAX_CHOICE_STRINGS = 4096

ConstraintKind = Literal["json_schema", "json_object", "regex", "lark", "choice"]


class Constraint(msgspec.Struct, frozen=True):
    """A language: the whole output is one of its texts, or a beginning of one if it is cut."""

    kind: ConstraintKind
    text: str = ""
    """json_schema: the schema as JSON. regex: of the whole output (Rust's syntax). lark: a grammar in Lark or GBNF.
    choice: a JSON list of strings. json_object: nothing."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `json_schema` of a response_format. `strict` changes nothing: a schema is always kept to."""

    schema_: dict[str, Any] | bool | None = msgspec.field(default=None, name="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def constraint(self) -> Constraint | None:
        """Raises BadRequest."""
        if self.json_schema is not None and self.type != "json_schema":
            message = f"json_schema needs response_format of type json_schema, got {self.type}."
            raise BadRequest(message, param="response_format")
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Constraint("json_object")
        if self.json_schema is None or self.json_schema.schema_ is None:
            message = "response_format of type json_schema needs json_schema with a schema."
            raise BadRequest(message, param="response_format")
        return _of_schema(self.json_schema.schema_, "response_format")


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The wider way; exactly one of these."""

    json: dict[str, Any] | str | bool | None = None  # a schema, or its text
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def constraint(self) -> Constraint:
        """Raises BadRequest."""
        given = [name for name in self.__struct_fields__ if getattr(self, name) is not None]
        if self.json_object is False:
            given.remove("json_object")
        if len(given) != 1:
            kinds = ", ".join(self.__struct_fields__)
            message = f"structured_outputs must have exactly one of {kinds}, got {', '.join(given) or 'none'}."
            raise BadRequest(message, param="structured_outputs")
        if self.json is not None:
            return _of_schema(self.json, "structured_outputs")
        if self.regex is not None:
            return Constraint("regex", self.regex)
        if self.grammar is not None:
            return Constraint("lark", self.grammar)
        return Constraint("json_object") if self.choice is None else _of_choice(self.choice)


def constraint_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> tuple[Constraint, str] | None:
    """What a body asks for, and the field in which it does; None if it leaves the output free. Raises BadRequest."""
    asked = None if response_format is None else response_format.constraint()
    if structured_outputs is None:
        return None if asked is None else (checked(asked, "response_format"), "response_format")
    if asked is not None:
        message = "response_format and structured_outputs cannot both constrain the output."
        raise BadRequest(message, param="structured_outputs")
    return checked(structured_outputs.constraint(), "structured_outputs"), "structured_outputs"


def _of_schema(schema: dict[str, Any] | str | bool, param: str) -> Constraint:
    if isinstance(schema, str):
        return Constraint("json_schema", schema)
    try:
        return Constraint("json_schema", msgspec.json.encode(schema).decode())
    except RecursionError:
        raise BadRequest("The schema is nested too deeply.", param=param) from None


def _of_choice(choice: list[str]) -> Constraint:
    if not 1 <= len(choice) <= MAX_CHOICE_STRINGS:
        message = f"choice must have 1 to {MAX_CHOICE_STRINGS} strings, got {len(choice)}."
        raise BadRequest(message, param="structured_outputs")
    if "" in choice:
        raise BadRequest("a string of choice must not be empty.", param="structured_outputs")
    return Constraint("choice", msgspec.json.encode(choice).decode())


def checked(constraint: Constraint, param: str) -> Constraint:
    """The constraint, if its text is not too long. param: the field that asks for it. Raises BadRequest."""
    try:
        size = len(constraint.text.encode())
    except UnicodeEncodeError:
        raise BadRequest("The constraint holds a lone surrogate, which is no character.", param=param) from None
    if size > MAX_CONSTRAINT_BYTES:
        message = f"A constraint may have at most {MAX_CONSTRAINT_BYTES} bytes, got {quoted(size)}."
        raise BadRequest(message, param=param)
    return constraint
