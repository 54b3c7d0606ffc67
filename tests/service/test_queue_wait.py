"""How long the queue takes: by how fast others have left it while some waited."""

from service.queue_wait import LONGEST_S, Admissions, QueueWait


def after(steps: int, requests_a_step: int, tokens_a_step: int, *, waits: bool = True) -> QueueWait:
    """`steps` of one second each, which admit as many."""
    wait, admissions = QueueWait(), Admissions()
    for second in range(steps + 1):
        wait.observe(admissions, float(second), waits=waits)
        admissions.requests += requests_a_step
        admissions.tokens += tokens_a_step
    return wait


def test_nothing_is_known_at_first() -> None:
    assert QueueWait().seconds(1000, 100_000) == 1


def test_the_slower_of_requests_and_tokens_says_how_long() -> None:
    wait = after(60, 2, 100)
    assert wait.seconds(20, 100) == 10
    assert wait.seconds(20, 5000) == 50
    assert wait.seconds(0, 0) == 1
    assert wait.seconds(10_000, 0) == LONGEST_S


def test_where_nobody_leaves_the_wait_is_the_longest() -> None:
    assert after(5, 0, 0).seconds(1, 1) == LONGEST_S


def test_time_without_a_queue_says_nothing() -> None:
    """Requests that come one by one and are served at once do not show how many could be."""
    assert after(60, 1, 10, waits=False).seconds(1000, 1000) == 1


def test_what_is_long_ago_counts_less() -> None:
    wait, admissions = QueueWait(), Admissions()
    for second in range(300):
        wait.observe(admissions, float(second), waits=True)
        admissions.requests += 10 if second < 100 else 1
        admissions.tokens += 10
    assert 9 <= wait.seconds(10, 10) <= 10
