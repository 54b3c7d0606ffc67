"""What carries plans out. `cpu_executor` and `cuda_executor` implement this, and so do the tests' simulated ones."""

from typing import TYPE_CHECKING, NamedTuple, Protocol

from mm.addresses import Int32Array
from mm.page_copies import SwapOrders
from model.step_plan import StepPlan, Ticket

if TYPE_CHECKING:  # torch takes a second: front ends do without
    from torch import Tensor

    from mm.backing_store import BackingStore


class DeviceMemory(NamedTuple):
    """What an executor has of a device's memory beside weights and pool."""

    activations_peak_bytes: int  # the most that steps have had to compute in
    graphs: int  # captured steps, ...
    most_graphs: int  # ... of so many that may be
    graph_bytes: int  # that those have for themselves


class Executor(Protocol):
    """Owns the KV pool, the device's page tables, the rows' last tokens and settings, and the network.

    Steps run in the order of submission, and overlap with the host: a caller submits step k + 1 before it has read the
    result of step k.
    """

    frames: int  # frames that the pool can have at most
    resizes_frames: bool  # whether it can have fewer, and more again, while steps run
    frame_bytes: int  # keys and values of one page, all layers
    vocabulary: int  # rows of the output matrix
    slots: int  # swap slots that it can copy frames to and from; 0: no swap
    masks: Int32Array
    """(most rows of a step, mask_words(vocabulary)): for `sample`. Free to be written while no step waits for it."""

    step_sizes: tuple[int, ...]
    """Tokens of a step with prefill: counts above the first that it is best cut to; ascending."""

    polls: int  # times one who waits for a step, or for a message, polls before it sleeps; 0 where steps take long

    @property
    def device_memory(self) -> DeviceMemory | None:
        """None where it computes in the host's memory."""
        ...

    def submit(self, plan: StepPlan) -> Ticket:
        """Enqueue one step and return at once. If rows of it are masked, it ends by `sample`; no step comes before."""
        ...

    def sample(self, plan: StepPlan) -> None:
        """Enqueue the sampling of the step submitted last, whose rows plan.masked have the first rows of `masks`."""
        ...

    @property
    def ready_slots(self) -> int:
        """Slots 0 ... ready_slots - 1 have memory behind them. Grows up to `slots`, as far as it is asked for."""
        ...

    def want_slots(self, slots: int) -> None:
        """Ask for memory behind the first `slots` slots; it comes in the background."""
        ...

    def start(self, orders: SwapOrders, store: "BackingStore | None" = None) -> None:
        """Enqueue swap copies and return at once (mm.page_copies.PageMover). They run beside later steps.

        store: whose slots are meant; None: the swap area's.
        """
        ...

    def new_store(self, pages: int) -> "BackingStore":
        """Host memory for so many pages, once it is asked for (`want`): for copies to and from elsewhere by `start`."""
        ...

    def swapped_page(self, slot: int) -> "Tensor":
        """(frame_bytes,) uint8: what is in a slot of the swap area, while no copy writes to it."""
        ...

    def plain_pages(self, raw: "Tensor") -> "Tensor":
        """Pages as they lie in frames and slots, (N, frame_bytes) uint8, in the form that all executors of a model and
        dtype have in common: (N, layers, K | V, kv heads, page_size, D). May be called in any thread.
        """
        ...

    def raw_pages(self, pages: "Tensor") -> "Tensor":
        """The inverse of `plain_pages`."""
        ...

    def ended(self) -> list[tuple[int, bool]]:
        """Tickets of swap orders that ended since the last call, and whether all copies succeeded. Never blocks."""
        ...

    def use_idle_time(self) -> bool:
        """Nothing runs: make one thing ready that later steps are faster with. Takes milliseconds at most.

        Returns whether there is more.
        """
        ...

    def resize(self, frames: int, slots: int) -> None:
        """From now on the first `frames` frames and `slots` slots are used. Those that come have memory behind them
        when this returns; those that go give it back, behind the steps submitted so far. Raises CannotResize.
        """
        ...

    def close(self) -> None:
        """Finish what is enqueued and release everything. Idempotent."""
        ...
