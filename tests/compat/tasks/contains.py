"""The metric of pagewalk_questions."""

from typing import Any


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether the answer contains the word, in any case."""
    return {"contains_answer": float(doc["answer"].lower() in results[0].lower())}
