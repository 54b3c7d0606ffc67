"""Forks by the API, in the engine's process: a new request that goes on from where a running one stands.

The child begins with all tokens that the parent has by then, and with its pages, by a fork: nothing is computed again
but the last token, and the last page is copied when it is written to. From then on they are relatives (family.py):
either may be preempted, swapped or ended without the other. A child waits for its turn as a new request does; if nobody
of its family has a row by then, it finds in the page cache what is there, and computes the rest.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items

import msgspec

from service.engine_client import Limits, QueueState, Submit
from service.errors import BadRequest, NotFound, NotStarted, quoted
from service.questions import PARENT_HAS_ENDED, FindParent, Fork, Forked, Parent
from service.request import Sequence, State
from service.scheduler import Scheduler


def find_parent(scheduler: Scheduler, unread: Iterable[Submit], asked: FindParent) -> Parent:
    """The choice that is to be forked. Raises NotFound, NotStarted or BadRequest."""
    name = quoted(asked.request_ids[0])
    mine = [each for each in scheduler.open_sequences() if each.owner == asked.owner]
    choices = [each for each in mine if each.request_id in asked.request_ids]
    if not choices:
        if any(each.owner == asked.owner and each.request_id in asked.request_ids for each in unread):
            raise _not_started(name)
        raise NotFound(f"No request {name} of yours is open.")
    parent = _choice_of(choices, asked.choice, name)
    if parent.state is State.CHOICE:
        raise BadRequest("A beam search cannot be forked: which beams it will give is not known before its end.")
    if scheduler.sequences.known(parent) == parent.prompt_tokens:
        raise _not_started(name)
    return Parent(parent.key, parent.request_id, parent.form, parent.sampling, parent.text, parent.text_begin)


def _choice_of(choices: Items[Sequence], number: int | None, name: str) -> Sequence:
    if number is None:
        if len(choices) > 1:
            message = f"{len(choices)} choices of {name} are open: say which is to be forked."
            raise BadRequest(message, param="choice")
        return choices[0]
    found = [each for each in choices if each.choice == number]
    if not found:
        raise NotFound(f"Choice {quoted(number, 32)} of {name} is not open.", param="choice")
    return min(found, key=lambda each: each.submitted_s)


def _not_started(name: str) -> NotStarted:
    return NotStarted(f"Request {name} has not got its first token yet: there is nothing to fork.")


def fork(scheduler: Scheduler, limits: Limits, queue: QueueState, front_end: int, asked: Fork, now: float) -> Forked:
    """Queue the child. Raises NotFound if the parent has ended since it was found, BadRequest if the child cannot fit,
    QueueFull.
    """
    parent = scheduler.find(asked.parent)
    if parent is None or parent.owner != asked.owner:
        raise NotFound(PARENT_HAS_ENDED)
    tokens = scheduler.sequences.tokens_of(parent)
    made = len(tokens) - parent.prompt_tokens
    max_tokens = parent.limit - len(tokens) if asked.max_tokens is None else asked.max_tokens
    limits.check_fits(len(tokens), max_tokens, parent.tenant)
    if asked.sampling.min_tokens > max_tokens:
        words = f"min_tokens must be at most max_tokens, here {max_tokens}, got {asked.sampling.min_tokens}."
        raise BadRequest(words, param="min_tokens")
    limits.check_queue(queue, 1, len(tokens))
    sampling, inherited = asked.sampling, len(tokens) - parent.answer_begin
    if sampling.min_tokens:  # executors count from where the answer begins
        sampling = msgspec.structs.replace(sampling, min_tokens=sampling.min_tokens + inherited)
    message = msgspec.structs.replace(
        parent.continued(tokens.tolist(), now),
        sequence_id=asked.sequence_id,
        request_id=asked.request_id,
        client=asked.client,
        max_tokens=max_tokens,
        sampling=sampling,
        end_ids=asked.end_ids,
        text=asked.text,
        priority=asked.priority,
        timeout_s=asked.timeout_s,
    )
    scheduler.fork(parent, message, inherited, front_end, now)
    return Forked(message.prompt_ids, parent.answer_begin, made, max_tokens)
