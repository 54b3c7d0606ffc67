"""Checkpoints, in the engine's process: a Sequence to a file, and from one, while all others go on.

    save       between two steps: what it is, and a hold on its pages ──▶ copied in portions ──▶ a thread writes
    restore    a thread reads the file ──▶ checked ──▶ queued as a new request, whose pages are copied into frames when
               it enters a row (Copies._fill), so that nothing is computed but its last token

A Sequence does not notice that it is saved. What cannot be saved or restored is refused, and has changed nothing. What
comes from a file is never shared with other requests: it is not in the page cache until it was computed here.
"""

import asyncio
import math
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import structlog
import torch
from torch import Tensor

from mm.addresses import ABSENT, pages_for
from mm.backing_store import BackingStore
from mm.holds import Hold
from service.admin_sequences import find, name_of
from service.checkpoint_file import CheckpointFolder, Header, ModelIdentity
from service.engine_client import Submit
from service.errors import BadRequest, NotStarted, PagewalkError, ServiceUnavailable, quoted
from service.field_checks import MAX_ID_CHARACTERS, MAX_PRIORITY, MAX_STOPS
from service.grammars import GrammarRefused, Matcher
from service.operations import Operations
from service.questions import Answers, Restore, Restored, SaveCheckpoint
from service.request import SavedPages, Sequence
from service.sampling import check_parameters
from service.sequences import space_of

PAGES_AT_ONCE = 64
"""Pages that are brought into their plain form together: each costs two copies of it for that time."""

SAVED, RESTORED = "sequences/{of}/checkpoint", "restore"

T = TypeVar("T")

log = structlog.get_logger("pagewalk.checkpoints")


@dataclass(frozen=True, slots=True)
class _Taken:
    """A Sequence at one moment between two steps."""

    header: Header
    sequence: Sequence
    hold: Hold | None  # None: it has no page that would be of use
    facts: dict[str, Any]  # for operators


def _tell_faults(task: "asyncio.Task[Any]") -> None:
    """Of a job that nobody waits for any more: a refusal is nobody's concern then, anything else is a fault of ours."""
    if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, PagewalkError):
        log.error("a checkpoint failed", exc_info=error)


class Checkpoints:
    """Saves and restores, one at a time: each takes the memory of its pages besides."""

    def __init__(self, operations: Operations, model: ModelIdentity, folder: CheckpointFolder) -> None:
        self._operations = operations
        self._inside = operations.inside
        self._engine = operations.inside.engine
        self._memory = operations.inside.memory
        self._model = model
        self._folder = folder
        self._turn = asyncio.Lock()
        self._jobs: set[asyncio.Task[Any]] = set()

    def answer_with(self, answers: Answers) -> None:
        """From now on."""

        async def save(front_end: int, question: SaveCheckpoint) -> bytes:
            return await self._to_its_end(self.save(question))

        async def restore(front_end: int, question: Restore) -> Restored:
            return await self._to_its_end(self.restore(front_end, question))

        answers.on(SaveCheckpoint, save)
        answers.on(Restore, restore)

    async def _to_its_end(self, job: Coroutine[Any, Any, T]) -> T:
        """What has begun ends, also if whoever asked has left: nothing stays held."""

        async def in_turn() -> T:
            async with self._turn:
                return await job

        task = asyncio.create_task(in_turn())
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_tell_faults)
            raise

    # --- a Sequence to a file

    async def save(self, asked: SaveCheckpoint) -> bytes:
        """Raises NotFound, NotStarted, BadRequest, PermissionDenied, NotWritten or EngineDead."""
        self._folder.check(asked.path)
        begun = time.perf_counter()
        taken = await self._engine.between_steps(lambda: self._take(asked.of))
        pages = 0 if taken.hold is None else len(taken.hold.entries)
        store = await self._copied(taken.hold)
        copied = time.perf_counter()
        size = await asyncio.to_thread(self._write, asked.path, taken.header, store, pages)
        after = {
            "path": asked.path,
            "bytes": size,
            "tokens": len(taken.header.submit.prompt_ids),
            "pages": pages,
            "copied_ms": round(1000 * (copied - begun), 1),
            "written_ms": round(1000 * (time.perf_counter() - copied), 1),
        }

        def note() -> bytes:
            space = taken.sequence.space
            row = ABSENT if space is None else space.row
            self._operations.note(SAVED.replace("{of}", asked.of), asked.by, taken.facts, after, row)
            return msgspec.json.encode({"done": True, "before": taken.facts, "after": after})

        return await self._engine.between_steps(note)

    def _take(self, of: str) -> _Taken:
        sequence, scheduler = find(self._inside, of), self._engine.scheduler
        if sequence.group is not None:
            raise BadRequest("a beam search cannot be saved: which beams it will give is not known before its end")
        if sequence.form == "tools":
            raise BadRequest("a chat that was offered tools cannot be saved: its calls would be read from their middle")
        tokens = scheduler.sequences.tokens_of(sequence)
        if len(tokens) == sequence.prompt_tokens:
            raise NotStarted(f"sequence {name_of(sequence)} has not got its first token yet: there is nothing to save")
        positions = scheduler.good_positions(sequence)
        header = Header(
            model=self._model,
            submit=sequence.continued(tokens.tolist(), self._engine.now),
            answer_begin=sequence.answer_begin,
            text_begin=sequence.text_begin,
            positions=positions,
            created=time.time(),
        )
        facts = self._operations.facts(sequence)
        if not positions:
            return _Taken(header, sequence, None, facts)
        return _Taken(header, sequence, self._memory.hold(space_of(sequence), positions), facts)

    async def _copied(self, hold: Hold | None) -> BackingStore:
        """Its pages, as they lie in frames. Ends the hold."""
        if hold is None:
            return self._engine.executor.new_store(0)
        try:
            store = await self._memory_for(len(hold.entries))
            places = np.flatnonzero(hold.entries >= 0).astype(np.int32)
            if not await self._engine.copies.pages.copy(hold.frames, places, store, is_out=True):
                raise ServiceUnavailable("its pages could not be copied")
            in_swap = np.flatnonzero(hold.entries < 0).tolist()
            await asyncio.to_thread(self._copy_swapped, store, in_swap, hold.slots.tolist())
        finally:
            await self._engine.between_steps(lambda: self._memory.let_go(hold))
        return store

    def _copy_swapped(self, store: BackingStore, places: list[int], slots: list[int]) -> None:
        for place, slot in zip(places, slots, strict=True):
            store.slot(place).copy_(self._engine.executor.swapped_page(slot))

    async def _memory_for(self, pages: int) -> BackingStore:
        """Raises ServiceUnavailable."""
        store = self._engine.executor.new_store(pages)
        store.want(pages)
        await asyncio.to_thread(store.wait)
        store.close()
        if store.ready_slots < pages:
            raise ServiceUnavailable(f"the host has no memory for a copy of {pages} pages")
        return store

    def _write(self, name: str, header: Header, store: BackingStore, count: int) -> int:
        """In a thread."""
        pages = torch.empty((count, *self._model.page_shape), dtype=getattr(torch, self._model.dtype))
        for first in range(0, count, PAGES_AT_ONCE):
            part = range(first, min(first + PAGES_AT_ONCE, count))
            pages[first : part.stop] = self._engine.executor.plain_pages(torch.stack([store.slot(i) for i in part]))
        if rest := header.positions % self._model.page_tokens:  # what others have left in the page is not theirs
            pages[-1, :, :, :, rest:] = 0
        return self._folder.write(name, header, pages)

    # --- a file to a Sequence

    async def restore(self, front_end: int, asked: Restore) -> Restored:
        """Raises NotFound, BadRequest, PermissionDenied, QueueFull or EngineDead."""
        executor = self._engine.executor
        most = self._memory.tables.max_pages * executor.frame_bytes
        header, pages = await asyncio.to_thread(self._read, asked.path, most)
        saved = None
        if len(pages):
            store = await self._memory_for(len(pages))
            await asyncio.to_thread(self._fill_store, store, pages)
            saved = SavedPages(store, header.positions)
        matcher = await self._matcher_of(header)

        def begin() -> Restored:
            return self._begin(front_end, asked, header, saved, matcher)

        return await self._engine.between_steps(begin)

    def _read(self, name: str, most: int) -> tuple[Header, Tensor]:
        """In a thread. Raises BadRequest for all that could not run here."""
        header, pages = self._folder.read(name, most)
        whose = quoted(name)
        for fact in ModelIdentity.__struct_fields__:
            theirs, ours = getattr(header.model, fact), getattr(self._model, fact)
            if theirs != ours:
                raise BadRequest(
                    f"{whose} is of another model: {fact} is {quoted(theirs)}, here {quoted(ours)}", param="path"
                )
        facts, submit, vocabulary = self._model, header.submit, self._engine.limits.vocabulary
        count = len(submit.prompt_ids)
        is_shaped = pages.shape[1:] == facts.page_shape and str(pages.dtype) == f"torch.{facts.dtype}"
        if not is_shaped or len(pages) != pages_for(header.positions, facts.page_tokens):
            raise BadRequest(f"{whose} holds pages of another shape than its header says", param="path")
        is_sound = 0 < header.answer_begin <= header.text_begin < count and 0 <= header.positions < count
        is_sound = is_sound and submit.max_tokens > 0 and not submit.siblings
        if not is_sound or submit.beam_search is not None or submit.prompt_logprobs >= 0 or submit.form == "tools":
            raise BadRequest(f"{whose} contradicts itself", param="path")
        if not all(0 <= token < vocabulary for token in submit.prompt_ids) or not _could_be_asked(submit, vocabulary):
            raise BadRequest(f"{whose} names tokens or values that this server does not have", param="path")
        if not all(bool(torch.isfinite(part).all()) for part in torch.split(pages, PAGES_AT_ONCE)):
            raise BadRequest(f"{whose} holds numbers that are not finite", param="path")
        return header, pages

    def _fill_store(self, store: BackingStore, pages: Tensor) -> None:
        """In a thread."""
        for first in range(0, len(pages), PAGES_AT_ONCE):
            for place, page in enumerate(self._engine.executor.raw_pages(pages[first : first + PAGES_AT_ONCE]), first):
                store.slot(place).copy_(page)

    async def _matcher_of(self, header: Header) -> Matcher | None:
        """Where it stands in its grammar. Raises BadRequest."""
        constraint, submit = header.submit.constraint, header.submit
        if constraint is None:
            return None
        if (grammars := self._engine.held.grammars) is None:
            raise ServiceUnavailable("this server has no compiler of grammars yet")
        try:
            matcher = (await grammars.compile(constraint)).start(submit.end_ids)
        except GrammarRefused as error:
            raise BadRequest(f"its grammar cannot be kept to here: {error}", param="path") from None
        await asyncio.to_thread(_replay, matcher, submit.prompt_ids[header.answer_begin :])
        if matcher.is_over:
            raise BadRequest("by its grammar nothing can follow what it has", param="path")
        return matcher

    def _begin(
        self, front_end: int, asked: Restore, header: Header, saved: SavedPages | None, matcher: Matcher | None
    ) -> Restored:
        engine, now = self._engine, self._engine.now
        if not engine.is_connected(front_end):
            raise ServiceUnavailable("who asked for it has gone")
        message = msgspec.structs.replace(
            header.submit,
            sequence_id=asked.sequence_id,
            request_id=asked.request_id or header.submit.request_id,
            client=asked.client,
        )
        count = len(message.prompt_ids)
        engine.limits.check_fits(count, message.max_tokens, message.tenant)
        engine.limits.check_queue(engine.queue, 1, count)
        sequence = Sequence.from_submit(message, front_end, now)
        sequence.inherited_tokens, sequence.restored_tokens = count - header.answer_begin, count - header.text_begin
        sequence.saved, sequence.matcher = saved, matcher
        engine.scheduler.restore(sequence, now)
        facts = self._operations.facts(sequence)
        facts |= {"tokens": count, "positions": header.positions}
        self._operations.note(RESTORED, asked.by, {"path": asked.path}, facts)
        return Restored(
            request_id=message.request_id,
            tokens=message.prompt_ids,
            answer_begin=header.answer_begin,
            text_begin=header.text_begin,
            max_tokens=message.max_tokens,
            form=message.form,
            sampling=message.sampling,
            text=message.text,
        )


def _replay(matcher: Matcher, tokens: list[int]) -> None:
    for token in tokens:
        matcher.advance(token)


def _could_be_asked(submit: Submit, vocabulary: int) -> bool:
    """Whether a request could have had these values: the engine relies on that."""
    stops, timeout_s = submit.text.stops, submit.timeout_s
    return (
        check_parameters(submit.sampling, vocabulary)
        and all(0 <= token < 2**31 for token in submit.end_ids)
        and abs(submit.priority) <= MAX_PRIORITY
        and (timeout_s is None or 0 <= timeout_s < math.inf)
        and len(stops) <= MAX_STOPS
        and all(stops)
        and 0 < len(submit.request_id) <= MAX_ID_CHARACTERS
        and submit.request_id.isascii()
        and submit.request_id.isprintable()
    )
