"""Workloads: rows of a JSONL file, and the prompts that they stand for.

A row has id, seed, prompt_len and output_len, and may have n (continuations) and prefix_id, prefix_len (a prompt's
first prefix_len tokens are those of every row with that prefix_id). Prompts are token ids from Python's own generator,
so every server that is compared gets the same ones.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "workloads"


@dataclass(frozen=True)
class Item:
    """One request of a workload."""

    prompt_ids: list[int]
    output_len: int
    n: int


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.jsonl"))


def path_of(name: str) -> Path:
    """The file of a workload: by its name, or the path that was given."""
    return Path(name) if name.endswith(".jsonl") else FOLDER / f"{name}.jsonl"


def load(name: str, vocabulary: int, limit: int | None = None) -> list[Item]:
    """The first `limit` rows of a workload, by its name or its file's path."""
    rows = [json.loads(line) for line in path_of(name).read_text().splitlines()[:limit]]
    return [Item(prompt_ids(row, vocabulary), row["output_len"], row.get("n", 1)) for row in rows]


def prompt_ids(row: dict[str, int], vocabulary: int) -> list[int]:
    prefix_len = row.get("prefix_len", 0)
    prefix = random_ids(row["prefix_id"], prefix_len, vocabulary) if prefix_len else []
    return prefix + random_ids(row["seed"], row["prompt_len"] - prefix_len, vocabulary)


def random_ids(seed: int, count: int, vocabulary: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(vocabulary) for _ in range(count)]
