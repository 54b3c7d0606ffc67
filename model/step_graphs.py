"""Which CUDA graphs of steps there are, which of them exist so far, and when the next one is captured.

A step replays the smallest graph that holds it, padded. A capture costs the host some milliseconds, and there are many,
so a start does not wait for all of them at any price:

    before the first request     FIRST sizes: whatever comes, a graph at most twice as large as the step is there, also
                                 for one prompt alone, whose logits are those of few; then others, for a bounded time
    while nothing runs           what is missing, one after the other; what a step would have taken comes first. Those
                                 that end with the logits, for steps with masks, are captured only then

Beside steps nothing is captured: tokens would be late by that. Where there is no memory for a graph, steps of its size
go without, and none is captured for RETRY_S.

It knows no torch: how a graph is captured is an argument, so the tests run it with made-up ones.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise
from typing import Protocol

DECODE_SIZES: tuple[int, ...] = (1, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176)
DECODE_SIZES += (208, 256, 288, 320, 384, 416, 512, 544, 640, 672, 800, 864, 928, 992, 1024)
"""Batch sizes of decode graphs. A batch is padded up to the next: at most a quarter, above 32. Those above 128 are what
cuBLAS is good at: a layer of 8B takes 508 to 520 us at 704, 736, 768 and 800 rows on an H200, and 437 at 448 but 344 at
512 (docs/decisions/0025-what-a-large-networks-time-is-spent-on.md)."""

SHARED_SIZES: tuple[int, ...] = (8, 16, 32, 48, 64, 96, 128, 160, 192, 256)
SHARED_SIZES += (320, 384, 512, 640, 768, 896, 1024)
"""Batch sizes of the decode graphs that read what Sequences begin with once for all of them (StepPlan.groups). Steps
without groups use the others, which lack the pass: in a graph an idle launch a layer costs 0.7 us."""

MIXED_TOKENS = (16, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512)
MIXED_SEQUENCES = (8, 64, 256)
"""Sizes of the graphs for steps with prefill: short prompts, and chunks beside decodes. Those of PROMPT hold as few
Sequences as the least of MIXED: where many come, nobody notices a decode kernel with nothing to do (2.8 us a layer).
"""

LARGE_TOKENS = (640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 6144)
"""And of larger ones, below a step's most tokens: of these and of that only steps that all but fill one take it.
Prompts that come faster than they are computed fill steps to the brim, and chunks that are cut for a bound on gaps are
cut to such a size (step_sizes). What is launched kernel by kernel holds the host up, for the driver takes only so many
launches ahead: it stands in the middle of the step, and the tokens of the step before are late by that (measured on an
H200: up to the whole step)."""

LEAST_FULL = 15 / 16
"""Of a large graph's tokens, for a step to take it."""

RETRY_S = 60.0
"""After a capture that found no memory: each try costs milliseconds, and what was full will be so for a while."""


def step_sizes(max_tokens: int) -> tuple[int, ...]:
    """Token counts, ascending, that steps with prefill are best cut to: up to the first there is a graph for each."""
    if max_tokens <= MIXED_TOKENS[-1]:
        return ()
    return MIXED_TOKENS[-1], *(size for size in LARGE_TOKENS if size < max_tokens), max_tokens


class Kind(Enum):
    """What a graph does."""

    DECODE = auto()
    SHARED = auto()  # decodes, of which some begin with the same frames
    MIXED = auto()  # prefill, and decodes
    PROMPT = auto()  # prefill alone; a step without its graph takes that of MIXED
    LOGITS = auto()  # decodes, up to their logits: their sampling waits for masks
    MIXED_LOGITS = auto()  # the same with prefill

    @property
    def samples(self) -> bool:
        return self not in (Kind.LOGITS, Kind.MIXED_LOGITS)

    @property
    def decodes(self) -> bool:
        return self is not Kind.PROMPT

    @property
    def prefills(self) -> bool:
        return self in (Kind.MIXED, Kind.PROMPT, Kind.MIXED_LOGITS)


def kind_of(*, decodes: int, sequences: int, is_masked: bool, reads_shared: bool) -> Kind:
    """Of a step with so many decodes among its Sequences. is_masked: its sampling waits for masks; reads_shared: its
    decodes begin with frames that are read once for all. Steps with prefill know no groups: every row reads for itself.
    """
    if decodes == sequences:
        return Kind.LOGITS if is_masked else Kind.SHARED if reads_shared else Kind.DECODE
    return Kind.MIXED_LOGITS if is_masked else Kind.MIXED if decodes else Kind.PROMPT


@dataclass(frozen=True, slots=True)
class GraphSize:
    """What a graph can hold."""

    kind: Kind
    tokens: int
    sequences: int
    weighs: bool = True  # rows may sample by more than their largest logits (cuda.sample): kernels that are idle else
    least_tokens: int = 0  # of a step that may take it

    def holds(self, tokens: int, sequences: int) -> bool:
        return self.least_tokens <= tokens <= self.tokens and self.sequences >= sequences


class Graph(Protocol):
    def replay(self) -> None: ...


def ladder(*, max_running: int, max_tokens: int, reads_shared: bool) -> Iterator[tuple[GraphSize, bool]]:
    """All sizes, of each kind ascending, and whether each is among the FIRST. Prompts alone come first, since who asks
    one thing after the other waits for nothing else; those that weigh before others: they hold the other steps, too.
    """
    token_sizes = [size for size in MIXED_TOKENS if size <= max_tokens]
    for tokens in token_sizes:
        yield GraphSize(Kind.PROMPT, tokens, min(MIXED_SEQUENCES[0], tokens, max_running)), False
    kinds = [(Kind.DECODE, DECODE_SIZES)] + ([(Kind.SHARED, SHARED_SIZES)] if reads_shared else [])
    for kind, batches in kinds:
        sizes = _up_to(batches, max_running)
        first = set(_doubling(sizes))
        for size in sizes:
            yield GraphSize(kind, size, size), size in first
    first = set(_doubling(token_sizes))
    mixed = [(tokens, size) for tokens in token_sizes for size in _up_to(MIXED_SEQUENCES, min(tokens, max_running))]
    for tokens, sequences in mixed:
        is_end = sequences in (min(MIXED_SEQUENCES[0], tokens, max_running), min(tokens, max_running))
        yield GraphSize(Kind.MIXED, tokens, sequences), tokens in first and is_end
    for tokens in step_sizes(max_tokens)[1:]:
        for sequences in _up_to(MIXED_SEQUENCES, min(tokens, max_running)):
            yield GraphSize(Kind.MIXED, tokens, sequences, least_tokens=math.ceil(LEAST_FULL * tokens)), False
    for kind, batches in kinds:
        for size in _up_to(batches, max_running):
            yield GraphSize(kind, size, size, weighs=False), False
    for size in _up_to(DECODE_SIZES, max_running):
        yield GraphSize(Kind.LOGITS, size, size), False
    for tokens, sequences in mixed:
        yield GraphSize(Kind.MIXED_LOGITS, tokens, sequences), False


def _up_to(sizes: Sequence[int], most: int) -> list[int]:
    """Those of ascending `sizes` that are below `most`, and `most`."""
    return [*(size for size in sizes if size < most), most]


def _doubling(sizes: list[int]) -> Iterator[int]:
    """As few of ascending `sizes` as are enough, so that the next one is at most twice the one before wherever there is
    such a one; the first and the last always.
    """
    if not sizes:
        return
    last = sizes[0]
    yield last
    for size, following in pairwise([*sizes[1:], 1 << 62]):
        if following > 2 * last:
            yield size
            last = size


class StepGraphs:
    """The graphs of one executor."""

    def __init__(
        self,
        sizes: Iterator[tuple[GraphSize, bool]],
        capture: Callable[[GraphSize], Graph | None],
        *,
        seconds: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """sizes: of each kind ascending, those that do not sample last. Graphs are captured at once of those whose
        second part is true; then of others that sample, until `seconds` have passed. capture: None if there is no
        memory for it.
        """
        began = clock()
        self._capture_one, self._clock = capture, clock
        self._next_try_s = began
        lists = [(kind, weighs) for kind in Kind for weighs in (False, True)]
        self._sizes: dict[tuple[Kind, bool], list[GraphSize]] = {each: [] for each in lists}
        self._graphs: dict[tuple[Kind, bool], dict[GraphSize, Graph]] = {each: {} for each in lists}  # ascending
        self._missing: dict[GraphSize, None] = {}
        self._missed: dict[GraphSize, None] = {}  # that steps would have taken, the latest last
        self._found: dict[tuple[Kind, int, int, bool], Graph | None] = {}  # answers, once no graph is missing
        for size, is_first in list(sizes):
            self._sizes[size.kind, size.weighs].append(size)
            self._missing[size] = None
            if is_first and self._may_try:
                self._capture(size)
        while any(size.kind.samples for size in self._missing) and clock() - began < seconds:
            if not self.capture_next():
                break

    @property
    def most(self) -> int:
        """Graphs that there may be."""
        return sum(map(len, self._sizes.values()))

    @property
    def captured(self) -> int:
        """Graphs that exist."""
        return sum(len(graphs) for graphs in self._graphs.values())

    def find(self, kind: Kind, tokens: int, sequences: int, *, weighs: bool) -> Graph | None:
        """The smallest graph that holds a step; of two one that does not weigh. None if it is larger than all sizes."""
        if self._missing:
            return self._look_up(kind, tokens, sequences, weighs=weighs)
        step = kind, tokens, sequences, weighs
        if step not in self._found:
            self._found[step] = self._look_up(kind, tokens, sequences, weighs=weighs)
        return self._found[step]

    def _look_up(self, kind: Kind, tokens: int, sequences: int, *, weighs: bool) -> Graph | None:
        best: tuple[GraphSize, Graph] | None = None
        lists = [(kind, True)] if weighs else [(kind, False), (kind, True)]
        if kind is Kind.PROMPT:
            lists.append((Kind.MIXED, True))
        if self._missing:
            holding = (size for each in lists for size in self._sizes[each] if size.holds(tokens, sequences))
            if (wanted := next(holding, None)) is not None and wanted in self._missing:
                self._missed.pop(wanted, None)
                self._missed[wanted] = None
        for each in lists:
            graphs = self._graphs[each].items()
            found = next(((size, graph) for size, graph in graphs if size.holds(tokens, sequences)), None)
            if found is not None and (best is None or found[0].tokens < best[0].tokens):
                best = found
        return None if best is None else best[1]

    def capture_next(self) -> bool:
        """Nothing runs: capture one that is missing. Returns whether more can be."""
        if self._missing and self._may_try:
            self._capture(next(reversed(self._missed)) if self._missed else next(iter(self._missing)))
        return bool(self._missing) and self._may_try

    @property
    def _may_try(self) -> bool:
        return self._clock() >= self._next_try_s

    def clear(self) -> None:
        """Let go of all graphs. No more are captured."""
        self._missing, self._missed, self._found = {}, {}, {}
        for graphs in self._graphs.values():
            graphs.clear()

    def _capture(self, size: GraphSize) -> None:
        graph = self._capture_one(size)
        if graph is None:
            self._next_try_s = self._clock() + RETRY_S
            return
        each = size.kind, size.weighs
        known = self._graphs[each] | {size: graph}
        self._graphs[each] = {size: known[size] for size in self._sizes[each] if size in known}
        del self._missing[size]
        self._missed.pop(size, None)
