"""How each row samples, on its way to a GPU: settings of fixed size, and the memory of rows that need more.

    settings      a record a row (cuda.scatter.SETTINGS), kept here as the device has it; travels in a step's upload
    words         of rows with lists or penalties: the lists (cuda.adjust.pack_lists), then the tokens by position with
                  room for more. A device tensor of the row's own; the record holds its addresses

The kernels that sample add to the tokens themselves; here it is seen to that they have room. Everything is enqueued on
torch's current stream: a tensor that is given back may be used anew at once, by later work on the same stream.
"""

from struct import Struct

import numpy as np
import torch
from torch import Tensor

from cuda.adjust import pack_lists
from cuda.sample import want_all_logits
from cuda.scatter import SETTINGS, SamplingChanges, SettingsArray, greedy_settings
from mm.addresses import BoolArray, Int32Array, Int64Array, index_of
from model.out_of_memory import is_out_of_memory
from model.step_plan import RowSettings, SamplingParameters, StepPlan

FIRST_ROOM = 256
"""Tokens that a row's history has room for, at least."""

NO_HISTORY = np.iinfo(np.int32).max

LARGEST, SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)

NO_TOKENS = np.empty(0, np.int32)
NO_PLACES = np.empty(0, np.int64)


def row_memory_bytes(rows: int, max_length: int) -> int:
    """Device memory to keep free for `rows` rows: all of them with histories of 4,096 tokens, twice over, since a row
    that needs more room copies.
    """
    return rows * 2 * 4 * min(4096, max_length)


class CudaRows:
    """Of `rows` rows."""

    def __init__(self, rows: int, vocabulary: int, device: str | torch.device, *, page_locked: bool) -> None:
        self.settings: SettingsArray = greedy_settings(rows)
        self._setting_words = self.settings.view(np.int32).reshape(rows, -1)  # the same memory
        self._vocabulary, self._device, self._page_locked = vocabulary, device, page_locked
        self._words: dict[int, Tensor] = {}
        self._begins: Int32Array = np.zeros(rows, np.int32)  # of the tokens, after the lists
        self._rooms: Int32Array = np.full(rows, NO_HISTORY, np.int32)
        self._reporting = 0  # rows that ask for log-probabilities
        self._want_all = np.zeros(rows, np.bool_)
        self._wanting = 0  # rows of these
        self._starved: set[int] = set()  # rows whose words found no memory, since the last step

    def store(self, given: RowSettings) -> SamplingChanges:
        """Overwrite rows; enqueues the copies of their words. Raises ValueError if a row's history is missing."""
        rows, parameters = given.rows, given.parameters
        prompts = given.prompts.tolist() if len(given.prompts) else [0] * len(rows)
        own = np.frombuffer(bytearray(b"".join(map(_record, parameters, prompts))), SETTINGS)
        if self._reporting:
            self._reporting -= int(np.count_nonzero(self.settings["log_probs"][rows] >= 0))
        if self._wanting:
            self._wanting -= int(np.count_nonzero(self._want_all[rows]))
            self._want_all[rows] = False
        is_plain = True
        for i, (row, p) in enumerate(zip(rows.tolist(), parameters, strict=True)):
            self._reporting += p.logprobs >= 0
            is_plain = is_plain and p.is_greedy and p.logprobs < 0
            if row in self._words or row in self._starved:
                self._words.pop(row, None)
                self._starved.discard(row)
                self._rooms[row] = NO_HISTORY
            if p.needs_history or _has_lists(p):
                own[i : i + 1] = self._with_words(
                    row, own[i : i + 1], p, given.histories[i] if given.histories else None
                )
        if not is_plain:
            self._want_all[rows] = wanting = want_all_logits(own, self._vocabulary)
            self._wanting += int(np.count_nonzero(wanting))
        self._setting_words[index_of(rows)] = own.view(np.int32).reshape(len(rows), -1)  # records one by one take 5 us
        return SamplingChanges(rows, own)

    def make_room(self, plan: StepPlan) -> SamplingChanges | None:
        """See to it that every row of a step can add a token to its history. None: there is room."""
        if not self._words:
            return None
        short = plan.rows[plan.lengths >= self._rooms[plan.rows]]
        if not len(short):
            return None
        for row in short.tolist():
            old, begin = self._words[row], int(self._begins[row])
            if self._place(row, begin, 2 * int(self._rooms[row])):
                self._words[row][: len(old)].copy_(old)
        return SamplingChanges(short, self.settings[short])

    def take_starved(self, rows: Int32Array) -> BoolArray | None:
        """(S,) which of a step's rows must fail, since their words have found no memory; None: none. Once for each."""
        if not self._starved:
            return None
        starved: BoolArray = np.isin(rows, list(self._starved))
        self._starved.difference_update(rows.tolist())
        return starved

    def reports(self, plan: StepPlan) -> tuple[Int64Array, int]:
        """The sequences of a plan that ask for log-probabilities, by place, and how many of the likeliest they get: as
        many as any of them asks for.
        """
        if not self._reporting:
            return NO_PLACES, 0
        asked = self.settings["log_probs"][plan.rows]
        places = np.flatnonzero((asked >= 0) & plan.samples)
        return places, min(int(asked[places].max(initial=0)), self._vocabulary)

    def weighs(self, plan: StepPlan) -> bool:
        """Whether a sequence of a plan samples by more than its largest logits: cuda.sample wants to know."""
        return self._wanting > 0 and bool((self._want_all[plan.rows] & plan.samples).any())

    def _with_words(
        self, row: int, own: SettingsArray, parameters: SamplingParameters, history: Int32Array | None
    ) -> SettingsArray:
        p, lists = parameters, NO_TOKENS
        if p.needs_history and history is None:
            raise ValueError("a row with penalties or bad words needs its history")
        if _has_lists(p):
            lists = pack_lists(self._vocabulary, p.logit_bias, p.allowed_token_ids, p.barred_ids, p.bad_words)
        known = history if p.needs_history and history is not None else NO_TOKENS
        room = max(FIRST_ROOM, 1 << len(known).bit_length()) if p.needs_history else 0
        self.settings[row] = own[0]
        self.settings["adjusts"][row] = 1
        if self._place(row, len(lists), room):
            words = np.concatenate((lists, known))
            try:
                sent = torch.empty(len(words), dtype=torch.int32, pin_memory=self._page_locked)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                sent = torch.from_numpy(words)  # the copy is waited for then
            else:
                sent.numpy()[:] = words
            self._words[row][: len(words)].copy_(sent, non_blocking=True)
        return self.settings[row : row + 1]

    def _place(self, row: int, begin: int, room: int) -> bool:
        """New memory for a row: `begin` words of lists and `room` tokens. False: there is none; the row is `starved`,
        and has no words any more.
        """
        words = self._memory(begin + room)
        if words is None:
            self._starved.add(row)
            self._words.pop(row, None)
            self._rooms[row] = NO_HISTORY
            for name in ("lists", "history", "adjusts"):
                self.settings[name][row] = 0
            return False
        self._words[row], self._begins[row] = words, begin
        self._rooms[row] = room or NO_HISTORY
        self.settings["lists"][row] = words.data_ptr() if begin else 0
        self.settings["history"][row] = words.data_ptr() + 4 * begin if room else 0
        return True

    def _memory(self, words: int) -> Tensor | None:
        """int32 of the device; None if there is none, also when caches have been given back."""
        for _ in range(2):
            try:
                return torch.empty(words, dtype=torch.int32, device=self._device)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
            if torch.device(self._device).type == "cuda":
                torch.cuda.empty_cache()
        return None


_RECORD = Struct("=Q2d3Q4f5i12x")
"""SETTINGS. By numpy a record takes three times as long to make, and each field of one 4 us to assign."""


def _record(p: SamplingParameters, prompt: int) -> bytes:
    """A row of SETTINGS, without words."""
    return _RECORD.pack(
        p.seed,
        p.top_p,
        p.typical_p,
        int(min(p.min_p, 1.0) * 2.0**40),
        0,  # history
        0,  # lists
        min(p.temperature, LARGEST),
        min(max(p.repetition_penalty, SMALLEST), LARGEST),
        p.presence_penalty,
        p.frequency_penalty,
        p.top_k,
        p.logprobs,
        prompt,
        p.min_tokens,
        0,  # adjusts
    )


def _has_lists(parameters: SamplingParameters) -> bool:
    p = parameters
    bars = p.min_tokens > 0 and bool(p.barred_ids)
    return bars or bool(p.logit_bias or p.allowed_token_ids or p.bad_words)
