"""How many examples a test draws: what CI has time for, or so many times that (`make test EXAMPLES=10`)."""

import os


def examples(count: int) -> int:
    return int(count * float(os.environ.get("EXAMPLES") or 1))
