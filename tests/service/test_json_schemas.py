"""Which schemas are taken, before any compiler sees them."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from service.json_schemas import MAX_DEPTH, SchemaRefused, check_schema

TEXT: dict[str, Any] = {"type": "string"}


def chain(length: int) -> dict[str, Any]:
    """`length` references, each to the next definition."""
    defined: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length - 1)}
    return {"$ref": "#/$defs/d0", "$defs": {**defined, f"d{length - 1}": TEXT}}


def nested(levels: int, around: Callable[[Any], Any]) -> Any:
    schema: Any = TEXT
    for _ in range(levels - 1):
        schema = around(schema)
    return schema


AROUND: dict[str, Callable[[Any], Any]] = {
    "properties": lambda inner: {"type": "object", "properties": {"a": inner}},
    "items": lambda inner: {"type": "array", "items": inner},
    "anyOf": lambda inner: {"anyOf": [{"type": "null"}, inner]},
    "prefixItems": lambda inner: {"prefixItems": [inner]},
    "patternProperties": lambda inner: {"patternProperties": {"^a": inner}},
    "additionalProperties": lambda inner: {"additionalProperties": inner},
    "$defs": lambda inner: {"$defs": {"a": inner}},
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_levels_are_counted_whatever_they_are_made_of(around: Callable[[Any], Any]) -> None:
    check_schema(nested(MAX_DEPTH, around))
    for levels in (MAX_DEPTH + 1, 1000, 50_000):
        with pytest.raises(SchemaRefused, match="64 levels"):
            check_schema(nested(levels, around))


def test_levels_are_counted_through_references() -> None:
    check_schema(chain(MAX_DEPTH - 1))
    for length in (MAX_DEPTH, 1000, 20_000):
        with pytest.raises(SchemaRefused, match="64 levels"):
            check_schema(chain(length))


def test_schemas_may_be_recursive() -> None:
    check_schema({"type": "object", "properties": {"next": {"$ref": "#"}}})
    tree = {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}
    check_schema({"$ref": "#/$defs/tree", "$defs": {"tree": tree}})
    check_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}})


def test_a_schema_that_is_named_often_is_looked_at_once() -> None:
    """Else 2 to the 60 paths would be walked."""
    defined: dict[str, Any] = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(20)
    }
    check_schema({"$ref": "#/$defs/d0", "$defs": {**defined, "d20": TEXT}})


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("x", "object or a boolean"), ([], "object or a boolean"), (None, "object or a boolean"),
        ({"properties": {"a": "x"}}, "$.properties.a"),
        ({"properties": []}, "properties must be an object"),
        ({"anyOf": []}, "at least one schema"), ({"anyOf": {}}, "at least one schema"),
        ({"items": [TEXT]}, "prefixItems"),
        ({"type": "object", "properties": {"a": {"nullable": True}}}, "nullable"),
        ({"not": {}}, "not"), ({"uniqueItems": True}, "uniqueItems"), ({"x-guidance": {}}, "x-guidance"),
        ({"properties": {"a": {"$id": "x"}}}, "$id"), ({"$dynamicRef": "#"}, "$dynamicRef"),
        ({"$ref": "http://example.org/s.json"}, "$ref"), ({"$ref": "#a"}, "$ref"), ({"$ref": 3}, "$ref"),
        ({"$ref": "#/$defs/none"}, "leads nowhere"), ({"$ref": "#/anyOf/7", "anyOf": [{}]}, "leads nowhere"),
        ({"$ref": "#/title", "title": "t"}, "object or a boolean"),
        ({"multipleOf": 999_983}, "least common multiple"),
        ({"allOf": [{"multipleOf": 997}, {"multipleOf": 0.991}]}, "least common multiple"),
        ({"multipleOf": 0}, "above 0"), ({"multipleOf": "3"}, "above 0"), ({"multipleOf": True}, "above 0"),
        ({"anyOf": [{"multipleOf": 10**11 + i} for i in range(3000)]}, "least common multiple"),
        ({"const": -(2**63)}, "$.const"), ({"enum": [1, {"a": [2**53 + 1]}]}, "$.enum"),
        ({"properties": {"a": {"const": 10**30}}}, "$.properties.a.const"),
        ({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}, "$.minimum"),
        ({"type": "integer", "maximum": -(10**400)}, "$.maximum"),
        ({"allOf": [{"exclusiveMinimum": -9.3e18}, {"type": "integer"}]}, "$.allOf[0].exclusiveMinimum"),
        ({"exclusiveMaximum": -(2**63) + 512}, "$.exclusiveMaximum"),
    ],
)  # fmt: skip
def test_what_would_not_be_kept_to_is_refused_with_its_place(schema: Any, words: str) -> None:
    with pytest.raises(SchemaRefused) as refused:
        check_schema(schema)
    assert words in str(refused.value)
    assert len(str(refused.value)) < 500


def test_every_keyword_that_is_kept_to_is_taken() -> None:
    check_schema(True)
    check_schema({"enum": [2**53, -(2**53), 1e300, True, "9223372036854775808"], "default": 2**63})
    check_schema({"type": "integer", "minimum": -(2**63) + 1024, "maximum": 2**63 - 1})
    check_schema(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "x", "title": "t", "description": "d",
            "default": {"not": "looked at"}, "examples": [{"items": []}], "$comment": "c", "deprecated": False,
            "type": ["object", "null"], "required": ["a"], "minProperties": 1, "maxProperties": 9,
            "properties": {
                "a": {"type": "array", "prefixItems": [TEXT], "items": False, "minItems": 1, "maxItems": 2},
                "b": {"type": "number", "minimum": 0, "exclusiveMaximum": 9, "multipleOf": 0.25},
                "c": {"type": "string", "minLength": 1, "maxLength": 2, "pattern": "a", "readOnly": True},
                "d": {"enum": [1, {"items": []}]}, "e": {"const": {"not": 1}}, "f": {"format": "date"},
                "g~/%": {"$ref": "#/properties/g~0~1%25/definitions/h", "definitions": {"h": TEXT}},
            },
            "additionalProperties": {"oneOf": [TEXT, {"type": "null"}]}, "allOf": [True],
        }
    )  # fmt: skip


def test_a_refusal_names_a_long_path_in_short() -> None:
    schema = json.loads('{"properties": {"%s": {"foo": 1}}}' % ("x" * 5000))
    with pytest.raises(SchemaRefused) as refused:
        check_schema(schema)
    assert len(str(refused.value)) < 300
