"""An executor without a network: its frames hold token ids, and a row's next token is a checksum of all it can read.

So a Sequence is right only if page tables, copies, chunks, feedback and preemption all are: one wrong frame and
every later token differs. `expected_output` says what a Sequence must produce, whatever runs beside it.

Sampling parameters change no token. Log-probabilities are made up from the token that they are of (`made_up`), so a
test can say what must arrive wherever they are asked for.
"""

import threading
import zlib
from collections.abc import Callable

import numpy as np
from simulated_device import SimulatedDevice
from simulated_mover import SimulatedMover

from mm import MemoryManager, SwapOrders
from model.step_plan import FED_BACK, LogProbs, StepPlan, StepResult

VOCABULARY = 50


def next_token(tokens: list[int], vocabulary: int = VOCABULARY) -> int:
    return zlib.crc32(np.array(tokens, np.int64).tobytes()) % vocabulary


def expected_output(prompt: list[int], max_tokens: int, end_ids: tuple[int, ...] = ()) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in end_ids:
            break
    return tokens[len(prompt) :]


def made_up(tokens: list[int], likeliest: int, vocabulary: int = VOCABULARY) -> LogProbs:
    """Log-probabilities of tokens: token t has rank 1 + t % 3, and the token of rank r beside it is t + r - its rank.

    Rank r has the value -r / 4, which every format writes exactly.
    """
    chosen = np.array(tokens, np.int32)
    own = 1 + chosen % 3
    ranks = np.arange(1, likeliest + 1, dtype=np.int32)
    return LogProbs(
        chosen=(-own / 4).astype(np.float32),
        ranks=own.astype(np.int32),
        ids=((chosen - own)[:, None] + ranks).astype(np.int32) % vocabulary,
        values=np.tile((-ranks / 4).astype(np.float32), (len(chosen), 1)),
    )


class SimulatedTicket:
    def __init__(self, step: int, result: StepResult | Exception, gate: threading.Event) -> None:
        self.step = step
        self._result = result
        self._gate = gate

    def is_done(self) -> bool:
        return self._gate.is_set()

    def wait(self) -> StepResult:
        self._gate.wait()
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class SimulatedExecutor:
    """Runs a step when it is submitted; the result can be read once `gate` is open (it is, unless a test closes it)."""

    vocabulary = VOCABULARY
    frame_bytes = 1024
    polls = 0

    def __init__(self, memory: MemoryManager) -> None:
        self.device = SimulatedDevice(memory)
        self.frames = memory.frames.total
        self.last_tokens = np.full(memory.tables.max_rows, -99, np.int64)
        self.logprobs = np.full(memory.tables.max_rows, -1, np.int32)  # what each row asks for
        self.plans: list[StepPlan] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fail_rows: Callable[[StepPlan], list[int]] = lambda plan: []  # places whose logits are not finite
        self.error: Exception | None = None  # what the next step raises
        self.is_closed = False
        self.slots = self.ready_slots = memory.swap.total
        self.mover = SimulatedMover(self.device)
        self.end_swaps: Callable[[int], bool | None] = lambda ticket: True

    def submit(self, plan: StepPlan) -> SimulatedTicket:
        self.check(plan)
        self.plans.append(plan)
        self.device.carry_out(plan.orders)
        if plan.settings is not None:
            self.logprobs[plan.settings.rows] = [parameters.logprobs for parameters in plan.settings.parameters]
        tokens = np.full(len(plan.rows), -1, np.int32)
        for place, row in enumerate(plan.rows.tolist()):
            ids = plan.token_ids[plan.query_starts[place] : plan.query_starts[place + 1]].astype(np.int64)
            ids = np.where(ids == FED_BACK, self.last_tokens[row], ids)
            self.device.write(row, int(plan.starts[place]), ids.tolist())
            if plan.samples[place]:
                tokens[place] = next_token(self.device.read(row, int(plan.lengths[place])))
                self.last_tokens[row] = tokens[place]
        failed = np.zeros(len(plan.rows), np.bool_)
        failed[self.fail_rows(plan)] = True
        result = StepResult(tokens, failed, *self._log_probs(plan, tokens))
        return SimulatedTicket(plan.step, self.error or result, self.gate)

    def _log_probs(self, plan: StepPlan, tokens: np.ndarray) -> tuple[LogProbs | None, LogProbs | None]:
        """Of sampled tokens and of scored ones."""
        asking = plan.samples & (self.logprobs[plan.rows] >= 0)
        sampled = scored = None
        if asking.any():
            sampled = made_up(tokens[asking].tolist(), int(self.logprobs[plan.rows[asking]].max()))
        if plan.scored is not None:
            scored = made_up(plan.scored.targets.tolist(), plan.scored.likeliest)
        return sampled, scored

    def want_slots(self, slots: int) -> None: ...

    def start(self, orders: SwapOrders) -> None:
        self.mover.start(orders)

    def ended(self) -> list[tuple[int, bool]]:
        """`end_swaps` decides what ends now, of those in flight; without it all do, well."""
        for ticket in list(self.mover.in_flight):
            if (succeeds := self.end_swaps(ticket)) is not None:
                self.mover.end(ticket, succeeds=succeeds)
        return list(self.mover.ended())

    def check(self, plan: StepPlan) -> None:
        """What every executor may rely on."""
        assert len(np.unique(plan.rows)) == len(plan.rows)
        assert (np.diff(plan.query_starts) >= 1).all()
        assert (np.diff(plan.query_starts)[: plan.decodes] == 1).all()
        assert plan.samples[: plan.decodes].all()
        assert plan.query_starts[-1] == len(plan.token_ids)
        if (scored := plan.scored) is not None:
            assert len(scored.places) == len(scored.targets) > 0
            assert scored.places.max() < len(plan.token_ids)
        if plan.settings is not None and any(p.needs_history for p in plan.settings.parameters):
            assert len(plan.settings.prompts) == len(plan.settings.histories) == len(plan.settings.rows)

    def close(self) -> None:
        self.is_closed = True
