"""`pagewalk serve` with a network whose answers depend on every page, and with faults: what the machine may do to a
server, and faults of ours that a test of the tests plants.

    python faulty_server.py '{"no_memory": 0.1, "copies": 0.05}' serve --model ...
"""

import random
import sys
from dataclasses import dataclass
from functools import partialmethod
from typing import Any

import msgspec
from short_memory import no_memory
from tiny_model import attentive_parameters

from mm.preemption import CostEstimates
from model.batch import ForwardBatch
from model.cpu_executor import CpuExecutor
from model.cpu_kernels import CpuKernels
from model.native_kernels import NativeKernels
from service import assembly


@dataclass
class Faults:
    """How likely each is, each time it can happen."""

    seed: int = 0
    # of the machine: no client may see them
    no_memory: float = 0.0  # for a step of more than a few tokens
    copies: float = 0.0  # swap orders that fail
    # of ours
    wrong_page: float = 0.0  # a page table entry names the next frame
    lost_page: float = 0.0  # a page that comes back from swap is junk


def plant(faults: Faults) -> None:
    """Before the server is made."""
    draw = random.Random(faults.seed)
    assembly.random_parameters = attentive_parameters  # type: ignore[assignment]
    CostEstimates.__init__ = partialmethod(CostEstimates.__init__, copy_page_s=1e-9)  # type: ignore[assignment]  # swap is worth it
    for kernels in (CpuKernels, NativeKernels):
        _lack_memory(kernels, faults.no_memory, draw)
    _spoil_copies(faults, draw)
    _mix_up_pages(faults.wrong_page, draw)


def _lack_memory(kernels: Any, likely: float, draw: random.Random) -> None:
    compute = kernels.compute

    def compute_or_fail(self: Any, batch: ForwardBatch, scored: int = 0) -> Any:
        if len(batch.token_ids) > 3 and draw.random() < likely:
            no_memory()
        return compute(self, batch, scored)

    kernels.compute = compute_or_fail


def _spoil_copies(faults: Faults, draw: random.Random) -> None:
    move = CpuExecutor._move

    def move_or_fail(self: CpuExecutor, orders: Any, store: Any) -> bool:
        if draw.random() < faults.copies:
            return False
        done = move(self, orders, store)
        for frame in orders.in_frames.tolist():
            if draw.random() < faults.lost_page:
                self.pool.frame(frame).zero_()
        return done

    CpuExecutor._move = move_or_fail  # type: ignore[method-assign]


def _mix_up_pages(likely: float, draw: random.Random) -> None:
    carry_out = CpuExecutor._carry_out_orders

    def carry_out_wrongly(self: CpuExecutor, plan: Any) -> None:
        carry_out(self, plan)
        changes = plan.orders.table_changes
        if len(changes.rows) and draw.random() < likely:
            self._tables[changes.rows[0], changes.pages[0]] = (changes.frames[0] + 1) % self.frames

    CpuExecutor._carry_out_orders = carry_out_wrongly  # type: ignore[method-assign]


if __name__ == "__main__":
    from service.__main__ import main  # it sets variables that are for a server alone

    plant(msgspec.json.decode(sys.argv[1], type=Faults))
    main(sys.argv[2:])
