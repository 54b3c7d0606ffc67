"""Bytes to a checked body. Decoding is validation, and every refusal is in our words, with the path.

msgspec refuses wrong types ("16" and 16.5 for an integer), NaN, invalid UTF-8 and lone surrogates. What it says is
turned into an error that names the field and echoes little of what the client sent.
"""

import difflib
import functools
import json
import re
from typing import Literal, TypeVar

import msgspec
from msgspec import inspect

from service.errors import BadRequest, quoted
from service.schema import Body

_LONE_SURROGATE_SEARCH_BYTES = 1 << 20  # a larger body is refused without naming the field

CLOSE = 0.8
"""How alike two names must be (difflib's ratio) for one to be suggested: a wrong guess is worse than none."""

B = TypeVar("B", bound=Body)
UnknownFields = Literal["refuse", "ignore"]


def decode(raw: bytes, kind: type[B], unknown_fields: UnknownFields = "refuse") -> tuple[B, list[str]]:
    """A checked body, and the names of unknown fields that were ignored (never any with "refuse").

    Raises BadRequest (malformed, wrong type, out of range, unknown field) or NotImplementedYet.
    """
    ignored: list[str] = []
    try:
        if unknown_fields == "ignore":
            names = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
            ignored = [name for name in names if name not in fields(kind)]
            for name in ignored:
                if name.startswith(_REMOVED):  # without its constraint an answer would be wrong in silence
                    raise _unknown_field(name, "", None, kind)
            body = msgspec.json.decode(raw, type=_lenient(kind))
        else:
            body = msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), kind) from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply.") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise _malformed(raw, str(error)) from None
    body.check()
    return body, ignored


@functools.cache
def fields(kind: type[Body]) -> frozenset[str]:
    """Names of all fields that `kind` declares."""
    return frozenset(kind.__struct_fields__)


@functools.cache
def _lenient(kind: type[B]) -> type[B]:
    """The same body, with unknown fields left out at the top level."""
    return msgspec.defstruct(  # type: ignore[return-value]
        kind.__name__, [], bases=(kind,), frozen=True, kw_only=True, forbid_unknown_fields=False
    )


_REMOVED = "guided_"  # how constrained output was once asked for elsewhere
_HOMES = {"prompt": "/v1/completions", "messages": "/v1/chat/completions", "input": "/v1/responses"}
"""What a request that came to the wrong route begins with."""

_PATH = re.compile(r" - at `(\$[^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_TYPES = re.compile(r"`([^`]*)`")
_WORDS = {
    "int": "integer",
    "float": "number",
    "str": "string",
    "bool": "boolean",
}  # not Python's names
_PART_KIND = re.compile(r"Invalid (?:enum )?value '(.*)'", re.DOTALL)
_ENUM = "Invalid enum value "
_STEP = re.compile(r"\.([A-Za-z0-9_]+)|\[[^\]]*\]")  # of a path: a field, or an item


def _refusal(message: str, kind: type[Body]) -> BadRequest:
    """msgspec's words as an error of ours: param is the top-level field, the message names the path."""
    found = _PATH.search(message)
    path = found[1] if found else ""
    words = message[: found.start()] if found else message
    top = re.match(r"\$\.([A-Za-z0-9_]+)", path)
    param = top[1] if top else None
    where = f" - at `{quoted(path)}`" if path else ""
    if unknown := _UNKNOWN.fullmatch(words):
        return _unknown_field(unknown[1], where, param, kind)
    if words.startswith("Expected `"):
        words = _TYPES.sub(lambda kinds: " or ".join(_WORDS.get(kind, kind) for kind in kinds[1].split(" | ")), words)
    if ".content[" in path and (part := _PART_KIND.fullmatch(words)):
        words = f"content parts of type {quoted(part[1])} are not served, only text"
    elif words.startswith(_ENUM) and (values := _values_at(kind, path)):
        words = f"{words}, not one of {', '.join(values)}"
    return BadRequest(f"{quoted(words)}{where}", param=param)


def _values_at(kind: type[Body], path: str) -> list[str]:
    """The values that a field of few may have; none if the path does not end at such a one."""
    types = [_type_info(kind)]
    for step in _STEP.finditer(path):
        types = [below for each in _alternatives(types) for below in _below(each, step[1])]
    values: set[str] = set()
    for each in _alternatives(types):
        if isinstance(each, inspect.LiteralType):
            values |= {str(value) for value in each.values}
        elif isinstance(each, inspect.IntType | inspect.FloatType):
            return []  # or any number
    return sorted(values)


_type_info = functools.cache(inspect.type_info)


def _alternatives(types: list[inspect.Type]) -> list[inspect.Type]:
    """Without unions and notes."""
    found: list[inspect.Type] = []
    for each in types:
        match each:
            case inspect.UnionType(inner):
                found += _alternatives(list(inner))
            case inspect.Metadata(inner):
                found += _alternatives([inner])
            case _:
                found.append(each)
    return found


def _below(kind: inspect.Type, name: str | None) -> list[inspect.Type]:
    """Of a field, or of an item where `name` is None."""
    match kind:
        case inspect.StructType():
            return [field.type for field in kind.fields if field.encode_name == name]
        case inspect.ListType():
            return [kind.item_type]
        case inspect.DictType():
            return [kind.value_type]
    return []


def _unknown_field(name: str, where: str, param: str | None, kind: type[Body]) -> BadRequest:
    if param is not None:  # inside of a field
        return BadRequest(f"unknown field `{quoted(name)}`{where}", param=param)
    shown = quoted(name)
    if name.startswith(_REMOVED):
        hint = " It was replaced by structured_outputs."
    elif name in _HOMES:
        hint = f" It belongs to {_HOMES[name]}."
    else:
        # the comparison is quadratic in the length of the name, which the client chooses
        nearest = difflib.get_close_matches(name[:64], fields(kind), n=1, cutoff=CLOSE)
        hint = f" Did you mean `{nearest[0]}`?" if nearest else ""
    return BadRequest(f"unknown field `{shown}`.{hint}", param=shown)


def _malformed(raw: bytes, reason: str) -> BadRequest:
    if not raw:
        return BadRequest("the body is empty: a JSON object is needed.")
    if re.search(rb"\\u[dD][89a-fA-F]", raw) and (path := _lone_surrogate(raw)):
        top = re.match(r"\$\.([A-Za-z0-9_]+)", path)
        message = f"text must not contain a lone surrogate - at `{quoted(path)}`"
        return BadRequest(message, param=top[1] if top else None)
    if raw.startswith(b"\xef\xbb\xbf"):
        reason = "it begins with a byte-order mark"
    return BadRequest(f"the body is not valid JSON: {quoted(reason)}")


def _lone_surrogate(raw: bytes) -> str | None:
    """Where a body that msgspec refused has a lone surrogate. The standard library decodes them."""
    if len(raw) > _LONE_SURROGATE_SEARCH_BYTES:
        return None
    try:
        return _find_surrogate(json.loads(raw), "$")
    except (ValueError, RecursionError):
        return None


def _find_surrogate(value: object, path: str) -> str | None:
    if isinstance(value, str):
        return path if any("\ud800" <= character <= "\udfff" for character in value) else None
    if isinstance(value, dict):
        children: list[tuple[object, str]] = []
        for key, child in value.items():
            if _find_surrogate(key, path):
                return path
            children.append((child, f"{path}.{key}"))
    elif isinstance(value, list):
        children = [(child, f"{path}[{i}]") for i, child in enumerate(value)]
    else:
        return None
    return next((found for child, where in children if (found := _find_surrogate(child, where))), None)
