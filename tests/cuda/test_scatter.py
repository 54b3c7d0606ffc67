"""The upload's way to the device: words, and the arrays that scatter makes of them."""

import numpy as np
import pytest
import torch
from device_sampler import send

from cuda.errors import ShapeMismatch
from cuda.frames import SHARED
from cuda.scatter import (
    SETTINGS,
    DeviceState,
    SamplingChanges,
    StepUpload,
    copies_of,
    greedy_settings,
    pack,
    words_for,
)
from mm.page_copies import PageCopies, TableChanges

INT = np.int32


def make_state(device, max_sequences=8, max_tokens=32) -> DeviceState:
    return DeviceState(
        device.name, max_rows=12, max_pages=6, max_sequences=max_sequences, max_tokens=max_tokens, upload_words=4096
    )


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
    settings = SamplingChanges(np.array([3, 7], INT), greedy_settings(2))
    settings.settings["temperature"] = 0.5, 0.0
    settings.settings["top_k"], settings.settings["top_p"] = [40, 0], [0.1, 1.0]
    settings.settings["seed"] = 2**63 + 5, 1
    copies = PageCopies(np.array([1, 2], INT), np.array([3, 4], INT))
    words = send(device, state, step([0], [0], [1], changes=changes, settings=settings, copies=copies), 1, 1)
    expected = torch.full((12, 6), -5)
    expected[0, 5], expected[11, 0], expected[0, 1] = 8, 9, 10
    assert torch.equal(state.page_tables.cpu().long(), expected)
    stored = state.settings.cpu().numpy().view(SETTINGS).ravel()
    assert (stored[[3, 7]] == settings.settings).all()
    assert (np.delete(stored, [3, 7]) == greedy_settings(10)).all()
    sources, targets = copies_of(state.upload, words, 2)
    assert (sources.tolist(), targets.tolist()) == ([1, 2], [3, 4])


def test_pages_that_are_shared_say_so_in_the_device_s_tables_alone(device) -> None:
    """A bit beside the frame; the orders' frames stay plain."""
    state = make_state(device)
    frames = np.array([8, 9, SHARED - 1], INT)
    changes = TableChanges(np.array([0, 0, 1], INT), np.array([0, 1, 5], INT), frames, np.array([True, False, True]))
    send(device, state, step([0], [0], [1], changes=changes), 1, 1)
    assert state.page_tables[[0, 0, 1], [0, 1, 5]].tolist() == [8 | SHARED, 9, 2 * SHARED - 1]
    assert frames.tolist() == [8, 9, SHARED - 1]


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
