"""Values of every kind of JSON, for fields that want another."""

from typing import Any

VALUES = ["x", -1, 0, 1, 1.5, 2**31, 2**63, 10**12, "5", True, False, [], [1], ["x"], {}, {"a": {"b": []}}, [[]], ""]


def is_in(value: Any, values: list[Any]) -> bool:
    """True is not 1 here."""
    return any(type(value) is type(other) and value == other for other in values)
