"""The upload's way to the device, and sampling there, against the definition in model/sampler.py."""

import numpy as np
import pytest
import torch

from cuda.errors import ShapeMismatch
from cuda.sample import Sample, StepResults
from cuda.scatter import DeviceState, SamplingChanges, Scatter, StepUpload, copies_of, pack, words_for
from mm.page_copies import PageCopies, TableChanges
from model.sampler import SamplingRows, sample
from model.step_plan import RowSettings, SamplingParameters

INT = np.int32


def make_state(device, max_sequences=8, max_tokens=32) -> DeviceState:
    return DeviceState(
        device.name, max_rows=12, max_pages=6, max_sequences=max_sequences, max_tokens=max_tokens, upload_words=4096
    )


def send(device, state, upload, padded_sequences, padded_tokens) -> np.ndarray:
    """Pack, upload, scatter."""
    words = np.full(4096, 77, INT)
    used = pack(upload, words)
    state.upload[:used].copy_(torch.from_numpy(words[:used]))
    Scatter(device.loader, state)(device.stream, padded_sequences, padded_tokens)
    device.synchronize()
    return words


def step(rows, starts, counts, *, step=1, decodes=0, samples=None, token_ids=None, **rest) -> StepUpload:
    counts = np.array(counts, INT)
    total = int(counts.sum())
    return StepUpload(
        step=step,
        rows=np.array(rows, INT),
        starts=np.array(starts, INT),
        query_starts=np.concatenate(([0], counts.cumsum())).astype(INT),
        token_ids=np.arange(100, 100 + total, dtype=INT) if token_ids is None else np.array(token_ids, INT),
        samples=np.ones(len(rows), bool) if samples is None else np.array(samples),
        decodes=decodes,
        **rest,
    )


# ---- scatter


def test_a_step_is_spread_and_padded(device) -> None:
    """Two decodes and a chunk: every array of the step, with padding that no kernel touches; a fed-back id is looked
    up.
    """
    state = make_state(device)
    state.last_tokens[5] = 4711
    upload = step(
        [5, 2, 9], [40, 7, 16], [1, 1, 3], decodes=2, samples=[True, True, False], token_ids=[-1, 31, 32, 33, 34]
    )
    send(device, state, upload, 5, 8)
    assert state.rows[:5].tolist() == [5, 2, 9, -1, -1]
    assert state.lengths[:5].tolist() == [41, 8, 19, 0, 0]
    assert state.decode_lengths[:5].tolist() == [41, 8, 0, 0, 0]
    assert state.prefill_tokens[:5].tolist() == [0, 0, 3, 0, 0]
    assert state.samples[:5].tolist() == [1, 1, 0, 0, 0]
    assert state.last_query[:5].tolist() == [0, 1, 4, 0, 0]
    assert state.query_starts[:6].tolist() == [0, 1, 2, 5, 5, 5]
    assert state.token_ids[:8].tolist() == [4711, 31, 32, 33, 34, 0, 0, 0]
    assert state.positions[:8].tolist() == [40, 7, 16, 17, 18, 0, 0, 0]
    assert state.token_rows[:8].tolist() == [5, 2, 9, 9, 9, -1, -1, -1]


def test_a_large_step_is_spread(device) -> None:
    """More elements than threads: the search for a token's sequence, and the loops, at every place."""
    counts = np.array([1] * 300 + [0, 17, 1, 700, 2], INT)
    state = DeviceState(device.name, max_rows=400, max_pages=2, max_sequences=320, max_tokens=1100, upload_words=4096)
    rows = np.arange(len(counts))[::-1]
    upload = step(rows, np.arange(len(counts)), counts, decodes=300)
    send(device, state, upload, 320, 1100)
    owner = np.repeat(np.arange(len(counts)), counts)
    assert state.token_rows[: counts.sum()].tolist() == rows[owner].tolist()
    assert (
        state.positions[: counts.sum()].tolist()
        == (np.arange(counts.sum()) - upload.query_starts[owner] + owner).tolist()
    )
    assert (state.token_rows[counts.sum() :] == -1).all()


def test_table_changes_settings_and_copies_arrive(device) -> None:
    """Entries and rows that are named change, others do not; 64-bit settings survive; copies can be read out of the
    upload.
    """
    state = make_state(device)
    state.page_tables.fill_(-5)
    changes = TableChanges(np.array([0, 11, 0], INT), np.array([5, 0, 1], INT), np.array([8, 9, 10], INT))
    settings = SamplingChanges(
        np.array([3, 7], INT),
        np.array([0.5, 0.0], np.float32),
        np.array([40, 0], INT),
        np.array([0.1, 1.0]),
        np.array([2**63 + 5, 1], np.uint64),
    )
    copies = PageCopies(np.array([1, 2], INT), np.array([3, 4], INT))
    words = send(device, state, step([0], [0], [1], changes=changes, settings=settings, copies=copies), 1, 1)
    expected = torch.full((12, 6), -5)
    expected[0, 5], expected[11, 0], expected[0, 1] = 8, 9, 10
    assert torch.equal(state.page_tables.cpu().long(), expected)
    assert state.temperatures[[3, 7, 0]].tolist() == [0.5, 0.0, 0.0]
    assert state.top_ks[[3, 7]].tolist() == [40, 0]
    assert state.top_ps[[3, 7, 0]].tolist() == [0.1, 1.0, 1.0]
    assert state.seeds[[3, 7]].cpu().numpy().view(np.uint64).tolist() == [2**63 + 5, 1]
    sources, targets = copies_of(state.upload, words, 2)
    assert (sources.tolist(), targets.tolist()) == ([1, 2], [3, 4])


def test_table_changes_can_go_ahead_alone(device) -> None:
    """An upload without sequences changes tables and nothing of the step."""
    state = make_state(device)
    send(device, state, step([4], [3], [2]), 1, 2)
    send(device, state, step([], [], [], changes=TableChanges(*np.array([[1], [1], [6]], INT))), 0, 0)
    assert state.page_tables[1, 1] == 6
    assert state.rows[0] == 4
    assert state.token_ids[:2].tolist() == [100, 101]


def test_an_upload_that_does_not_fit_is_refused() -> None:
    """Before a word is written."""
    words = np.full(20, 9, INT)
    upload = step([4], [3], [2])
    with pytest.raises(ShapeMismatch, match=str(words_for(sequences=1, tokens=2, changes=0, settings=0, copies=0))):
        pack(upload, words)
    assert (words == 9).all()


# ---- sampling


class Sampler:
    """Samples one batch on the device, with one row a sequence in another order, beside a padding sequence."""

    def __init__(
        self, device, vocabulary: int, parameters: list[SamplingParameters], positions: list[int], samples=None
    ) -> None:
        self.device, self.count = device, len(parameters)
        self.state = DeviceState(
            device.name,
            max_rows=self.count + 3,
            max_pages=1,
            max_sequences=self.count + 1,
            max_tokens=64,
            upload_words=4096,
        )
        self.results = StepResults(2, self.count + 1, page_locked=not device.is_emulated)
        self.sample = Sample(device.loader, self.state, self.results, vocabulary)
        self.rows = np.arange(self.count, dtype=INT)[::-1] + 2
        self.table = SamplingRows.greedy(self.count + 3)
        self.table.store(RowSettings(self.rows, parameters))
        t, r = self.table, self.rows
        settings = SamplingChanges(r, t.temperature[r], t.top_k[r].astype(INT), t.top_p[r], t.seed[r])
        self.positions = np.array(positions)
        upload = step(
            self.rows,
            self.positions - 1,
            [1] * self.count,
            step=33,
            decodes=self.count,
            samples=samples,
            settings=settings,
            result_slot=1,
        )
        send(device, self.state, upload, self.count + 1, self.count + 1)

    def run(self, logits: torch.Tensor) -> tuple[list[int], list[int]]:
        """Tokens and flags of the batch. The result's step number was not there before."""
        padded = torch.cat((logits, torch.full((1, logits.shape[1]), float("nan")))).to(self.device.name)
        self.results.words[:] = -9
        assert not self.results.is_done(1, 33)
        self.sample(self.device.stream, padded, self.count + 1)
        self.device.synchronize()
        assert self.results.is_done(1, 33)
        assert (self.results.words[0] == -9).all()  # the other slot
        tokens, failed = self.results.read(1, self.count)
        return tokens.tolist(), failed.tolist()

    def expected(self, logits: torch.Tensor) -> list[int]:
        return sample(logits, self.table.take(self.rows), self.positions)[0].tolist()


def test_greedy_takes_the_largest_and_of_equals_the_lowest_id(device, generator) -> None:
    """Across slices of the row, at its first and last place, and for negative zero, which equals zero."""
    logits = torch.randn(5, 1003, generator=generator)
    logits[0, [900, 12, 500]] = 9.0
    logits[1, 1002] = 9.0
    logits[2, 0] = 9.0
    logits[3] = -1.0
    logits[3, 7], logits[3, 8] = -0.0, 0.0
    logits[4] = -5.0
    sampler = Sampler(device, 1003, [SamplingParameters(temperature=0)] * 5, [1, 2, 3, 4, 5])
    tokens, failed = sampler.run(logits)
    assert tokens == [12, 1002, 0, 7, 0]
    assert failed == [0] * 5
    assert sampler.state.last_tokens[torch.from_numpy(sampler.rows).long()].tolist() == tokens


SETTINGS = [
    SamplingParameters(temperature=1.0),
    SamplingParameters(temperature=0.7, top_k=50),
    SamplingParameters(temperature=1.5, top_p=0.9),
    SamplingParameters(temperature=0.8, top_k=50, top_p=0.95),
    SamplingParameters(temperature=1.0, top_k=1),
    SamplingParameters(temperature=1.0, top_p=1e-9),
    SamplingParameters(temperature=1e-8),
    SamplingParameters(temperature=100.0, top_k=100000),
    SamplingParameters(temperature=1e-4, top_p=0.5),
    SamplingParameters(temperature=0.0),
]


@pytest.mark.parametrize(
    "vocabulary", [7, 1000, pytest.param(49152, marks=pytest.mark.gpu), pytest.param(151936, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_draws_are_those_of_the_definition(device, vocabulary, spread) -> None:
    """Every setting beside every other, on peaked and on flat logits: the same token as the CPU sampler, seed by
    seed.
    """
    generator = torch.Generator().manual_seed(vocabulary)
    rounds = 4 if device.is_emulated else 20
    different = 0
    for seed in range(rounds):
        parameters = [
            SamplingParameters(p.temperature, p.top_k, p.top_p, (seed * 2**60 + i) % 2**64)
            for i, p in enumerate(SETTINGS)
        ]
        positions = torch.randint(1, 100_000, (len(parameters),), generator=generator).tolist()
        logits = torch.randn(len(parameters), vocabulary, generator=generator) * spread
        sampler = Sampler(device, vocabulary, parameters, positions)
        tokens, failed = sampler.run(logits)
        assert not any(failed)
        different += sum(a != b for a, b in zip(tokens, sampler.expected(logits), strict=True))
    # exp may differ in its last bit between the two, and a draw near an edge then falls on its other side
    assert different <= (0 if device.is_emulated else rounds * len(SETTINGS) // 50)


def test_ties_at_the_edge_keep_the_lowest_ids(device) -> None:
    """Logits of a few values only: top-k and top-p cut through equals, and the draw shows who was kept."""
    logits = (torch.arange(600) % 3).float().repeat(6, 1)
    for seed in range(5):
        parameters = [
            SamplingParameters(100.0, k, p, seed)
            for k, p in [(250, 1.0), (5, 1.0), (0, 0.4), (210, 0.97), (0, 0.001), (400, 0.5)]
        ]
        sampler = Sampler(device, 600, parameters, [seed + 1] * 6)
        assert sampler.run(logits)[0] == sampler.expected(logits)


def test_all_logits_equal(device) -> None:
    """The worst case for histograms: one bin holds everything."""
    logits = torch.full((4, 2500), 1.25)
    for seed in range(3):
        parameters = [SamplingParameters(1.0, k, p, seed) for k, p in [(0, 1.0), (7, 1.0), (0, 0.3), (1000, 0.5)]]
        sampler = Sampler(device, 2500, parameters, [9] * 4)
        assert sampler.run(logits)[0] == sampler.expected(logits)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_flagged_alone(device, generator, bad) -> None:
    """Its neighbours sample as if nothing were; its token is at least an id."""
    logits = torch.randn(3, 300, generator=generator)
    good = logits.clone()
    logits[1, 299] = bad
    sampler = Sampler(device, 300, [SamplingParameters(seed=5)] * 3, [4, 4, 4])
    tokens, failed = sampler.run(logits)
    assert failed == [0, 1, 0]
    assert 0 <= tokens[1] < 300
    expected = sampler.expected(good)
    assert (tokens[0], tokens[2]) == (expected[0], expected[2])


def test_sequences_that_do_not_sample_report_their_flag(device, generator) -> None:
    """A chunk in the middle of a prompt: token -1, its row's flag is reported and cleared, its last token stays."""
    sampler = Sampler(device, 300, [SamplingParameters(temperature=0)] * 3, [4, 4, 4], samples=[True, False, False])
    sampler.state.failed[int(sampler.rows[1])] = 1
    sampler.state.last_tokens.fill_(55)
    logits = torch.randn(3, 300, generator=generator)
    logits[2] = float("nan")  # not read
    tokens, failed = sampler.run(logits)
    assert tokens == [int(logits[0].argmax()), -1, -1]
    assert failed == [0, 1, 0]
    assert not sampler.state.failed.any()
    assert sampler.state.last_tokens[int(sampler.rows[1])] == 55
    assert sampler.run(logits)[1] == [0, 0, 0]
