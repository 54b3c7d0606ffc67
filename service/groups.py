"""Which decodes of a step begin with the same frames (StepPlan.groups): looked up when a row joins, not always."""

from dataclasses import dataclass

import numpy as np

from mm import MemoryManager, SharedPrefixes
from mm.addresses import Int32Array, Int64Array
from service.rows import RunningRows


@dataclass(frozen=True, slots=True)
class _Known:
    """The decodes of the last plan that was not steady, and who of them begins with the same frames."""

    rows: Int32Array
    epochs: Int64Array
    groups: SharedPrefixes | None


class Groups:
    """The groups of the last decodes, kept while rows stay or leave."""

    def __init__(self, memory: MemoryManager, rows: RunningRows) -> None:
        self._memory = memory
        self._rows = rows
        self._known: _Known | None = None

    def forget(self) -> None:
        """Rows that are known may have other frames from now on."""
        self._known = None

    def of(self, decodes: Int32Array, lengths: Int32Array) -> SharedPrefixes | None:
        """Who of the rows `decodes` (N,), which hold `lengths` (N,) tokens, begins with the same frames.

        The same object while they are the same rows; when some leave, the groups of the others stay.
        """
        if not len(decodes):
            self._known = None
            return None
        last, epochs = self._known, self._rows.epoch[decodes]
        if last is not None and np.array_equal(last.rows, decodes) and np.array_equal(last.epochs, epochs):
            return last.groups
        places = np.empty(0, np.int32)
        if last is not None:
            place_of = np.full(len(self._rows.epoch), -1, np.int32)
            place_of[decodes] = np.arange(len(decodes))
            places = np.where(self._rows.epoch[last.rows] == last.epochs, place_of[last.rows], np.int32(-1))
        if last is None or np.count_nonzero(places >= 0) < len(decodes):
            groups = self._memory.shared_prefixes(decodes, lengths)
        else:
            groups = None if last.groups is None else last.groups.moved(places)
        self._known = _Known(decodes, epochs, groups)
        return groups
