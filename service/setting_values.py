"""How values are written where a person sets something (4GiB, 25%), and help for those who mistype a name."""

import difflib
import math
import re
from collections.abc import Iterable


def parse_size(text: str) -> int:
    """Bytes from 4GiB, 512MiB, 1.5 GB, 1000000. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError("must be a size such as 4GiB or 512MiB")
    unit = (match[2] or "").lower()
    factor: int = (1024 if unit.endswith("i") else 1000) ** (" kmgt".index(unit[0]) if unit else 0)
    return math.floor(float(match[1]) * factor)


def parse_share(text: str) -> float:
    """0 ... 1 from 25%, 0.5 %. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if match is None or float(match[1]) > 100:
        raise ValueError("must be a share from 0% to 100%")
    return float(match[1]) / 100


def nearest(name: str, known: Iterable[str]) -> str:
    """ ", did you mean X?" for the end of an error message; empty where nothing is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    return f", did you mean {close[0]}?" if close else ""
