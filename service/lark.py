"""Grammars that clients write: what is looked at before the compiler (llguidance) sees one.

A text is Lark, or GBNF, which is rewritten as Lark. The compiler follows rules by recursion, so their number is
bounded. JSON Schemas in it (`%json {...}`) are held to what those of a request are (json_schemas.py).
"""

import json
import re
from typing import Any

from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from service.json_schemas import SchemaRefused, check_schema

MAX_RULES = 1000
"""Rules and terminals of a grammar: a chain of 3,000 that name each other would overflow an 8 MiB stack."""

MAX_DIRECTIVE_SCHEMAS = 256

_PARTS = re.compile(
    r'"(?:[^"\\]|\\.)*"'  # a string
    r"|//[^\n]*|\#[^\n]*"  # a comment
    r"|/(?:[^/\\]|\\.)+/"  # a regular expression
    r"|%json(?![\w-])"
    r"|:"
    r'|[^"/\#%:]+|.',
    re.DOTALL | re.VERBOSE,
)

_SPACE = re.compile(r"[ \t\r\n]*")


class GrammarNotLark(Exception):
    """The text cannot be taken; the message says why, for the client."""


def prepared_lark(text: str, json_options: dict[str, Any]) -> str:
    """The grammar as the compiler is to get it. json_options: how its JSON is spelled (llguidance's `x-guidance`).

    Raises GrammarNotLark and SchemaRefused.
    """
    if "::=" in text and not is_lark_syntax(text):
        text = _from_gbnf(text)
    parts: list[str] = []
    at = rules = schemas = 0
    while (found := _PARTS.match(text, at)) is not None:
        part, at = found[0], found.end()
        if part == ":":
            rules += 1
        if part == "%json":
            schema, at = _schema_at(text, _SPACE.match(text, at).end())  # type: ignore[union-attr]  # matches nothing too
            part = f"%json {json.dumps({'x-guidance': json_options} | schema)}"
            schemas += 1
        parts.append(part)
        if rules > MAX_RULES or schemas > MAX_DIRECTIVE_SCHEMAS:
            raise GrammarNotLark(f"a grammar may have at most {MAX_RULES} rules and {MAX_DIRECTIVE_SCHEMAS} schemas")
    return "".join(parts)


def _from_gbnf(text: str) -> str:
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise GrammarNotLark("the grammar is nested too deeply") from None
    except Exception as error:
        raise GrammarNotLark(f"the grammar is not GBNF: {error}") from error


def _schema_at(text: str, at: int) -> tuple[dict[str, Any], int]:
    """The schema that begins at `at`, and where it ends."""
    try:
        schema, end = json.JSONDecoder().raw_decode(text, at)
    except RecursionError:
        raise SchemaRefused("a schema in the grammar is nested too deeply") from None
    except ValueError as error:
        raise GrammarNotLark(f"%json is not followed by JSON: {error}") from None
    check_schema(schema)
    if not isinstance(schema, dict):
        raise SchemaRefused("the schema of %json must be an object")
    return schema, end
