"""Which JSON Schemas are taken: keywords that are kept to, or that say nothing about a value, nested to a depth.

The compiler (llguidance) passes over keywords that it does not know, and follows references by recursion. So both are
looked at before it sees a schema: a keyword that would be ignored is refused, and so is depth. Nothing here recurses.
"""

from collections.abc import Iterator
from fractions import Fraction
from math import lcm
from typing import Any, cast
from urllib.parse import unquote

from service.errors import quoted

MAX_DEPTH = 64
"""Levels of a schema: schemas in schemas, counted through references. A reference back to a schema that is around it
adds none, so schemas may be recursive."""

MAX_MULTIPLE = 100_000
"""Of the least common multiple of all multipleOf in a schema, in units of their last decimal: the compiler counts
remainders one by one, and keeps 350 bytes of each."""

MOST_EXACT = 2**53
"""Of an integer that a value may have: the compiler reads numbers as doubles, so a larger one would not be kept to. On
-2**63 it recurses without end, which no limit of its own stops.
"""

LEAST_BOUND = -(2**63) + 512
"""What a bound of numbers must be above: the compiler takes any that is not for -2**63, and where an integer can be
nothing else it recurses without end, too.
"""

BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})  # names -> schemas
LISTS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
SINGLE = frozenset({"items", "additionalProperties"})
PLAIN = frozenset({"type", "enum", "const", "required", "pattern", "format", "multipleOf", "$ref"})
PLAIN |= {"minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength"}
PLAIN |= {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$comment"})
ANNOTATIONS |= {"deprecated", "readOnly", "writeOnly"}
OF_THE_ROOT = frozenset({"$schema", "$id"})
KNOWN = OF_SCHEMAS | LISTS | SINGLE | PLAIN | ANNOTATIONS


class SchemaRefused(Exception):
    """The schema cannot be kept to; the message says why and where, for the client."""


def check_schema(root: Any) -> None:
    """`root`: what a JSON text was decoded to. Raises SchemaRefused."""
    multiples: list[Fraction] = []
    heights: dict[int, int] = {}  # of schemas that are done, by identity
    open_: dict[int, int] = {}  # those that are being looked at, outermost first -> their height so far
    stack: list[tuple[Any, Iterator[tuple[Any, str]]]] = []

    def enter(schema: Any, path: str) -> None:
        stack.append((schema, _subschemas(schema, path, root)))
        if isinstance(schema, dict) and "multipleOf" in schema:
            multiples.append(_multiple(schema["multipleOf"], path))
        open_[id(schema)] = 1

    enter(root, "$")
    while stack:
        schema, inside = stack[-1]
        found = next(inside, None)
        if found is None:
            stack.pop()
            height = heights[id(schema)] = open_.pop(id(schema))
            if stack:
                parent = id(stack[-1][0])
                open_[parent] = max(open_[parent], height + 1)
            continue
        child, where = found
        if id(child) in open_:
            continue  # a reference to what is around it
        if (known := heights.get(id(child))) is not None:
            open_[id(schema)] = max(open_[id(schema)], known + 1)
        else:
            enter(child, where)
        if len(stack) > MAX_DEPTH or open_[id(schema)] > MAX_DEPTH:
            raise SchemaRefused(f"the schema is nested more than {MAX_DEPTH} levels deep")

    unit = lcm(*(each.denominator for each in multiples))
    if lcm(*(int(each * unit) for each in multiples)) > MAX_MULTIPLE:
        raise SchemaRefused(f"the least common multiple of all multipleOf is above {MAX_MULTIPLE}")


def _multiple(value: Any, path: str) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise SchemaRefused(f"multipleOf must be a number above 0, got {quoted(value, 40)} - at `{_short(path)}`")
    return Fraction(repr(value))


def _subschemas(schema: Any, path: str, root: Any) -> Iterator[tuple[Any, str]]:
    """The schemas directly in one, and the one that it refers to, with their paths. Raises SchemaRefused."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise SchemaRefused(f"a schema must be an object or a boolean, got {quoted(schema, 40)} - at `{_short(path)}`")
    for keyword, value in schema.items():
        here = f"{path}.{keyword}"
        if keyword not in KNOWN and not (schema is root and keyword in OF_THE_ROOT):
            raise SchemaRefused(f"the keyword {quoted(keyword, 40)} is not supported - at `{_short(path)}`")
        if keyword in OF_SCHEMAS:
            if not isinstance(value, dict):
                raise SchemaRefused(f"{keyword} must be an object - at `{_short(here)}`")
            yield from ((each, f"{here}.{name}") for name, each in value.items())
        elif keyword in LISTS:
            if not isinstance(value, list) or not value:
                raise SchemaRefused(f"{keyword} must be a list of at least one schema - at `{_short(here)}`")
            yield from ((each, f"{here}[{i}]") for i, each in enumerate(value))
        elif keyword in SINGLE:
            if isinstance(value, list):
                raise SchemaRefused(f"{keyword} must be a schema, not a list: use prefixItems - at `{_short(here)}`")
            yield value, here
        elif keyword in ("const", "enum"):
            _check_integers(value, here)
        elif keyword in BOUNDS:
            if isinstance(value, int | float) and value <= LEAST_BOUND:
                raise SchemaRefused(f"bounds are kept to above -2**63, got {quoted(value, 40)} - at `{_short(here)}`")
        elif keyword == "$ref":
            yield _referred(value, root, here), here


def _check_integers(value: Any, path: str) -> None:
    """Raises SchemaRefused for one that would not be kept to, wherever it stands in the value."""
    stack = [value]
    while stack:
        found = stack.pop()
        if isinstance(found, dict):
            stack += found.values()
        elif isinstance(found, list):
            stack += found
        elif isinstance(found, int) and abs(found) > MOST_EXACT:
            raise SchemaRefused(f"integers are kept to up to 2**53, got {quoted(found, 40)} - at `{_short(path)}`")


def _referred(reference: Any, root: Any, path: str) -> Any:
    """The schema that a $ref names: "#", or "#/" and a JSON pointer (RFC 6901). Raises SchemaRefused."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise SchemaRefused(f'$ref must be "#" or begin with "#/", got {quoted(reference, 80)} - at `{_short(path)}`')
    at = root
    for step in reference.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(at, list) and name.isdecimal() and len(name) < 10 and int(name) < len(at):
            at = at[int(name)]
        elif isinstance(at, dict) and name in at:
            at = cast(dict[str, Any], at)[name]
        else:
            raise SchemaRefused(f"$ref {quoted(reference, 80)} leads nowhere - at `{_short(path)}`")
    return at


def _short(path: str) -> str:
    return path if len(path) <= 120 else f"{path[:60]}…{path[-60:]}"
