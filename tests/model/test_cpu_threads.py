"""How many threads a step gets: by its size, from times that are given here."""

import os

import pytest

from model.cpu_threads import ThreadCounts, choose_threads, usable_cores


@pytest.mark.parametrize(
    ("cores", "one_row", "many_rows", "chosen"),
    [
        (1, {}, {}, ThreadCounts(1, 1, 1)),
        (2, {1: 29.0, 2: 31.0}, {}, ThreadCounts(1, 2, 2)),
        (2, {1: 29.0, 2: 28.0}, {}, ThreadCounts(1, 2, 2)),  # within a twentieth: the fewest
        (2, {1: 29.0, 2: 20.0}, {}, ThreadCounts(2, 2, 2)),
        (6, {1: 9.0, 2: 5.0, 4: 3.0, 6: 4.0}, {4: 9.0, 6: 7.0}, ThreadCounts(4, 6, 6)),
        (16, {1: 9.0, 2: 5.0, 4: 3.0, 8: 3.0, 16: 8.0}, {4: 10.0, 8: 9.0, 16: 20.0}, ThreadCounts(4, 8, 16)),
        (24, dict.fromkeys((1, 2, 4, 8, 16, 24), 5.0), {4: 9.5, 8: 9.0, 16: 9.6, 24: 9.8}, ThreadCounts(1, 24, 24)),
    ],
)
def test_few_tokens_take_the_fewest_quick_threads_and_more_the_most(
    cores: int, one_row: dict[int, float], many_rows: dict[int, float], chosen: ThreadCounts
) -> None:
    assert choose_threads(cores, lambda threads, rows: (one_row if rows == 1 else many_rows)[threads]) == chosen


def test_a_step_gets_the_threads_of_its_size() -> None:
    counts = ThreadCounts(1, 2, 3)
    assert [counts.of(tokens) for tokens in (0, 1, 4, 5, 64, 65, 8192)] == [1, 1, 1, 2, 2, 3, 3]


def test_usable_cores_are_at_least_one_and_no_more_than_there_are() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
