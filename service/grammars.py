"""Constraints compiled, and where each Sequence stands in its grammar: which tokens may come next.

Owns the compiler (llguidance) with its limits, the cache of compiled grammars, and the threads that compile. Front ends
compile to find out whether a constraint can be kept to, before anything of an answer is sent; the engine's process
compiles to have it. In one process they share one `Grammars`.

    Constraint ──compile, off the loop──▶ Grammar ──start──▶ Matcher, one a Sequence
                                                             advance(token) ⇄ fill(mask)

A Matcher lives on the host with its Sequence, so whatever happens to rows and pages does not touch it.
"""

import asyncio
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from mm.addresses import Int32Array
from model.token_masks import mask_words
from service.constraint import Constraint
from service.errors import Draining, QueueFull
from service.json_schemas import SchemaRefused, check_schema
from service.lark import GrammarNotLark, prepared_lark
from service.tokenization import Tokenizer

COMPILE_S = 10.0
"""What a client's constraint may take to compile, and may wait for those before it, together."""

SMALL_BYTES = 4096
"""Constraints with texts up to here have a compiling thread of their own: they never wait for a large one."""

MAX_COMPILING = 32
"""Constraints that wait for the compiler, in one front end. More are told to come again."""

CACHED_GRAMMARS, CACHED_BYTES = 64, 4 << 20
"""Compiled grammars that are kept, and the bytes of their texts together."""

STACK_BYTES = 64 << 20
"""Of the threads in which the compiler runs: it recurses where grammars are deep. Taken when touched."""

FEW_ROWS = 4
"""Up to here one thread fills the masks one by one: to wake others takes longer."""

WHITESPACE = r"[ \n\r\t]{1,40}"
"""What may stand between two parts of a JSON text. Bounded: some models like whitespace, and would never end."""

LIMITS = LLParserLimits(
    max_items_in_row=20_000,  # a schema of 2,500 optional properties takes 10,000
    max_lexer_states=20_000,  # some 400 bytes each; all Sequences of a grammar share them
    verbose_errors=False,  # they hold the output so far
)
"""The other limits are the compiler's own. Of what was tried to be slow within them, the slowest took a second of one
core to compile, and 40 ms for its slowest mask; usual masks take 10 to 300 us."""


ALL_TOKENS = 0xFFFFFFFF
"""A word of a mask that leaves all."""

UInt32Array = np.ndarray[Any, np.dtype[np.uint32]]


class GrammarRefused(Exception):
    """The constraint cannot be kept to; the message says why, for the client."""


class Matcher:
    """Where one Sequence stands in its grammar. Not for two threads at once."""

    __slots__ = ("_end_ids", "_inner", "_model_ends", "error", "is_complete", "mask_words")

    def __init__(self, inner: LLMatcher, end_ids: Iterable[int], model_ends: Collection[int], mask_words: int) -> None:
        """end_ids: any of these ends the Sequence, so they may come wherever its text may end. model_ends: the model's
        own, which may come nowhere else. mask_words: int32 words of a mask.
        """
        self._inner = inner
        self.mask_words = mask_words
        self._end_ids = frozenset(token for token in end_ids if token < 32 * mask_words)  # files may name others
        self._model_ends = model_ends
        self.is_complete = False  # the text is whole, and nothing can follow: the Sequence is over
        self.error = ""  # the grammar cannot go on, and why

    @property
    def is_over(self) -> bool:
        return self.is_complete or bool(self.error)

    def advance(self, token: int) -> None:
        """The Sequence has got `token`. Nothing changes once it is over."""
        if self._takes(token):
            self._took(self._inner.consume_token(token))

    def fill(self, mask: Int32Array) -> None:
        """Set bit id % 32 of word id // 32 of `mask` (mask_words,) for each token that may come next, clear the others.

        A Sequence that is over, or turns out to be, gets all: no step will use what it samples.
        """
        if not self.is_over:
            self._inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._settle(mask.view(np.uint32), has_any=bool(mask.any()))

    # --- in parts, so that many Matchers can be worked on together (MaskWorker)

    def _takes(self, token: int) -> bool:
        """Whether the compiler's matcher has to consume the token; then `_took` must follow."""
        if self.is_complete or self.error:
            return False
        self.is_complete = token in self._end_ids
        return not self.is_complete

    def _took(self, well: bool) -> None:
        if not well:
            self._fail(self._inner.get_error())
        elif self._inner.is_stopped():
            self.is_complete = True

    def _settle(self, mask: UInt32Array, *, has_any: bool) -> None:
        """What follows when the compiler's matcher has filled the mask. has_any: whether it has set a bit."""
        if not (self.is_complete or self.error):
            if self._inner.is_error():
                self._fail(self._inner.get_error())
            elif self._inner.is_accepting():
                self._settle_end(mask)
            elif not has_any:
                self._fail("no token can follow")
        if self.is_complete or self.error:
            mask[:] = ALL_TOKENS

    def _settle_end(self, mask: UInt32Array) -> None:
        """The text may end here."""
        for token in self._model_ends:
            mask[token >> 5] &= ~(1 << (token & 31)) & ALL_TOKENS
        if not mask.any():
            self.is_complete = True
            return
        for token in self._end_ids:
            mask[token >> 5] |= 1 << (token & 31)

    def _fail(self, message: str) -> None:
        self.error = _told(message) or "the output has left its grammar"

    def copy(self, end_ids: Sequence[int]) -> "Matcher":
        """One that stands at the same place and goes on by itself, in a Sequence that any of `end_ids` ends."""
        twin = Matcher(self._inner.deep_copy(), end_ids, self._model_ends, self.mask_words)
        twin.is_complete, twin.error = self.is_complete, self.error
        return twin


class Grammar:
    """A compiled constraint."""

    def __init__(self, inner: LLMatcher, end_ids: Collection[int], mask_words: int) -> None:
        """end_ids: of the model."""
        self._inner = inner
        self._model_ends = end_ids
        self._mask_words = mask_words

    def start(self, end_ids: Sequence[int]) -> Matcher:
        """For a Sequence that any of `end_ids` ends."""
        return Matcher(self._inner.deep_copy(), end_ids, self._model_ends, self._mask_words)


class Grammars:
    """Compiles for one model. Its methods are for the event loop."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, end_ids: Sequence[int]) -> None:
        """vocabulary: ids that the model's logits have; end_ids: of the model."""
        self._tokenizer = tokenizer
        self._vocabulary = max(vocabulary, tokenizer.vocabulary)  # a tokenizer may have ids that its model lacks
        self._end_ids = [token for token in end_ids if token < self._vocabulary]
        self._prepared: LLTokenizer | None = None  # takes up to a second: made when it is first needed
        self._preparing = threading.Lock()
        self._cache: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._cached_bytes = 0
        self._compiling: dict[Constraint, asyncio.Future[Grammar]] = {}
        self._awaited: Counter[Constraint] = Counter()  # by how many
        self._begun: set[Constraint] = set()  # of those in `_compiling`, and of those that nobody waits for any more
        self._workers: dict[bool, ThreadPoolExecutor] = {}  # by whether the text is small; made when first needed
        self._is_closed = False

    def cached(self, constraint: Constraint) -> Grammar | None:
        """The grammar, if it is there already."""
        grammar = self._cache.get(constraint)
        if grammar is not None:
            self._cache.move_to_end(constraint)
        return grammar

    async def compile(self, constraint: Constraint) -> Grammar:
        """In a thread, unless it is cached. Raises GrammarRefused, or Draining after `close`."""
        if (grammar := self.cached(constraint)) is not None:
            return grammar
        if self._is_closed:
            raise Draining
        if (compiling := self._compiling.get(constraint)) is None:
            worker = self._worker_for(constraint)
            compiling = asyncio.get_running_loop().run_in_executor(worker, self._compile_in_turn, constraint)
            self._compiling[constraint] = compiling
            compiling.add_done_callback(lambda done: self._compiled(constraint, done))
        self._awaited[constraint] += 1
        try:
            return await asyncio.shield(compiling)
        except asyncio.CancelledError:
            if self._is_closed and compiling.cancelled():
                raise Draining from None
            raise
        finally:
            self._awaited[constraint] -= 1
            if not self._awaited[constraint]:
                del self._awaited[constraint]
                if constraint not in self._begun and not compiling.done():  # everybody left: it need not begin
                    del self._compiling[constraint]
                    compiling.cancel()

    def _worker_for(self, constraint: Constraint) -> ThreadPoolExecutor:
        is_small = len(constraint.text) <= SMALL_BYTES
        if (worker := self._workers.get(is_small)) is None:
            worker = self._workers[is_small] = thread_with_deep_stack("grammars" if is_small else "large_grammars")
        return worker

    async def check(self, constraint: Constraint) -> None:
        """Raises GrammarRefused if a constraint cannot be kept to or takes too long; QueueFull if others take it;
        Draining after `close`.
        """
        if self.cached(constraint) is None and len(self._compiling) >= MAX_COMPILING:
            raise QueueFull(f"{MAX_COMPILING} grammars are waiting to be compiled: try again later", retry_after_s=1)
        try:
            await asyncio.wait_for(self.compile(constraint), COMPILE_S)
        except TimeoutError:
            if constraint not in self._begun:
                raise QueueFull("other grammars are being compiled: try again later", retry_after_s=1) from None
            raise GrammarRefused(f"compiling it takes more than {COMPILE_S:g} s") from None

    def forget(self, constraint: Constraint) -> None:
        """A Sequence came to an end in it by an error: states that it has gathered may be what stops the next, too."""
        if self._cache.pop(constraint, None) is not None:
            self._cached_bytes -= len(constraint.text)

    def close(self) -> None:
        """Let the threads end: what is being compiled is not waited for. Whoever waits is told. Idempotent."""
        self._is_closed = True
        for compiling in [each for each in self._compiling.values() if not each.done()]:
            compiling.cancel()
        for worker in self._workers.values():
            worker.shutdown(wait=False, cancel_futures=True)

    def _compiled(self, constraint: Constraint, done: "asyncio.Future[Grammar]") -> None:
        if self._compiling.get(constraint) is done:
            del self._compiling[constraint]
        if constraint not in self._compiling:
            self._begun.discard(constraint)
        if done.cancelled() or done.exception() is not None:
            return
        self._cache[constraint] = done.result()
        self._cached_bytes += len(constraint.text)
        while len(self._cache) > CACHED_GRAMMARS or self._cached_bytes > CACHED_BYTES:
            oldest, _ = self._cache.popitem(last=False)
            self._cached_bytes -= len(oldest.text)

    # --- in the threads

    def _compile_in_turn(self, constraint: Constraint) -> Grammar:
        self._begun.add(constraint)
        try:
            return self._compile(constraint)
        except Exception:
            raise
        except BaseException as panic:  # of the compiler: as an Exception it is one request's, and ends nothing else
            raise RuntimeError("the compiler of grammars has panicked") from panic

    def _compile(self, constraint: Constraint) -> Grammar:
        source = _source_of(constraint)
        with self._preparing:
            if self._prepared is None:
                self._prepared = self._prepare()
        matcher = LLMatcher(self._prepared, source, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarRefused(_told(matcher.get_error()))
        grammar = Grammar(matcher, self._end_ids, mask_words(self._vocabulary))
        first = grammar.start([])
        first.fill(np.empty(first.mask_words, np.int32))  # finds more faults, and readies what it needs again
        if first.error:
            raise GrammarRefused(first.error)
        if first.is_complete:
            raise GrammarRefused("it admits no text but the empty one")
        return grammar

    def _prepare(self) -> LLTokenizer:
        try:
            text = self._tokenizer.backend.to_str()
            return LLTokenizer(text, n_vocab=self._vocabulary, eos_token=self._end_ids or None)
        except ValueError as error:
            raise GrammarRefused(f"this model's tokenizer cannot be constrained: {error}") from error


class MaskWorker:
    """The thread that advances Matchers and fills masks, and the pool that helps it with many."""

    def __init__(self) -> None:
        self._thread = thread_with_deep_stack("masks")
        self._pool = LLExecutor()

    async def turn(
        self, sampled: Sequence[tuple[Matcher, int]], following: Sequence[Matcher], masks: Int32Array
    ) -> None:
        """Off the event loop: advance Matchers by the tokens of one step, then fill masks[i] for following[i], those
        that the next step samples under. masks (N or more, words of the model's own vocabulary).
        """
        await asyncio.get_running_loop().run_in_executor(self._thread, self._turn, sampled, following, masks)

    def close(self) -> None:
        """Let the thread end. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _turn(self, sampled: Sequence[tuple[Matcher, int]], following: Sequence[Matcher], masks: Int32Array) -> None:
        self._advance(sampled)
        if not following:
            return
        if (words := following[0].mask_words) == masks.shape[1]:
            self._fill(following, masks[: len(following)])
        else:
            filled = np.empty((len(following), words), np.int32)
            self._fill(following, filled)
            masks[: len(following)] = filled[:, : masks.shape[1]]

    def _advance(self, sampled: Sequence[tuple[Matcher, int]]) -> None:
        if len(sampled) <= FEW_ROWS:
            for matcher, token in sampled:
                matcher.advance(token)
            return
        taking = [(matcher, token) for matcher, token in sampled if matcher._takes(token)]
        took = self._pool.consume_token_par([(matcher._inner, token) for matcher, token in taking]) if taking else []
        for (matcher, _), well in zip(taking, took, strict=True):
            matcher._took(well)

    def _fill(self, following: Sequence[Matcher], masks: Int32Array) -> None:
        if len(following) <= FEW_ROWS:
            for matcher, mask in zip(following, masks, strict=True):
                matcher.fill(mask)
            return
        work = [(each._inner, i) for i, each in enumerate(following) if not each.is_over]
        if work:
            self._pool.unsafe_compute_mask_ptr(work, masks.ctypes.data, masks.shape[1] * masks.itemsize, len(masks))
        have_any: Sequence[bool] = (masks != 0).any(axis=1).tolist()
        for matcher, mask, has_any in zip(following, masks.view(np.uint32), have_any, strict=True):
            matcher._settle(mask, has_any=has_any)


def thread_with_deep_stack(name: str) -> ThreadPoolExecutor:
    """One thread, running, with STACK_BYTES of stack."""
    before = threading.stack_size(STACK_BYTES)
    try:
        pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        pool.submit(int).result()
    finally:
        threading.stack_size(before)
    return pool


def _source_of(constraint: Constraint) -> str:
    """The constraint as the compiler wants it. Raises GrammarRefused."""
    spelling: Any = {"whitespace_pattern": WHITESPACE}
    try:
        match constraint.kind:
            case "json_object":
                return LLMatcher.grammar_from_json_schema('{"type":"object"}', overrides=spelling)
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(_schema_of(constraint.text), overrides=spelling)
            case "regex":
                return LLMatcher.grammar_from_regex(constraint.text)
            case "choice":
                strings = msgspec.json.decode(constraint.text, type=list[str])
                alternatives = " | ".join(msgspec.json.encode(string).decode() for string in strings)
                return LLMatcher.grammar_from_lark(f"start: {alternatives}")
            case "lark":
                return LLMatcher.grammar_from_lark(prepared_lark(constraint.text, spelling))
    except (SchemaRefused, GrammarNotLark) as error:
        raise GrammarRefused(str(error)) from None
    except RecursionError:
        raise GrammarRefused("it is nested too deeply") from None
    except ValueError as error:  # also of msgspec, and of the compiler's own reading of JSON
        raise GrammarRefused(f"it cannot be read: {error}") from None


def _schema_of(text: str) -> str:
    """A schema as the compiler takes it: it wants an object. Raises SchemaRefused and ValueError."""
    schema = msgspec.json.decode(text)
    check_schema(schema)
    if schema is False:
        raise SchemaRefused("nothing satisfies the schema false")
    return "{}" if schema is True else text


def _told(message: str) -> str:
    """The compiler's message on one line, without the dump of its state that may follow."""
    line = " ".join(re.split("<state>|<non-verbose", message)[0].split())[:400]
    return "no text can satisfy it" if line.startswith("NoExtension") else line
