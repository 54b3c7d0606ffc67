"""A batch that samples on a device: rows in another order than their sequences, beside a padding sequence of NaN."""

import numpy as np
import torch
from kernel_devices import Device
from slow_sampling import Case, packed_masks

from cuda.adjust import Adjust, StepMasks
from cuda.sample import LogProbWords, Sample, StepResults, want_all_logits
from cuda.scatter import DeviceState, Scatter, StepUpload, pack
from model.cuda_rows import CudaRows
from model.step_plan import RowSettings

INT = np.int32
UPLOAD_WORDS = 1 << 17


def send(
    device: Device, state: DeviceState, upload: StepUpload, padded_sequences: int, padded_tokens: int
) -> np.ndarray:
    """Pack, upload, scatter. Returns the words."""
    words = np.full(state.upload.numel(), 77, INT)
    used = pack(upload, words)
    state.upload[:used].copy_(torch.from_numpy(words[:used]))
    Scatter(device.loader, state)(device.stream, padded_sequences, padded_tokens)
    device.synchronize()
    return words


class DeviceSampler:
    """Samples `cases` as one step; their positions are those of their tokens."""

    def __init__(self, device: Device, cases: list[Case], samples: list[bool] | None = None) -> None:
        self.device, self.cases, self.count = device, cases, len(cases)
        vocabulary = len(cases[0].logits)
        self.samples = np.array(samples or [True] * self.count)
        self.state = DeviceState(
            device.name,
            max_rows=self.count + 3,
            max_pages=1,
            max_sequences=self.count + 1,
            max_tokens=self.count + 1,
            upload_words=UPLOAD_WORDS,
        )
        self.results = StepResults(2, self.count + 1, page_locked=not device.is_emulated)
        self.adjust = Adjust(device.loader, self.state, vocabulary)
        self.sample = Sample(device.loader, self.state, self.results, vocabulary)
        self.rows = np.arange(self.count, dtype=INT)[::-1] + 2
        self.table = CudaRows(self.count + 3, vocabulary, device.name, page_locked=not device.is_emulated)
        self.log_probs: LogProbWords | None = None

    def run(self) -> tuple[list[int], list[int]]:
        """Tokens and flags of the batch. The result's step number was not there before."""
        device, cases = self.device, self.cases
        prompts = np.array([len(case.prompt) for case in cases], INT)
        given = RowSettings(self.rows, [c.parameters for c in cases], prompts, [c.history for c in cases])
        lengths = np.array([len(case.tokens) for case in cases], INT)
        upload = StepUpload(
            step=33,
            rows=self.rows,
            starts=lengths - 1,
            query_starts=np.arange(self.count + 1, dtype=INT),
            token_ids=np.zeros(self.count, INT),
            samples=self.samples,
            decodes=self.count,
            settings=self.table.store(given),
            result_slot=1,
            likeliest=max(case.parameters.logprobs for case in cases),
        )
        send(device, self.state, upload, self.count + 1, self.count + 1)
        return self.launch()

    def masks(self) -> StepMasks | None:
        """Those of the cases that have one, sent."""
        masked = [i for i, case in enumerate(self.cases) if case.mask is not None]
        if not masked:
            return None
        vocabulary = self.sample.vocabulary
        masks = StepMasks(self.count + 1, vocabulary, self.device.name, page_locked=not self.device.is_emulated)
        masks.words[: len(masked)] = packed_masks([case.mask for case in self.cases if case.mask is not None])
        masks.send(np.array(masked, INT))
        return masks

    def launch(self) -> tuple[list[int], list[int]]:
        """The kernels alone, on the logits of the cases."""
        device, count = self.device, self.count
        logits = np.stack([*(case.logits for case in self.cases), np.full_like(self.cases[0].logits, np.nan)])
        self.logits = torch.from_numpy(logits.astype(np.float32)).to(device.name)
        self.results.words[:] = -9
        assert not self.results.is_done(1, 33)
        self.adjust(device.stream, self.logits, count + 1, self.masks())
        weighs = bool((want_all_logits(self.table.settings[self.rows], self.sample.vocabulary) & self.samples).any())
        self.sample(device.stream, self.logits, self.adjust.masked, count + 1, weighs=weighs)
        device.synchronize()
        assert self.results.is_done(1, 33)
        assert (self.results.words[0] == -9).all()  # the other slot
        asked = self.table.settings["log_probs"][self.rows]
        places = np.flatnonzero((asked >= 0) & self.samples)
        self.log_probs = self.results.read_log_probs(1, places, int(asked.max(initial=0)))
        tokens, failed = self.results.read(1, count)
        return tokens.tolist(), failed.tolist()
