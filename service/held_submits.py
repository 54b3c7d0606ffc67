"""Submits that wait for their grammar: the engine goes on meanwhile, and gets them back when it is compiled.

What comes about a held Submit's Sequences (a Cancel, say) is kept with it, so the engine sees it in order.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from service.engine_client import Message, Submit
from service.grammars import Grammar, GrammarRefused, Grammars

log = structlog.get_logger("pagewalk.engine")


@dataclass(eq=False)
class Held:
    """A constrained Submit. When it is released it has its grammar, or the reason why there is none."""

    front_end: int
    message: Submit
    came_s: float  # on the engine's clock
    grammar: Grammar | None = None
    refusal: str = ""
    is_our_fault: bool = False
    later: list[Message] = field(default_factory=list)


class HeldSubmits:
    """Those of one engine. For its event loop."""

    def __init__(self, release: Callable[[Held], None]) -> None:
        """release(held) is called once for each, at once where the grammar is there."""
        self.grammars: Grammars | None = None  # None: the model has no tokenizer here, so nothing can be constrained
        self._release = release
        self._held: dict[tuple[int, int], Held] = {}  # by each of its Sequences
        self._compiling: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, front_end: int, message: Submit, now: float) -> None:
        """Keep a Submit that has a constraint until its grammar is compiled."""
        assert message.constraint is not None
        held = Held(front_end, message, now)
        self._held.update({(front_end, sequence_id): held for sequence_id in message.sequence_ids})
        if self.grammars is None:
            held.refusal = "this engine compiles no grammars"
        else:
            held.grammar = self.grammars.cached(message.constraint)
        if held.grammar is not None or self.grammars is None:
            self._release(held)
            return
        task = asyncio.ensure_future(self._compile(held, self.grammars))
        self._compiling.add(task)
        task.add_done_callback(self._compiling.discard)

    def keeps(self, front_end: int, message: Message) -> bool:
        """Whether a message is about a Sequence that is held: then it is kept with it."""
        held = self._held.get((front_end, message.sequence_id))
        if held is not None:
            held.later.append(message)
        return held is not None

    def take(self, held: Held) -> None:
        """It is held no more: the engine has it."""
        for sequence_id in held.message.sequence_ids:
            del self._held[held.front_end, sequence_id]

    def submits(self) -> list[tuple[int, Submit]]:
        """All that are held, with their front ends."""
        return [(held.front_end, held.message) for held in dict.fromkeys(self._held.values())]

    def close(self) -> None:
        """Nobody waits any more."""
        for task in self._compiling:
            task.cancel()

    async def _compile(self, held: Held, grammars: Grammars) -> None:
        assert held.message.constraint is not None
        try:
            held.grammar = await grammars.compile(held.message.constraint)
        except GrammarRefused as error:
            held.refusal = str(error)
        except Exception as error:  # whoever waits is told, whatever went wrong
            log.error("a grammar was not compiled", request_id=held.message.request_id, exc_info=error)
            held.refusal, held.is_our_fault = "The server failed to compile this request's grammar.", True
        self._release(held)
