"""Which stop string ends a text, and what may be sent before that is known (docs/decisions/0004-stop-strings.md)."""

import copy
import re
from collections.abc import Sequence
from typing import NamedTuple, Self


class StopResult(NamedTuple):
    """What may be sent on, whether a stop string was found in it, and which."""

    text: str
    stopped: bool
    which: str | None


class StopMatcher:
    """Finds the first of several stop strings in text that comes in pieces, and holds back what may become one.

    The stop that is complete first in the text wins; of several that are complete at the same character, the longest.
    Generation ends there, so what a stop string could have become with more text never matters, and the result does not
    depend on where the pieces end. An Aho-Corasick automaton: each character is looked at once, however many stops.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        assert all(stops), "an empty stop string is refused before"
        self._include = include
        self._held = ""  # the longest end of the text so far that begins a stop
        self._found: str | None = None
        self._state = 0
        self._next: list[dict[str, int]] = [{}]  # per state: character -> state
        self._depth = [0]  # per state: characters of a stop that it stands for
        self._stop: list[str | None] = [None]  # per state: the longest stop that ends there
        self._shorter = [0]  # per state: the state of its longest proper suffix
        for stop in stops:
            self._add(stop)
        self._link()
        self._begins = re.compile("[" + "".join(map(re.escape, sorted(self._next[0]))) + "]") if stops else None

    def fresh(self) -> Self:
        """A matcher of the same stop strings for another text: the automaton is shared, since building it costs."""
        matcher = copy.copy(self)
        matcher._held, matcher._found, matcher._state = "", None, 0
        return matcher

    def push(self, text: str, *, may_stop: bool = True) -> StopResult:
        """Take the next piece. After a stop was found, nothing more is given.

        may_stop: whether a stop string that is complete in this piece counts. One that only begins in it may count
        later, so its text is held back in either case.
        """
        if self._begins is None:
            return StopResult(text, stopped=False, which=None)
        if self._found is not None:
            return StopResult("", stopped=True, which=self._found)
        state, at, end = self._state, 0, len(text)
        while at < end:
            if state == 0:  # skip to where a stop can begin
                begin = self._begins.search(text, at)
                if begin is None:
                    break
                at = begin.start()
            character = text[at]
            at += 1
            while state and character not in self._next[state]:
                state = self._shorter[state]
            state = self._next[state].get(character, 0)
            stop = self._stop[state]
            if stop is not None and may_stop:
                whole = self._held + text[:at]
                self._found, self._held = stop, ""
                return StopResult(whole if self._include else whole[: -len(stop)], stopped=True, which=stop)
        self._state = state
        whole = self._held + text
        sendable = len(whole) - self._depth[state]
        self._held = whole[sendable:]
        return StopResult(whole[:sendable], stopped=False, which=None)

    def flush(self) -> str:
        """What was held back: the output ended without a stop."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._stop.append(None)
                self._shorter.append(0)
            state = self._next[state][character]
        self._stop[state] = stop

    def _link(self) -> None:
        queue = list(self._next[0].values())  # breadth first: suffixes are shorter, so they are linked before
        for state in queue:
            for character, child in self._next[state].items():
                suffix = self._shorter[state]
                while suffix and character not in self._next[suffix]:
                    suffix = self._shorter[suffix]
                self._shorter[child] = self._next[suffix].get(character, 0)
                self._stop[child] = self._stop[child] or self._stop[self._shorter[child]]
                queue.append(child)
