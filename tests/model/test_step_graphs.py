"""Which graphs exist when, by made-up captures on a fake clock."""

from collections.abc import Iterator

import pytest

from model.step_graphs import RETRY_S, GraphSize, Kind, StepGraphs, kind_of, ladder, step_sizes


class Graphs:
    """StepGraphs whose captures take 5 ms each."""

    def __init__(self, sizes: Iterator[tuple[GraphSize, bool]] | None = None, seconds: float = 0.0) -> None:
        self.now = 0.0
        self.captures: list[GraphSize] = []
        sizes = sizes or ladder(max_running=256, max_tokens=512, reads_shared=True)
        self.graphs = StepGraphs(sizes, self.capture, seconds=seconds, clock=lambda: self.now)
        self.at_first = len(self.captures)

    def capture(self, size: GraphSize) -> "Named":
        self.captures.append(size)
        self.now += 0.005
        return Named(size)

    def find(self, kind: Kind, tokens: int, sequences: int, *, weighs: bool = True) -> GraphSize | None:
        found = self.graphs.find(kind, tokens, sequences, weighs=weighs)
        assert found is None or isinstance(found, Named)
        return found.size if found else None

    @property
    def later(self) -> list[GraphSize]:
        return self.captures[self.at_first :]


class Named:
    """A graph that knows its size."""

    def __init__(self, size: GraphSize) -> None:
        self.size = size

    def replay(self) -> None: ...


@pytest.mark.parametrize("max_running", [1, 5, 100, 256, 1024])
@pytest.mark.parametrize("kind", [Kind.DECODE, Kind.SHARED])
def test_from_the_start_every_batch_finds_a_graph_of_at_most_twice_its_size(max_running, kind) -> None:
    graphs = Graphs(ladder(max_running=max_running, max_tokens=2048, reads_shared=True))
    least = min(8, max_running) if kind is Kind.SHARED else 1
    for sequences in range(least, max_running + 1):
        found = graphs.find(kind, sequences, sequences)
        assert found is not None
        assert sequences <= found.tokens <= 2 * sequences
    assert graphs.find(kind, max_running + 1, max_running + 1) is None


def test_from_the_start_every_small_mixed_step_finds_a_graph() -> None:
    graphs = Graphs()
    for tokens in range(1, 513):
        found = graphs.find(Kind.MIXED, tokens, min(tokens, 256))
        assert found is not None
        assert found.tokens <= max(16, 2 * tokens)
    assert graphs.find(Kind.MIXED, 513, 8) is None


def test_from_the_start_a_small_prompt_alone_finds_a_graph_for_few_sequences() -> None:
    graphs = Graphs()
    for tokens in range(1, 513):
        found = graphs.find(Kind.MIXED, tokens, 1)
        assert found is not None
        assert found.sequences == 8
        assert found.tokens <= max(16, 2 * tokens)


def test_idle_time_captures_all_sizes_once() -> None:
    graphs = Graphs()
    assert graphs.at_first < len(list(ladder(max_running=256, max_tokens=512, reads_shared=True)))
    while graphs.graphs.capture_next():
        pass
    sizes = [size for size, _ in ladder(max_running=256, max_tokens=512, reads_shared=True)]
    assert sorted(graphs.captures, key=repr) == sorted(sizes, key=repr)
    assert graphs.graphs.captured == len(sizes)
    assert not graphs.graphs.capture_next()
    assert graphs.captures == [*dict.fromkeys(graphs.captures)]


def test_with_all_captured_a_step_takes_the_smallest_that_holds_it() -> None:
    graphs = Graphs()
    while graphs.graphs.capture_next():
        pass
    assert graphs.find(Kind.DECODE, 33, 33) == GraphSize(Kind.DECODE, 40, 40)
    assert graphs.find(Kind.SHARED, 33, 33) == GraphSize(Kind.SHARED, 48, 48)
    assert graphs.find(Kind.MIXED, 129, 9) == GraphSize(Kind.MIXED, 160, 64)


def test_large_steps_have_graphs_if_they_all_but_fill_one() -> None:
    graphs = Graphs(ladder(max_running=256, max_tokens=4000, reads_shared=False), seconds=10.0)
    found = [graphs.find(Kind.MIXED, tokens, 9) for tokens in (4000, 3750, 3749, 1024, 960, 959, 513, 512)]
    full, large = (GraphSize(Kind.MIXED, n, 64, least_tokens=least) for n, least in ((4000, 3750), (1024, 960)))
    assert found == [full, full, None, large, large, None, None, GraphSize(Kind.MIXED, 512, 64)]
    assert graphs.find(Kind.MIXED, 4000, 257) is None


def test_a_step_that_is_cut_to_one_of_the_sizes_has_a_graph_of_exactly_that() -> None:
    assert step_sizes(300) == step_sizes(512) == ()
    for max_tokens in (600, 2048, 8192):
        graphs = Graphs(ladder(max_running=256, max_tokens=max_tokens, reads_shared=False), seconds=10.0)
        sizes = step_sizes(max_tokens)
        assert (sizes[0], sizes[-1]) == (512, max_tokens)
        for tokens in sizes:
            found = graphs.find(Kind.MIXED, tokens, 33)
            assert found is not None
            assert found.tokens == tokens


def test_a_step_that_weighs_nothing_takes_a_graph_without_it_or_a_smaller_one_with_it() -> None:
    graphs = Graphs()
    assert graphs.find(Kind.DECODE, 33, 33, weighs=False) == GraphSize(Kind.DECODE, 64, 64)
    graphs.graphs.capture_next()
    assert graphs.later == [GraphSize(Kind.DECODE, 40, 40, weighs=False)]
    assert graphs.find(Kind.DECODE, 33, 33, weighs=False) == GraphSize(Kind.DECODE, 40, 40, weighs=False)
    assert graphs.find(Kind.DECODE, 33, 33, weighs=True) == GraphSize(Kind.DECODE, 64, 64)
    assert graphs.find(Kind.DECODE, 3, 3, weighs=False) == GraphSize(Kind.DECODE, 4, 4)


def test_prompts_alone_take_a_graph_without_decodes_where_that_is_no_larger() -> None:
    graphs = Graphs()
    assert graphs.find(Kind.PROMPT, 150, 3) == GraphSize(Kind.MIXED, 256, 8)
    graphs.graphs.capture_next()
    assert graphs.later == [GraphSize(Kind.PROMPT, 160, 8)]
    assert graphs.find(Kind.PROMPT, 150, 3) == GraphSize(Kind.PROMPT, 160, 8)
    assert graphs.find(Kind.PROMPT, 200, 3) == GraphSize(Kind.MIXED, 256, 8)
    assert graphs.find(Kind.PROMPT, 150, 9) == GraphSize(Kind.MIXED, 256, 256)
    while graphs.graphs.capture_next():
        pass
    assert graphs.find(Kind.PROMPT, 200, 3) == GraphSize(Kind.PROMPT, 256, 8)
    assert graphs.find(Kind.PROMPT, 150, 9) == GraphSize(Kind.MIXED, 160, 64)
    assert graphs.find(Kind.PROMPT, 4, 4) == GraphSize(Kind.PROMPT, 16, 8)


@pytest.mark.parametrize(
    ("tokens", "sequences", "wanted"),
    [
        (150, 9, GraphSize(Kind.MIXED, 160, 64)),
        (1024, 3, GraphSize(Kind.MIXED, 1024, 8, least_tokens=960)),
        (150, 3, GraphSize(Kind.PROMPT, 160, 8)),
    ],
)
def test_what_prompts_alone_missed_is_captured_first_also_where_it_is_a_mixed_one(tokens, sequences, wanted) -> None:
    graphs = Graphs(ladder(max_running=256, max_tokens=4000, reads_shared=True))
    graphs.find(Kind.PROMPT, tokens, sequences)
    graphs.graphs.capture_next()
    assert graphs.later == [wanted]


@pytest.mark.parametrize(
    ("decodes", "masked", "shared", "kind"),
    [
        (3, False, False, Kind.DECODE),
        (3, False, True, Kind.SHARED),
        (3, True, True, Kind.LOGITS),
        (2, False, False, Kind.MIXED),
        (2, False, True, Kind.MIXED),
        (1, True, False, Kind.MIXED_LOGITS),
        (0, True, False, Kind.MIXED_LOGITS),
        (0, False, False, Kind.PROMPT),
    ],
)
def test_the_kind_of_a_step_of_three_sequences(decodes, masked, shared, kind) -> None:
    assert kind_of(decodes=decodes, sequences=3, is_masked=masked, reads_shared=shared) is kind
    assert kind.decodes >= (decodes > 0)
    assert kind.prefills == (decodes < 3)


def test_what_a_step_missed_is_captured_first() -> None:
    graphs = Graphs()
    assert graphs.find(Kind.MIXED, 150, 3) == GraphSize(Kind.MIXED, 256, 8)
    graphs.graphs.capture_next()
    assert graphs.later == [GraphSize(Kind.MIXED, 160, 8)]
    assert graphs.find(Kind.MIXED, 150, 3) == GraphSize(Kind.MIXED, 160, 8)


def test_all_that_steps_missed_comes_before_the_rest_the_latest_first() -> None:
    graphs = Graphs()
    wanted = [GraphSize(Kind.MIXED, 160, 8), GraphSize(Kind.DECODE, 40, 40), GraphSize(Kind.PROMPT, 96, 8)]
    for size in (*wanted, wanted[1]):
        graphs.find(size.kind, size.tokens, size.sequences)
    for _ in range(4):
        graphs.graphs.capture_next()
    assert graphs.later == [wanted[1], wanted[2], wanted[0], GraphSize(Kind.PROMPT, 16, 8)]


def test_a_start_captures_prompts_alone_before_what_is_not_among_the_first() -> None:
    """Who asks one thing after the other never leaves an engine idle for so long that the rest is captured."""
    prompts = {
        size for size, _ in ladder(max_running=256, max_tokens=512, reads_shared=True) if size.kind is Kind.PROMPT
    }
    first = Graphs().at_first
    graphs = Graphs(seconds=0.005 * (first + len(prompts)))
    assert set(graphs.captures[first:]) == prompts


def test_a_start_goes_on_capturing_for_a_bounded_time() -> None:
    """The first ones in any case; then as many as come in the time."""
    sizes = list(ladder(max_running=256, max_tokens=512, reads_shared=True))
    first = sum(is_first for _, is_first in sizes)
    sampling = sum(size.kind.samples for size, _ in sizes)
    assert Graphs().at_first == first
    assert Graphs(seconds=0.005 * (first + 3)).at_first == first + 3
    assert Graphs(seconds=10.0).at_first == sampling < len(sizes)  # steps with masks are rare: theirs come in idle time


def test_after_clear_there_are_none_and_none_come() -> None:
    graphs = Graphs()
    graphs.find(Kind.DECODE, 33, 33)
    graphs.graphs.clear()
    assert graphs.find(Kind.DECODE, 1, 1) is None
    assert not graphs.graphs.capture_next()
    assert graphs.later == []


def test_without_memory_for_a_graph_steps_do_without_and_it_is_tried_again_later() -> None:
    """Neither the start nor the idle time goes on trying."""
    graphs = Graphs()
    capture, refused = graphs.capture, []

    def refuse(size: GraphSize) -> None:
        graphs.now += 0.005
        refused.append(size)

    graphs.graphs._capture_one = refuse
    assert not graphs.graphs.capture_next()
    assert not graphs.graphs.capture_next()
    assert len(refused) == 1
    assert graphs.find(Kind.DECODE, 33, 33) == GraphSize(Kind.DECODE, 64, 64)
    graphs.graphs._capture_one = capture
    graphs.now += RETRY_S
    assert graphs.graphs.capture_next()
    assert graphs.find(Kind.DECODE, 33, 33) == GraphSize(Kind.DECODE, 40, 40)
    sizes = ladder(max_running=256, max_tokens=512, reads_shared=True)
    started = StepGraphs(sizes, refuse, seconds=10.0, clock=lambda: graphs.now)
    assert len(refused) == 2
    assert started.captured == 0
