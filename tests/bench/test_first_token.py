"""Which servers are compared, and in which order they take turns."""

from pathlib import Path

from bench.first_token import order_of, trees_of


def test_checkouts_have_labels_and_may_be_given_twice(tmp_path: Path) -> None:
    found = trees_of([f"before={tmp_path}", ".", f"before={tmp_path}"])
    assert found == {"before": tmp_path, ".": Path.cwd(), "before'": tmp_path}


def test_nobody_is_always_first() -> None:
    assert [order_of(["a", "b", "c"], turn) for turn in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
