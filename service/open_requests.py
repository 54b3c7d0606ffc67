"""What is known of requests that have not ended, for their owners (GET /v1/requests).

Made in the engine's process, from its Sequences: a front end sees its own requests only, an owner may use several.
"""

from collections.abc import Iterable

from service.engine_client import OpenRequest, OpenSequence, SequenceState, Submit
from service.request import Sequence, State
from service.scheduler import Scheduler


def open_requests(scheduler: Scheduler, unread: Iterable[Submit], owner: str, now: float) -> list[OpenRequest]:
    """The requests of an owner, oldest first. unread: submitted, and not seen by the scheduler yet."""
    found: dict[str, OpenRequest] = {}
    for sequence in sorted(scheduler.open_sequences(), key=lambda each: (each.submitted_s, each.key)):
        if sequence.owner == owner:
            age_s = now - sequence.submitted_s
            request = found.setdefault(sequence.request_id, OpenRequest(sequence.request_id, age_s, []))
            request.sequences.append(describe(sequence, scheduler))
    for message in unread:
        if message.owner == owner:
            request = found.setdefault(message.request_id, OpenRequest(message.request_id, 0.0, []))
            one = OpenSequence("queued", len(message.prompt_ids), 0, 0, message.max_tokens, 0)
            request.sequences.extend([one] * (1 + len(message.siblings)))
    return list(found.values())


def describe(sequence: Sequence, scheduler: Scheduler) -> OpenSequence:
    """One choice, as far as it has come."""
    state: SequenceState
    match sequence.state:
        case State.RUNNING:
            state = "prefill" if sequence.first_token_s is None else "decode"
        case State.SWAPPED:
            state = "swapped"
        case State.PAUSED:
            state = "paused"
        case State.CHOICE:  # its beams have the tokens; which are its own is known at the end
            assert sequence.group is not None
            state = "decode" if sequence.group.family.with_row else "queued"
        case _:
            state = "queued" if sequence.admitted_s is None else "preempted"
    return OpenSequence(
        state=state,
        prompt_tokens=sequence.prompt_tokens,
        cached_tokens=sequence.cached_tokens,
        output_tokens=max(0, scheduler.sequences.known(sequence) - sequence.prompt_tokens),
        max_tokens=sequence.max_tokens,
        preemptions=sequence.preemptions,
    )
