"""An executor without a network: its frames hold token ids, and a row's next token is a checksum of all it can read.

So a Sequence is right only if page tables, copies, chunks, feedback and preemption all are: one wrong frame and
every later token differs. `expected_output` says what a Sequence must produce, whatever runs beside it.

Who does not sample greedily has its seed in the checksum. Log-probabilities are made up from the same checksum: the
greedy token is the likeliest (`log_probabilities`). A row that needs its history has it here as an executor keeps it:
it is an error if that is not what the row's frames hold.
"""

import threading
import zlib
from collections.abc import Callable

import numpy as np
import torch
from simulated_device import JUNK, SimulatedDevice
from simulated_mover import SimulatedMover

from mm import MemoryManager, SwapOrders
from mm.backing_store import BackingStore
from model.executor import DeviceMemory
from model.step_plan import FED_BACK, Float32Array, LogProbs, SamplingParameters, StepPlan, StepResult
from service.beam_search import Hypothesis, Search
from service.engine_client import BeamSearch

VOCABULARY = 50


def next_token(tokens: list[int], vocabulary: int = VOCABULARY, seed: int | None = None) -> int:
    """seed: None for a greedy row."""
    start = 0 if seed is None else zlib.crc32(seed.to_bytes(8, "little"), 1)
    return zlib.crc32(np.array(tokens, np.int64).tobytes(), start) % vocabulary


def log_probabilities(tokens: list[int], vocabulary: int = VOCABULARY) -> Float32Array:
    """(V,) of the token after `tokens`: no two are equal, and the greedy one is the largest."""
    logits = np.random.default_rng(zlib.crc32(np.array(tokens, np.int64).tobytes())).random(vocabulary) * 4
    best = next_token(tokens, vocabulary)
    logits[best] += 4 - logits[best] + 0.1
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


def log_probs(lines: list[Float32Array], chosen: list[int], likeliest: int) -> LogProbs:
    """Of one token each, and of the `likeliest` likeliest, by lines of (V,)."""
    values = np.array(lines, np.float32).reshape(len(lines), -1)
    own = values[np.arange(len(lines)), chosen]
    order = np.argsort(-values, axis=1, kind="stable")[:, :likeliest]
    ranks = (values > own[:, None]).sum(axis=1) + 1
    return LogProbs(own, ranks.astype(np.int32), order.astype(np.int32), np.take_along_axis(values, order, axis=1))


def expected_output(
    prompt: list[int], max_tokens: int, end_ids: tuple[int, ...] = (), seed: int | None = None
) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, seed=seed))
        if tokens[-1] in end_ids:
            break
    return tokens[len(prompt) :]


class SimulatedTicket:
    def __init__(
        self, step: int, result: StepResult | Exception, gate: threading.Event, *, graph_hit: bool | None = None
    ) -> None:
        self.step = step
        self.graph_hit = graph_hit
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
    resizes_frames = True

    def __init__(self, memory: MemoryManager) -> None:
        self.device = SimulatedDevice(memory)
        self.frames = memory.frames.total
        self.last_tokens = np.full(memory.tables.max_rows, -99, np.int64)
        self.parameters = [SamplingParameters()] * memory.tables.max_rows
        self.histories: list[list[int]] = [[]] * memory.tables.max_rows
        self.plans: list[StepPlan] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fail_rows: Callable[[StepPlan], list[int]] = lambda plan: []  # places whose logits are not finite
        self.lacks_memory: Callable[[StepPlan], bool] = lambda plan: False
        self.error: Exception | None = None  # what the next step raises
        self.in_device: DeviceMemory | None = None
        self.graph_hit: Callable[[StepPlan], bool | None] = lambda plan: None
        self.is_closed = False
        self.resized: tuple[int, int] | None = None
        self.slots = self.ready_slots = memory.swap.total
        self.wanted_slots: list[int] = []
        self.mover = SimulatedMover(self.device)
        self.with_stores: dict[int, tuple[SwapOrders, BackingStore]] = {}  # copies to and from elsewhere
        self.end_swaps: Callable[[int], bool | None] = lambda ticket: True

    @property
    def device_memory(self) -> DeviceMemory | None:
        return self.in_device

    def submit(self, plan: StepPlan) -> SimulatedTicket:
        self.check(plan)
        self.plans.append(plan)
        self.device.carry_out(plan.orders)
        self.check_groups(plan)
        self.store(plan)
        if self.lacks_memory(plan):
            return SimulatedTicket(plan.step, StepResult.without_memory(plan), self.gate)
        tokens = np.full(len(plan.rows), -1, np.int32)
        for place, row in enumerate(plan.rows.tolist()):
            ids = plan.token_ids[plan.query_starts[place] : plan.query_starts[place + 1]].astype(np.int64)
            ids = np.where(ids == FED_BACK, self.last_tokens[row], ids)
            self.device.write(row, int(plan.starts[place]), ids.tolist())
            if plan.samples[place]:
                tokens[place] = self.sample(row, int(plan.lengths[place]))
                self.last_tokens[row] = tokens[place]
        failed = np.zeros(len(plan.rows), np.bool_)
        failed[self.fail_rows(plan)] = True
        result = StepResult(tokens, failed, self.logprobs(plan, tokens), self.scored(plan))
        return SimulatedTicket(plan.step, self.error or result, self.gate, graph_hit=self.graph_hit(plan))

    def store(self, plan: StepPlan) -> None:
        if (settings := plan.settings) is None:
            return
        for i, row in enumerate(settings.rows.tolist()):
            self.parameters[row] = settings.parameters[i]
            self.histories[row] = settings.histories[i].tolist()

    def sample(self, row: int, length: int) -> int:
        content, parameters = self.device.read(row, length), self.parameters[row]
        token = next_token(content, seed=None if parameters.is_greedy else parameters.seed)
        if parameters.needs_history:
            assert self.histories[row] == content, f"row {row} has another history than its tokens"
            self.histories[row].append(token)
        return token

    def logprobs(self, plan: StepPlan, tokens: np.ndarray) -> LogProbs | None:
        """Of the rows that sample and ask for them."""
        asking = [i for i, row in enumerate(plan.rows) if plan.samples[i] and self.parameters[row].logprobs >= 0]
        if not asking:
            return None
        lines = [log_probabilities(self.device.read(int(plan.rows[i]), int(plan.lengths[i]))) for i in asking]
        most = max(self.parameters[plan.rows[i]].logprobs for i in asking)
        return log_probs(lines, tokens[asking].tolist(), most)

    def scored(self, plan: StepPlan) -> LogProbs | None:
        if (scored := plan.scored) is None:
            return None
        where = np.searchsorted(plan.query_starts, scored.places, side="right") - 1
        lengths = plan.starts[where] + scored.places - plan.query_starts[where] + 1
        pairs = zip(plan.rows[where].tolist(), lengths.tolist(), strict=True)
        lines = [log_probabilities(self.device.read(row, length)) for row, length in pairs]
        return log_probs(lines, scored.targets.tolist(), scored.likeliest)

    def want_slots(self, slots: int) -> None:
        self.wanted_slots.append(slots)

    def resize(self, frames: int, slots: int) -> None:
        """Frames that are gone hold no tokens: who reads one reads nonsense."""
        self.ready_slots = slots
        self.resized = (frames, slots)
        self.device.pool[frames:] = -7

    def start(self, orders: SwapOrders, store: BackingStore | None = None) -> None:
        if store is None:
            self.mover.start(orders)
        else:
            self.with_stores[orders.ticket] = orders, store

    def new_store(self, pages: int) -> BackingStore:
        return BackingStore(pages, self.frame_bytes, page_locked=False)

    def swapped_page(self, slot: int) -> torch.Tensor:
        return self.raw(self.mover.slots[slot])

    def raw(self, tokens: np.ndarray) -> torch.Tensor:
        """A page's tokens as the bytes of a frame: the first numbers of it."""
        page = torch.zeros(self.frame_bytes // 8, dtype=torch.int64)
        page[: len(tokens)] = torch.from_numpy(tokens)
        return page.view(torch.uint8)

    def plain_pages(self, raw: torch.Tensor) -> torch.Tensor:
        """(N, 1, 2, 1, page_size, D): what is not a token is 0."""
        page_size = self.device.memory.page_size
        pages = torch.zeros(len(raw), 1, 2, 1, page_size, self.frame_bytes // 16 // page_size, dtype=torch.int64)
        pages[:, 0, 0, 0, :, 0] = raw.view(torch.int64)[:, :page_size]
        return pages

    def raw_pages(self, pages: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.raw(page.numpy()) for page in pages[:, 0, 0, 0, :, 0].contiguous()])

    def end_with_store(self, ticket: int, *, succeeds: bool) -> None:
        """What such a copy reads is read at its very end, and one that fails leaves junk."""
        orders, store = self.with_stores.pop(ticket)
        for frame, slot in zip(orders.out_frames.tolist(), orders.out_slots.tolist(), strict=True):
            store.slot(slot).copy_(self.raw(self.device.pool[frame]))
        for slot, frame in zip(orders.in_slots.tolist(), orders.in_frames.tolist(), strict=True):
            page = store.slot(slot).view(torch.int64)[: self.device.memory.page_size].numpy()
            self.device.pool[frame] = page if succeeds else JUNK

    def ended(self) -> list[tuple[int, bool]]:
        """`end_swaps` decides what ends now, of those in flight; without it all do, well."""
        ended: list[tuple[int, bool]] = []
        for ticket in list(self.mover.in_flight):
            if (succeeds := self.end_swaps(ticket)) is not None:
                self.mover.end(ticket, succeeds=succeeds)
        for ticket in list(self.with_stores):
            if (succeeds := self.end_swaps(ticket)) is not None:
                self.end_with_store(ticket, succeeds=succeeds)
                ended.append((ticket, succeeds))
        return [*self.mover.ended(), *ended]

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

    def check_groups(self, plan: StepPlan) -> None:
        """Members of a group decode, each in one group, and begin with the same frames, which are full."""
        if plan.groups is None:
            return
        groups = plan.groups
        assert len(np.unique(groups.members)) == len(groups.members)
        assert (groups.members < plan.decodes).all()
        for first, end, pages in zip(groups.starts[:-1], groups.starts[1:], groups.pages, strict=True):
            members = groups.members[first:end]
            assert len(members) > 1
            assert pages > 0
            assert (plan.starts[members] >= pages * self.device.memory.page_size).all()
            tables = self.device.tables[plan.rows[members], :pages]
            assert (tables == tables[0]).all()

    def use_idle_time(self) -> bool:
        return False

    def close(self) -> None:
        self.is_closed = True


def expected_beams(
    prompt: list[int], max_tokens: int, options: BeamSearch, end_ids: tuple[int, ...] = ()
) -> list[Hypothesis]:
    """What a beam search must give, best first: each beam computed from the start, without any memory."""
    search = Search(options, max_tokens, list(end_ids))
    beams = [list(prompt)]
    while not search.is_over:
        found = log_probs([log_probabilities(beam) for beam in beams], [0] * len(beams), search.candidates)
        step = search.advance(found.ids, found.values)
        beams = [[*beams[parent], token] for parent, token in zip(step.parents, step.tokens, strict=True)]
    return search.best(options.width)
