"""Carries plans out on a GPU. The caller's thread enqueues a step and goes on; the device says itself when it is done.

What a step is there, device_program.py says. It replays a graph captured for the next larger sizes (step_graphs.py);
large ones, and those that score a prompt's tokens, are launched kernel by kernel.

Trap: everything is enqueued on one stream of this executor's own; it becomes the submitting thread's current stream.
"""

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cuda.errors import DriverError
from cuda.frames import GrowingFramePool, plain_pages, raw_pages
from cuda.launch import DeviceLoader
from mm.backing_store import BackingStore
from mm.page_copies import SwapOrders
from model.blas_choice import products_by_lt, takes_lt
from model.config import ModelConfig
from model.cuda_kernels import CudaStep
from model.device_program import RING, DeviceProgram, Reports, read_result
from model.errors import CannotResize
from model.executor import DeviceMemory
from model.out_of_memory import is_out_of_memory
from model.parameters import Parameters
from model.start_report import StartReport, Unreported
from model.step_graphs import Graph, GraphSize, Kind, StepGraphs, kind_of, ladder, step_sizes
from model.step_plan import StepPlan, StepResult
from model.swap_mover import SwapMover

CAPTURE_S = 1.0
"""How long a start captures graphs, 6 to 20 ms each on an H200. The others follow while nothing runs."""

log = logging.getLogger("pagewalk.executor")


@dataclass(slots=True)
class CudaTicket:
    """`model.step_plan.Ticket`: the step is done when the device has written its number into page-locked memory."""

    step: int
    slot: int
    sequences: int
    reports: Reports
    executor: "CudaExecutor"
    graph_hit: bool
    lost: StepResult | None = None  # of a step that the device does not know of, for want of memory

    def is_done(self) -> bool:
        return self.lost is not None or self.executor.results.is_done(self.slot, self.step)

    def wait(self) -> StepResult:
        """Raises RuntimeError if the device has failed: then the number would never come."""
        checked = time.monotonic()
        while not self.is_done():
            time.sleep(20e-6)
            if time.monotonic() - checked > 0.25:
                checked = time.monotonic()
                if self.executor.stream.query() and not self.is_done():  # raises the device's error, if there is one
                    raise RuntimeError(f"step {self.step} ended on the device without a result")
        if self.lost is not None:
            return self.lost
        return read_result(self.executor.results, self.slot, self.sequences, self.reports)


class CudaExecutor:
    """`model.executor.Executor` on the current CUDA device."""

    polls = 2000  # steps take milliseconds or less: poll between turns of the event loop before a thread waits

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        *,
        frames: int | None,
        utilization: float,
        max_running: int,
        max_rows: int,
        max_pages: int,
        max_batched_tokens: int,
        most_frames: int | None = None,
        swap_bytes: int = 0,
        graphs: bool = True,
        thin_rows: int | None = None,
        report: StartReport | None = None,
    ) -> None:
        """max_running: Sequences in a step; max_rows: those, and the ones that are swapped out. frames: of the pool;
        None: as `utilization` of the device's memory holds and max_rows x max_pages can use. swap_bytes: of the swap
        area, which is at most as large as the pool. most_frames: that the pool may be made to have later; None: it
        cannot be resized. thin_rows: as for CudaKernels.

        Raises OutOfDeviceMemory if there is no room for a frame; UnsupportedDevice if there are no kernels for it.
        """
        report = report or Unreported()
        device = parameters.embedding.device
        loader = DeviceLoader(device.index or 0)
        self._config, self.vocabulary = config, config.vocabulary
        self.stream = torch.cuda.Stream(device)
        self._raw_stream = int(self.stream.cuda_stream)
        self._device_index = device.index or 0
        self._latest: CudaTicket | None = None  # of the step submitted last
        with torch.cuda.stream(self.stream):
            self._program = DeviceProgram(
                config,
                parameters,
                loader,
                frames=frames,
                most_frames=most_frames,
                utilization=utilization,
                max_running=max_running,
                max_rows=max_rows,
                max_pages=max_pages,
                max_tokens=max(max_batched_tokens, max_running),
                page_locked=True,
                thin_rows=thin_rows,
            )
            pool = self._program.pool
            self.resizes_frames = isinstance(pool, GrowingFramePool)
            self._lasting_bytes = parameters.size_bytes() + (0 if self.resizes_frames else pool.data.nbytes)
            torch.cuda.reset_peak_memory_stats(device)  # loading is over
            self._graph_bytes = 0
            self.results, self.masks = self._program.results, self._program.masks.words
            self.frames, self.frame_bytes = self._program.pool.frames, self._program.pool.layout.frame_bytes
            self.start_frames = self._program.pool.usable
            self.slots = min(swap_bytes // self.frame_bytes, self.frames)
            self._store = BackingStore(self.slots, self.frame_bytes, page_locked=True)
            self._mover = SwapMover(self._program.pool, self._store)
            report.ended("memory")
            loader.finish(lambda done, total: report.progress("kernels", done, total))
            report.ended("kernels")
            self._warm_up(max_running, parameters)
            report.ended("first step")
            self._graph_memory: Any = torch.cuda.graph_pool_handle()  # one for all graphs: only one runs at a time
            reads_shared = self._program.kernels.shared_prefix is not None
            sizes = ladder(max_running=max_running, max_tokens=self._program.max_tokens, reads_shared=reads_shared)
            self._graphs = StepGraphs(sizes if graphs else iter(()), self._captured, seconds=CAPTURE_S)
            self.step_sizes = step_sizes(self._program.max_tokens) if graphs else ()
            self.stream.synchronize()
            report.ended("graphs")

    def submit(self, plan: StepPlan) -> CudaTicket:
        """Enqueue one step and return at once."""
        if torch._C._cuda_getCurrentRawStream(self._device_index) != self._raw_stream:
            torch.cuda.set_stream(self.stream)  # once per thread: the caller's current stream from now on
        slot, sequences = plan.step % RING, len(plan.rows)
        reports = self._program.upload(plan, slot, self._raw_stream)
        graph = self._graph_for(plan)
        reports.scored, lost = self._program.launch(plan, self._raw_stream, graph, slot=slot)
        self._latest = CudaTicket(plan.step, slot, sequences, reports, self, graph is not None, lost)
        return self._latest

    def sample(self, plan: StepPlan) -> None:
        """Enqueue the sampling of the masked step submitted last."""
        if self._latest is not None and self._latest.lost is None:
            weighs = self._program.rows.weighs(plan)
            self._program.sample(self._raw_stream, len(plan.rows), weighs=weighs, masked=plan.masked)

    @property
    def ready_slots(self) -> int:
        return self._store.ready_slots

    def want_slots(self, slots: int) -> None:
        """BackingStore.want."""
        self._store.want(slots)

    def resize(self, frames: int, slots: int) -> None:
        """Frames that go are unmapped when the steps and copies submitted so far have ended: it waits for those."""
        pool = self._program.pool
        if frames != pool.usable:
            if not isinstance(pool, GrowingFramePool):
                raise CannotResize("the pool was made in one piece")
            try:
                pool.resize(frames)
            except DriverError as error:
                raise CannotResize(f"no memory for {frames} frames: {error}") from error
        self._store.resize(slots)

    def start(self, orders: SwapOrders, store: BackingStore | None = None) -> None:
        """Enqueue swap copies on the side stream, behind the steps submitted so far."""
        self._mover.start(orders, self.stream, store)

    def new_store(self, pages: int) -> BackingStore:
        """Page-locked memory."""
        return BackingStore(pages, self.frame_bytes, page_locked=True)

    def swapped_page(self, slot: int) -> Tensor:
        """BackingStore.slot."""
        return self._store.slot(slot)

    def plain_pages(self, raw: Tensor) -> Tensor:
        """cuda.frames.plain_pages, on the host."""
        return plain_pages(raw, self._program.pool.layout)

    def raw_pages(self, pages: Tensor) -> Tensor:
        """cuda.frames.raw_pages, on the host."""
        return raw_pages(pages, self._program.pool.layout)

    def ended(self) -> list[tuple[int, bool]]:
        """Tickets of swap orders that have ended, and whether they succeeded."""
        return self._mover.ended()

    def close(self) -> None:
        """Finish what is enqueued. Idempotent. The device's memory goes with the object, a growing pool's at once."""
        self._store.close()
        self._mover.close()
        self.stream.synchronize()
        self._graphs.clear()
        if isinstance(self._program.pool, GrowingFramePool):
            self._program.pool.close()

    @property
    def captured_graphs(self) -> int:
        """Graphs that exist."""
        return self._graphs.captured

    @property
    def device_memory(self) -> DeviceMemory:
        """Activations by what torch has given out; graphs by what was free on the device, which others may use, too."""
        peak = torch.cuda.max_memory_allocated(self._device_index) - self._lasting_bytes
        return DeviceMemory(max(0, peak), self._graphs.captured, self._graphs.most, self._graph_bytes)

    def use_idle_time(self) -> bool:
        """Capture a graph that is missing."""
        with torch.cuda.stream(self.stream):
            return self._graphs.capture_next()

    def _graph_for(self, plan: StepPlan) -> Graph | None:
        """The smallest graph that holds the plan."""
        if plan.scored is not None:
            return None
        sequences = len(plan.rows)
        kind = kind_of(
            decodes=plan.decodes,
            sequences=sequences,
            is_masked=plan.masked is not None,
            reads_shared=self._program.has_groups(plan),
        )
        weighs = kind not in (Kind.DECODE, Kind.SHARED) or self._program.rows.weighs(plan)
        return self._graphs.find(kind, len(plan.token_ids), sequences, weighs=weighs)

    def _warm_up(self, max_running: int, parameters: Parameters) -> None:
        """Run padding only, once at the largest sizes: loads modules, lets cuBLAS take its workspace, and kernels."""
        program, stream = self._program, self._raw_stream
        program.run(CudaStep(stream, max_running, max_running, decodes=max_running, prefill_blocks=0))
        blocks = program.kernels.prefill_blocks(program.max_tokens, max_running)
        program.run(CudaStep(stream, max_running, program.max_tokens, decodes=0, prefill_blocks=blocks))
        program.kernels.load_products(parameters)
        self.stream.synchronize()

    def _captured(self, size: GraphSize) -> Graph | None:
        """Nothing runs on the device for this, and it does not wait for what runs. None: there is no memory for it."""
        try:
            return self._capture(size)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        torch.cuda.empty_cache()
        log.warning("no memory on the device for more CUDA graphs: steps of those sizes are launched kernel by kernel")
        return None

    def _capture(self, size: GraphSize) -> Graph:
        blocks = self._program.kernels.prefill_blocks(size.tokens, size.sequences)
        step = CudaStep(
            self._raw_stream,
            sequences=size.sequences,
            tokens=size.tokens,
            decodes=size.sequences if size.kind.decodes else 0,
            prefill_blocks=blocks if size.kind.prefills else 0,
            has_groups=size.kind is Kind.SHARED,
            weighs=size.weighs,
        )
        free, _ = torch.cuda.mem_get_info(self._device_index)
        graph = torch.cuda.CUDAGraph()
        # thread-local: another thread may page-lock memory for swap meanwhile
        graph.capture_begin(pool=self._graph_memory, capture_error_mode="thread_local")
        try:
            with products_by_lt(wanted=takes_lt(self._config, size.tokens)):
                if size.kind.samples:
                    self._program.run(step)
                else:
                    self._program.compute(step)
        except BaseException:
            with suppress(RuntimeError):  # that it captured nothing whole
                graph.capture_end()
            raise
        graph.capture_end()
        self._graph_bytes += max(0, free - torch.cuda.mem_get_info(self._device_index)[0])
        return graph
