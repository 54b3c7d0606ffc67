"""docs/api.md says what the server has: every route, every field and where it stands, every error."""

import re
from pathlib import Path

import msgspec
import pytest

from service import errors
from service.openapi import OPERATIONS, STATUS_WORDS, document

GUIDE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
DESCRIPTION = msgspec.json.decode(document("0"))
LETTERS = {
    "C": "/v1/completions",
    "H": "/v1/chat/completions",
    "F": "/v1/requests/{id}/fork",
    "R": "/v1/responses",
    "T": "/tokenize",
}


def rows(first: str) -> list[list[str]]:
    """The cells of the table whose head begins so."""
    (table,) = re.findall(rf"^\| {first} \|.*\n\| ---.*\n((?:\|.*\n)+)", GUIDE, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def told() -> dict[str, list[str]]:
    """Route -> the fields that the guide has for it."""
    fields = {}
    for row in rows("route \\| as in its API"):
        (route,) = re.findall(r"`([^`]+)`", row[0])
        fields[route] = names(" ".join(row[1:]).replace("(= `n`)", ""))
    for row in rows("field"):
        for letter in row[3].split():
            fields[LETTERS[letter]] += names(row[0])
    return fields


def served() -> dict[str, list[str]]:
    """Route -> the fields of its body in /openapi.json."""
    schemas = DESCRIPTION["components"]["schemas"]
    bodies = {path: operation.body for (_, path), operation in OPERATIONS.items() if operation.body is not None}
    return {path: sorted(schemas[body.__name__]["properties"]) for path, body in bodies.items()}


def test_every_route_is_in_the_guide_and_no_other() -> None:
    routes = {f"{method.upper()} {path}" for path, methods in DESCRIPTION["paths"].items() for method in methods}
    assert set(re.findall(r"`((?:GET|POST|DELETE) /[^` ]*)`", GUIDE)) == routes


@pytest.mark.parametrize("route", sorted(served()))
def test_every_field_is_in_the_guide_once_where_it_is_served(route: str) -> None:
    assert sorted(told()[route]) == served()[route]


def test_no_other_route_has_fields() -> None:
    assert set(told()) == set(served())


def test_every_error_is_in_the_guide() -> None:
    def kinds(of: type[errors.PagewalkError]) -> set[tuple[int, str]]:
        return {(of.status, of.type)}.union(*(kinds(each) for each in of.__subclasses__()))

    told = {(int(row[0]), row[1].strip("`")) for row in rows("status")}
    assert told == kinds(errors.PagewalkError)
    assert {status for status, _ in told} >= set(STATUS_WORDS)
