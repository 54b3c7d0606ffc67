"""How much of the prompts goes into a step, so that no gap between two tokens exceeds a bound (--max-itl-ms).

Who decodes gets a token from every step, so the gap between two tokens is what one step takes. That is learned from the
steps before, as a sum over what they computed:

    seconds  =  a  +  b * decodes  +  c * keys that these read  +  d * prompt tokens  +  e * keys that those read

by least squares over recent steps; no part is negative. Steps with prompt tokens have a fit of their own: in hours of
decodes it would forget what a prompt costs. A fit answers with a margin that is exceeded in one step of thirty.

What is not known is tried in small portions: prompt tokens of a step, and decodes, at most double. And what no choice
could hold is not tried: a step always takes LEAST_CHUNK tokens of a prompt, and where one decode alone exceeds the
bound, all are admitted.

On a GPU steps of certain sizes are launched at once, and large ones of others kernel by kernel, which makes the host,
and the tokens of the step before, late: so large steps are cut to a size.

No clock is read here: durations are arguments.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from mm.addresses import FloatArray
from model.step_plan import StepPlan

LEAST_CHUNK = 16
"""Prompt tokens that a step takes at least, if there are any: prefill never stands still for decodes."""

FIRST_ROWS = 4
"""Sequences that are admitted before any has decoded."""

TARGET = 0.95
"""Share of the bound that steps are planned for."""

MEMORY_STEPS = 100
"""Steps that a fit looks back over: a step so long ago counts a third of the newest."""

RIDGE = 1e-3
"""Of the squares, on the diagonal. While all steps are alike it divides what they take among all parts equally: so what
more rows would cost is over- rather than underestimated, until some come.
"""

EXCEEDED, MARGIN_STEP = 1 / 30, 0.05
"""How often a step may take longer than its fit's answer, and how far one such step raises the margin."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes."""

    decodes: int
    decode_keys: int  # that the decodes read, all together
    prompt_tokens: int
    prompt_keys: float  # that each prompt token reads, all together

    @classmethod
    def of(cls, plan: StepPlan) -> "StepWork":
        """The work of a plan."""
        decodes, starts = plan.decodes, plan.starts
        counts = np.diff(plan.query_starts[decodes:])
        return cls(
            decodes=decodes,
            decode_keys=int(starts[:decodes].sum()) + decodes,
            prompt_tokens=plan.prefill_tokens,
            prompt_keys=float((counts * (starts[decodes:] + counts / 2)).sum()),
        )


class Fit:
    """seconds = coefficients . features, by least squares of relative errors over recent steps."""

    def __init__(self, features: int) -> None:
        self._squares: FloatArray = np.zeros((features, features))
        self._products: FloatArray = np.zeros(features)
        self._coefficients: FloatArray | None = np.zeros(features)  # None: to be solved for
        self._margin = 1.0

    def observe(self, features: FloatArray, seconds: float) -> None:
        """A step of these features took `seconds`, more than 0."""
        predicted = float(features @ self.coefficients)
        if predicted > 0:
            exceeds = seconds > predicted
            self._margin = max(1.0, self._margin + MARGIN_STEP * (exceeds - EXCEEDED))
        keep = 1 - 1 / MEMORY_STEPS
        relative = features / seconds
        self._squares = keep * self._squares + np.outer(relative, relative)
        self._products = keep * self._products + relative
        self._coefficients = None

    @property
    def coefficients(self) -> FloatArray:
        """(features,) seconds of one of each, the margin counted."""
        if self._coefficients is None:
            self._coefficients = self._solve()
        return self._coefficients * self._margin

    def _solve(self) -> FloatArray:
        """Least squares; whose coefficient would be negative is left out, the worst first."""
        scale = np.sqrt(np.diag(self._squares))
        used = np.flatnonzero(scale > 0)
        found: FloatArray = np.zeros(len(scale))
        while len(used):
            unit = scale[used]
            squares = self._squares[np.ix_(used, used)] / np.outer(unit, unit)
            solved = np.linalg.solve(squares + RIDGE * np.eye(len(used)), self._products[used] / unit) / unit
            if solved.min() >= 0:
                found[used] = solved
                break
            used = np.delete(used, int(np.argmin(solved * unit)))
        return found


@dataclass(slots=True)
class StepBudget:
    """What one step may still take of prompts. Without a `bound` only tokens are counted."""

    tokens: int
    bound: "TimeLeft | None" = None

    def grant(self, start: int, wanted: int) -> int:
        """How many of `wanted` tokens, which follow `start` computed ones, fit in. 0: none do."""
        most = min(wanted, self.tokens)
        return most if self.bound is None else self.bound.grant(start, most)

    def take(self, start: int, count: int) -> None:
        """So many are in."""
        self.tokens -= count
        if self.bound is not None:
            self.bound.take(start, count)


@dataclass(slots=True)
class TimeLeft:
    """The time that prompts may still take in one step, and what they cost."""

    seconds: float
    of_token: float
    of_key: float
    tokens: int = 0  # of the step so far
    sizes: tuple[int, ...] = ()  # ascending; a step of more tokens than the first is cut to one of them
    has_taken: bool = False

    def grant(self, start: int, most: int) -> int:
        """How many of `most` tokens fit. Of the first prompt LEAST_CHUNK always do; of others no fewer, or all."""
        fit = self._fit(start)
        if not self.has_taken:
            fit = max(fit, LEAST_CHUNK)
        return self._cut(min(fit, most)) if fit >= min(LEAST_CHUNK, most) else 0

    def take(self, start: int, count: int) -> None:
        self.seconds -= self.of_token * count + self.of_key * count * (start + count / 2)
        self.tokens += count
        self.has_taken = True

    def _cut(self, count: int) -> int:
        """So many, or as many fewer as make the step one of the sizes, if that leaves LEAST_CHUNK."""
        place = bisect_right(self.sizes, self.tokens + count)
        fewer = self.sizes[place - 1] - self.tokens if place else 0
        return fewer if fewer >= LEAST_CHUNK else count

    def _fit(self, start: int) -> int:
        """The largest n with of_token n + of_key n (start + n / 2) <= seconds."""
        if self.seconds <= 0:
            return 0
        linear, square = self.of_token + self.of_key * start, self.of_key / 2
        if square > 0:
            return math.floor((math.sqrt(linear**2 + 4 * square * self.seconds) - linear) / (2 * square))
        return math.floor(self.seconds / linear) if linear > 0 else 1 << 30


class Pace:
    """Plans steps for one bound, and learns from those that have ended."""

    def __init__(self, max_gap_s: float, step_sizes: tuple[int, ...] = ()) -> None:
        """step_sizes: tokens of a step, ascending: larger ones than the first are cut to one of them."""
        self._target_s, self._step_sizes = TARGET * max_gap_s, step_sizes
        self._decode = Fit(3)  # 1, decodes, keys
        self._mixed = Fit(5)  # 1, decodes, keys, prompt tokens, keys that these read
        self._largest = LEAST_CHUNK  # prompt tokens of one step so far
        self._most = FIRST_ROWS // 2  # decodes of one step so far

    def budget(self, tokens: int, decodes: int, decode_keys: int) -> StepBudget:
        """What prompts may take beside these decodes, and at most so many tokens."""
        if decodes == 0:
            return StepBudget(tokens)  # nobody waits for a next token
        base, of_decode, of_decode_key, of_token, of_key = self._mixed.coefficients.tolist()
        seconds = self._target_s - (base + of_decode * decodes + of_decode_key * decode_keys)
        left = TimeLeft(seconds, of_token, of_key, decodes, self._step_sizes)
        return StepBudget(min(tokens, 2 * self._largest), left)

    def allows(self, rows: int, keys: int) -> bool:
        """Whether so many rows may decode at once, which have so many keys together: whether a step of them keeps to
        the bound, or even one alone does not.
        """
        if rows > 2 * self._most:
            return False
        coefficients = self._decode.coefficients
        alone = float(coefficients @ np.array([1.0, 1, keys / rows]))
        together = float(coefficients @ np.array([1.0, rows, keys]))
        return together <= self._target_s or alone > self._target_s

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step has ended: so long after it was planned, or after the one before it if that was later."""
        if seconds <= 0:
            return
        self._most = max(self._most, work.decodes)
        features = [1.0, work.decodes, work.decode_keys]
        if work.prompt_tokens:
            self._mixed.observe(np.array([*features, work.prompt_tokens, work.prompt_keys]), seconds)
            self._largest = max(self._largest, work.prompt_tokens)
        else:
            self._decode.observe(np.array(features), seconds)
