"""Constraints of any kind, mostly wrong: each is refused in words, or can be followed to its end."""

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tiny_tokenizer import END, tiny_tokenizer

from service.constraint import Constraint, StructuredOutputs, checked
from service.errors import BadRequest
from service.grammars import Grammar, GrammarRefused, Grammars
from service.json_schemas import KNOWN, SchemaRefused, check_schema

MOST_TOKENS = 40
ENDS = [END, 0]
EXAMPLES = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(tiny_tokenizer(), tiny_tokenizer().vocabulary, ENDS)
    yield made
    made.close()


numbers = (
    st.integers(-3, 9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([2**53, 2**63, -(2**63), -(10**30), 1e22, 1e300, -5e-324])
)
names = st.text(st.sampled_from('ab"\\/~$é\u2028\x00\U0001fae0'), max_size=3)
scalars = st.none() | st.booleans() | numbers | names
types = st.sampled_from(["object", "array", "string", "number", "integer", "boolean", "null", "text"])
references = st.sampled_from(["#", "#/$defs/a", "#/$defs/b", "#/properties/a", "#/~2", "http://x", "#/items/0"])
patterns = st.text(st.sampled_from("ab01.*+?()[]{},|^$\\dwsDbpu-=!:<>iéß\n\U0001fae0"), max_size=14)


def schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly right in form; values of any kind under any keyword else."""
    some = st.lists(inner, min_size=1, max_size=3)
    named = st.dictionaries(st.sampled_from(["a", "b", "é"]), inner, max_size=2)
    counts = st.integers(0, 4)
    right: dict[str, st.SearchStrategy[Any]] = {
        "type": types | st.lists(types, max_size=2), "enum": st.lists(scalars, max_size=3), "const": scalars,
        "properties": named, "$defs": named, "patternProperties": st.dictionaries(patterns, inner, max_size=1),
        "required": st.lists(st.sampled_from(["a", "b"]), max_size=2), "additionalProperties": inner, "items": inner,
        "prefixItems": some, "anyOf": some, "allOf": some, "oneOf": some, "$ref": references, "pattern": patterns,
        "minItems": counts, "maxItems": counts, "minLength": counts, "maxLength": counts, "minProperties": counts,
        "minimum": numbers, "maximum": numbers, "exclusiveMinimum": numbers, "multipleOf": numbers,
        "format": st.sampled_from(["date", "uuid", "email", "ipv4", "lunch"]),
    }  # fmt: skip
    wrong = st.dictionaries(st.sampled_from(sorted(KNOWN)) | names, scalars | inner, max_size=1)
    return st.builds(lambda good, bad: good | bad, st.fixed_dictionaries({}, optional=right), wrong)


any_schema = st.recursive(st.booleans() | st.just({}) | st.fixed_dictionaries({"type": types}), schemas, max_leaves=8)
words = [
    "start:",
    '"a"',
    "/b+/",
    "x",
    "|",
    "(",
    ")",
    "?",
    "*",
    "+",
    "{",
    "}",
    "%json {}",
    "\n",
    "::=",
    "[ab]",
    "~",
    "->",
]
lines = ['start: "a" x', "x: /[ab]+/", 'root ::= "a" | root', "%ignore / /", "start: start", 'x: ""', "%import x"]
rules = st.lists(st.lists(st.sampled_from(words), max_size=9).map(" ".join) | st.sampled_from(lines), max_size=4).map(
    "\n".join
)


def compiled(grammars: Grammars, constraint: Constraint) -> Grammar | None:
    """None for what is refused; any other error is a fault of ours."""
    try:
        return asyncio.run(_checked(grammars, constraint))
    except GrammarRefused:
        return None


async def _checked(grammars: Grammars, constraint: Constraint) -> Grammar:
    await grammars.check(constraint)
    return await grammars.compile(constraint)


def followed(grammar: Grammar, seed: int) -> str | None:
    """A text that it allows, drawn token by token; None if it is not over by then, or leads nowhere."""
    matcher, draw, tokens = grammar.start(ENDS), random.Random(seed), list[int]()
    mask = np.empty(matcher.mask_words, np.int32)
    for _ in range(MOST_TOKENS):
        matcher.fill(mask)
        if matcher.is_over:
            break
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        assert allowed, "a matcher that is not over lets something come"
        token = END if END in allowed else draw.choice(allowed)
        tokens.append(token)
        matcher.advance(token)
    assert matcher.error == "" or matcher.error.isprintable()
    if not matcher.is_complete:
        return None
    return tiny_tokenizer().decode([token for token in tokens if token not in ENDS], skip_special_tokens=False)


@EXAMPLES
@given(schema=any_schema | scalars | st.lists(scalars, max_size=2), seed=st.integers(0, 9))
def test_any_schema_is_refused_or_kept_to(grammars: Grammars, schema: Any, seed: int) -> None:
    grammar = compiled(grammars, Constraint("json_schema", json.dumps(schema)))
    text = None if grammar is None else followed(grammar, seed)
    if text is None:
        return
    value = json.loads(text, parse_int=lambda digits: int(digits) if abs(int(digits)) <= 2**53 else float(digits))
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError:
        assume(False)  # what it means is nobody's to say
    assert jsonschema.Draft202012Validator(schema).is_valid(value), (schema, text)


@EXAMPLES
@given(schema=any_schema | scalars)
def test_a_schema_is_looked_through_without_any_other_error(schema: Any) -> None:
    with suppress(SchemaRefused):
        check_schema(schema)


@EXAMPLES
@given(pattern=patterns, seed=st.integers(0, 9))
def test_any_expression_is_refused_or_can_be_followed(grammars: Grammars, pattern: str, seed: int) -> None:
    grammar = compiled(grammars, Constraint("regex", pattern))
    if grammar is not None:
        followed(grammar, seed)


@EXAMPLES
@given(grammar=rules, seed=st.integers(0, 9))
def test_any_grammar_is_refused_or_can_be_followed(grammars: Grammars, grammar: str, seed: int) -> None:
    found = compiled(grammars, Constraint("lark", grammar))
    if found is not None:
        followed(found, seed)


@EXAMPLES
@given(choice=st.lists(st.text(max_size=6), max_size=4), seed=st.integers(0, 9))
def test_any_choice_is_refused_or_one_of_it_comes(grammars: Grammars, choice: list[str], seed: int) -> None:
    try:
        constraint = checked(StructuredOutputs(choice=choice).constraint(), "structured_outputs")
    except BadRequest:
        return
    grammar = compiled(grammars, constraint)
    if grammar is not None and (text := followed(grammar, seed)) is not None:
        assert text in choice
