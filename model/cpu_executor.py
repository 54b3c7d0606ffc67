"""Carries plans out on the CPU, in one worker thread, in order of submission.

Owns: the pool, the page tables, each row's last token and sampling settings, and the thread. What a step does, in
order: page copies, page table changes, settings, forward pass, sampling. The caller's thread only puts plans into a
queue, so an asyncio loop stays free while torch computes (torch lets go of the interpreter lock inside its operators).
Where there is no memory for all tokens of a step at once, the network runs by parts (step_parts.py).

Trap: OpenMP threads that spin while they wait make steps 5-20 times slower on a machine with other work. The entry
point sets OMP_WAIT_POLICY=PASSIVE before torch is imported; afterwards it is too late.
"""

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mm.addresses import PAGE_SIZE, BoolArray
from mm.backing_store import BackingStore
from mm.page_copies import MemoryOrders, SwapOrders
from model.batch import forward_batch
from model.config import ModelConfig
from model.cpu_kernels import CpuKernels
from model.cpu_threads import ThreadCounts, choose_threads, usable_cores
from model.kernels import SCORED_AT_ONCE
from model.kv_pool import KvPool, frame_bytes
from model.log_probs import joined, log_probs
from model.native_kernels import NativeKernels
from model.out_of_memory import in_parts, is_out_of_memory
from model.parameters import Parameters
from model.sampler import Sampled, sample
from model.sampling_rows import SamplingRows
from model.step_parts import Computed, halves, rejoined
from model.step_plan import LogProbs, ScoredTokens, StepPlan, StepResult
from model.token_masks import TokenMasks, mask_words

WARN_S = 30.0

log = logging.getLogger("pagewalk.executor")


class CpuTicket:
    """`model.step_plan.Ticket`: set by the worker when the step is done or has failed."""

    graph_hit = None

    def __init__(self, step: int) -> None:
        self.step = step
        self._done = threading.Event()
        self._result: StepResult | None = None
        self._error: BaseException | None = None

    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> StepResult:
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def finish(self, result: StepResult | None, error: BaseException | None = None) -> None:
        """Called once, by the worker."""
        self._result, self._error = result, error
        self._done.set()


class _Unsampled(NamedTuple):
    """A step up to its sampling."""

    ticket: CpuTicket
    computed: Computed


class CpuExecutor:
    """`model.executor.Executor` in torch. Takes the parameters over: they are repacked in place."""

    resizes_frames = True
    step_sizes: tuple[int, ...] = ()
    polls = 0  # a step takes milliseconds: let a thread wait

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        *,
        frames: int,
        max_rows: int,
        max_pages: int,
        page_size: int = PAGE_SIZE,
        threads: int | None = None,
        slots: int = 0,
        native: ctypes.CDLL | None = None,
    ) -> None:
        """frames: of the pool; max_rows: Sequences that run at once; max_pages: of one Sequence; threads: None to
        choose by measurement (`model.cpu_threads`); slots: frames that fit into the swap area; native: the compiled
        kernels (`model.native_library.load`), None to compute in torch.
        """
        dtype = parameters.embedding.dtype
        self.frames = frames
        self.frame_bytes = frame_bytes(config, dtype, page_size)
        self.vocabulary = config.vocabulary
        self.pool = KvPool(config, dtype, frames=frames, page_size=page_size)
        self.slots = slots
        self._store = BackingStore(slots, self.frame_bytes, page_locked=False)
        self._moved: deque[tuple[int, bool]] = deque()
        self._parameters = parameters
        self._kernels = CpuKernels(config, self.pool) if native is None else NativeKernels(config, self.pool, native)
        self._tables = np.zeros((max_rows, max_pages), np.int32)
        self._last_tokens = np.zeros(max_rows, np.int32)
        self._settings = SamplingRows.greedy(max_rows)
        self.masks = np.empty((max_rows, mask_words(config.vocabulary)), np.int32)  # takes memory when touched
        self._failure: BaseException | None = None  # of work that is no step
        self._next_warning_s = 0.0
        self._unsampled: _Unsampled | None = None  # a step that waits for `sample`
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = False
        self._worker = threading.Thread(target=self._work, name="cpu-executor", daemon=True)
        with torch.inference_mode():
            self._kernels.prepare(parameters)
            self.threads = self._choose_threads(threads)
        self._worker.start()

    @property
    def device_memory(self) -> None:
        return None

    def submit(self, plan: StepPlan) -> CpuTicket:
        """Enqueue one step and return at once. Raises RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError("the executor is closed")
        ticket = CpuTicket(plan.step)
        self._queue.put(partial(self._run, plan, ticket))
        return ticket

    def sample(self, plan: StepPlan) -> None:
        """Enqueue the sampling of the masked step submitted last. Raises RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError("the executor is closed")
        self._queue.put(partial(self._run_sampling, plan))

    @property
    def ready_slots(self) -> int:
        return self._store.ready_slots

    def want_slots(self, slots: int) -> None:
        """BackingStore.want."""
        self._store.want(slots)

    def start(self, orders: SwapOrders, store: BackingStore | None = None) -> None:
        """Enqueue swap copies, behind the steps submitted so far. Raises RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError("the executor is closed")
        if len(orders):
            self._queue.put(partial(self._swap, orders, self._store if store is None else store))

    def new_store(self, pages: int) -> BackingStore:
        """Ordinary memory."""
        return BackingStore(pages, self.frame_bytes, page_locked=False)

    def swapped_page(self, slot: int) -> Tensor:
        """BackingStore.slot."""
        return self._store.slot(slot)

    def plain_pages(self, raw: Tensor) -> Tensor:
        """Frames are plain here."""
        return raw.view(self.pool.data.dtype).view(-1, *self.pool.data.shape[1:])

    def raw_pages(self, pages: Tensor) -> Tensor:
        """The same bytes."""
        return pages.contiguous().view(torch.uint8).view(len(pages), self.frame_bytes)

    def resize(self, frames: int, slots: int) -> None:
        """Memory is taken when it is touched, so only giving it back is work."""
        self._store.resize(slots)
        self._queue.put(partial(self.pool.give_back, frames))

    def ended(self) -> list[tuple[int, bool]]:
        """Tickets of swap orders that have ended, and whether they succeeded.

        Raises RuntimeError if the worker has failed beside a step: whoever waits for that would wait forever.
        """
        if self._failure is not None:
            raise RuntimeError("the executor's worker has failed") from self._failure
        return [self._moved.popleft() for _ in range(len(self._moved))]

    def use_idle_time(self) -> bool:
        """There is nothing to make ready."""
        return False

    def close(self) -> None:
        """Finish what is enqueued, then end the thread. Idempotent."""
        self._store.close()
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        self._worker.join()
        self._kernels.close()

    # --- In the worker thread ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 (told by `ended`)
                self._failure = error

    def _swap(self, orders: SwapOrders, store: BackingStore) -> None:
        self._moved.append((orders.ticket, self._move(orders, store)))

    def _run(self, plan: StepPlan, ticket: CpuTicket) -> None:
        try:
            torch.set_num_threads(self.threads.of(len(plan.token_ids)))  # of this thread only, OpenMP sees to that
            self._carry_out_orders(plan)
            self._finish_or_fail(plan, ticket, partial(self._compute_and_end, plan, ticket))
        except BaseException as error:  # noqa: BLE001 (whoever waits for the step decides what its failure means)
            ticket.finish(None, error)

    def _compute_and_end(self, plan: StepPlan, ticket: CpuTicket) -> StepResult | None:
        """None if the sampling is still to come."""
        computed = self._compute(plan)
        if plan.masked is None:
            return self._end(plan, computed, None)
        self._unsampled = _Unsampled(ticket, computed)
        return None

    def _finish_or_fail(self, plan: StepPlan, ticket: CpuTicket, work: Callable[[], StepResult | None]) -> None:
        """Where there is no memory even for parts of a step, its rows fail: others go on."""
        try:
            if (result := work()) is not None:
                ticket.finish(result)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._warn("no memory for a step of %d tokens, not even in parts: its requests end", plan)
            ticket.finish(StepResult.without_memory(plan))

    def _run_sampling(self, plan: StepPlan) -> None:
        unsampled, self._unsampled = self._unsampled, None
        if unsampled is None or plan.masked is None:
            return  # it has failed before
        try:
            places = np.cumsum(plan.samples)[plan.masked] - 1
            masks = TokenMasks(places, self.masks[: len(places)])
            self._finish_or_fail(plan, unsampled.ticket, partial(self._end, plan, unsampled.computed, masks))
        except BaseException as error:  # noqa: BLE001 (as above)
            unsampled.ticket.finish(None, error)

    def _warn(self, words: str, plan: StepPlan) -> None:
        """At most once in WARN_S: where memory is short it is so for many steps."""
        if time.monotonic() >= self._next_warning_s:
            self._next_warning_s = time.monotonic() + WARN_S
            log.warning(words, len(plan.token_ids))

    def _choose_threads(self, asked: int | None) -> ThreadCounts:
        if asked:
            return ThreadCounts(asked, asked, asked)
        before = torch.get_num_threads()
        chosen = choose_threads(usable_cores(), self._step_time)
        torch.set_num_threads(before)
        return chosen

    def _step_time(self, threads: int, rows: int) -> float:
        """Seconds of a decode step of so many rows, each with its first token: the best of three.

        Before the first plan: all rows write to frame 0, which is zeroed again.
        """
        rows = min(rows, len(self._tables))
        numbers = np.arange(rows + 1, dtype=np.int32)
        zeros, all_sample = np.zeros(rows, np.int32), np.ones(rows, np.bool_)
        plan = StepPlan(-1, MemoryOrders(), None, numbers[:-1], zeros, numbers, zeros, all_sample, decodes=rows)
        torch.set_num_threads(threads)
        times = []
        for _ in range(4):  # the first one wakes the threads and makes oneDNN's kernels
            begun = time.perf_counter()
            self._end(plan, self._compute(plan), None)
            times.append(time.perf_counter() - begun)
        self.pool.data[0].zero_()
        self._last_tokens[:] = 0
        return min(times[1:])

    def _move(self, orders: SwapOrders, store: BackingStore) -> bool:
        """Carry swap orders out. False, and nothing is moved, if a slot has no memory behind it."""
        highest = max(orders.out_slots.max(initial=-1), orders.in_slots.max(initial=-1))
        if highest >= store.ready_slots:
            return False
        for frame, slot in zip(orders.out_frames.tolist(), orders.out_slots.tolist(), strict=True):
            store.slot(slot).copy_(self.pool.frame(frame))
        for slot, frame in zip(orders.in_slots.tolist(), orders.in_frames.tolist(), strict=True):
            self.pool.frame(frame).copy_(store.slot(slot))
        return True

    def _carry_out_orders(self, plan: StepPlan) -> None:
        """What must not be done twice."""
        self.pool.copy(plan.orders.copies)
        changes = plan.orders.table_changes
        self._tables[changes.rows, changes.pages] = changes.frames
        if plan.settings is not None:
            self._settings.store(plan.settings)

    def _compute(self, plan: StepPlan) -> Computed:
        """The network: of all tokens at once, or in parts where there is no memory for that."""
        if not len(plan.token_ids):
            return Computed(torch.empty(0, self.vocabulary), np.zeros(len(plan.rows), np.bool_), None)
        try:
            return Computed(*self._run_network(plan), None)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error) or len(plan.token_ids) == 1:
                raise
        self._warn("no memory for %d tokens at once: they are computed in parts", plan)
        return rejoined(plan, *(self._compute_part(half) for half in halves(plan)))

    def _compute_part(self, plan: StepPlan) -> Computed:
        """One that outlasts the next part's, with its scores."""
        computed = self._compute(plan)
        return Computed(computed.logits.clone(), computed.failed, self._scores(plan, computed))

    def _scores(self, plan: StepPlan, computed: Computed) -> LogProbs | None:
        """Of the plan's scored tokens; those of parts exist."""
        return self._score(plan.scored) if plan.scored is not None and computed.scored is None else computed.scored

    def _run_network(self, plan: StepPlan) -> tuple[Tensor, BoolArray]:
        batch = forward_batch(plan, self._tables, self._last_tokens, self.pool.page_size)
        return self._kernels.compute(batch, 0 if plan.scored is None else len(plan.scored.places))

    def _end(self, plan: StepPlan, computed: Computed, masks: TokenMasks | None) -> StepResult:
        """Its sampling, and what comes back."""
        tokens, failed = np.full(len(plan.rows), -1, np.int32), computed.failed
        sampled = None
        if plan.samples.any():
            sampled = self._sample(plan, computed.logits, masks)
            tokens[plan.samples] = sampled.tokens.numpy()
            failed[plan.samples] |= sampled.failed.numpy()
        scored = self._scores(plan, computed)
        return StepResult(tokens, failed, None if sampled is None else sampled.logprobs, scored)

    def _sample(self, plan: StepPlan, scores: Tensor, masks: TokenMasks | None) -> Sampled:
        """Sample for the rows that do, from their logits `scores` (N, V); they keep what comes out."""
        rows = plan.rows[plan.samples]
        sampled = sample(scores, self._settings.take(rows), plan.lengths[plan.samples].astype(np.int64), masks)
        tokens = sampled.tokens.numpy().astype(np.int32)
        self._last_tokens[rows] = tokens
        self._settings.add(rows, tokens)
        return sampled

    def _score(self, scored: ScoredTokens) -> LogProbs:
        """Step E of the sampler's definition. The logits of all places at once might not fit into memory."""
        places, targets = (torch.from_numpy(ids.astype(np.int64)) for ids in (scored.places, scored.targets))

        def score(part: slice) -> LogProbs:
            return log_probs(self._kernels.logits_at(places[part]), targets[part], scored.likeliest)

        parts: list[LogProbs] = []
        for first in range(0, len(places), SCORED_AT_ONCE):
            parts += in_parts(score, first, min(first + SCORED_AT_ONCE, len(places)))
        return joined(parts)


def choose_dtype(config: ModelConfig, requested: str = "auto") -> torch.dtype:
    """The dtype to compute in on this processor.

    "auto": bfloat16 where the processor multiplies it (AMX, AVX512-BF16) and the checkpoint is not float32, else
    float32.
    """
    if requested != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[requested]
    if config.dtype == "float32" or not multiplies_bfloat16():
        return torch.float32
    return torch.bfloat16


def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for bfloat16 products."""
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    flags = Path("/proc/cpuinfo")
    if not flags.is_file():
        return False
    words = set(flags.read_text(encoding="utf-8").split())
    return bool(words & {"avx512_bf16", "amx_bf16"})
