"""The network without an executor: logits of every position, for chunks of a prompt that a test chooses."""

import ctypes
from pathlib import Path

import numpy as np
import torch
from plan_driver import int32

from mm.addresses import pages_for
from mm.page_copies import MemoryOrders
from model.batch import forward_batch
from model.config import ModelConfig, read_config
from model.cpu_kernels import CpuKernels
from model.kv_pool import KvPool
from model.loader import load_parameters
from model.native_kernels import NativeKernels
from model.parameters import Parameters
from model.step_plan import StepPlan


class Network:
    """One Sequence in a shuffled pool. `native`: the compiled kernels, None for torch's."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        native: ctypes.CDLL | None = None,
        *,
        tokens: int = 256,
        page_size: int = 16,
        rows: int = 1,
    ) -> None:
        self.config = config
        self.parameters = parameters
        pages = pages_for(tokens, page_size)
        self.pool = KvPool(config, parameters.embedding.dtype, frames=rows * pages + 3, page_size=page_size)
        self.kernels = CpuKernels(config, self.pool) if native is None else NativeKernels(config, self.pool, native)
        frames = np.random.default_rng(0).permutation(self.pool.frames)[: rows * pages]
        self.tables = frames.reshape(rows, pages).astype(np.int32)
        self.failed = np.zeros(rows, np.bool_)
        with torch.inference_mode():
            self.kernels.prepare(parameters)

    @classmethod
    def load(
        cls, folder: Path, native: ctypes.CDLL | None = None, dtype: torch.dtype = torch.float32, **options: int
    ) -> "Network":
        config = read_config(folder)
        return cls(config, load_parameters(folder, config, dtype), native, **options)

    @torch.inference_mode()
    def step(self, chunks: list[list[int]], starts: list[int], *, decodes: int = 0) -> torch.Tensor:
        """Logits (T, V) of row 0's chunk, then row 1's, …; `starts` tokens of each row came before."""
        plan = StepPlan(
            step=0,
            orders=MemoryOrders(),
            settings=None,
            rows=np.arange(len(chunks), dtype=np.int32),
            starts=int32(*starts),
            query_starts=np.cumsum([0] + [len(chunk) for chunk in chunks]).astype(np.int32),
            token_ids=int32(*(token for chunk in chunks for token in chunk)),
            samples=np.ones(len(chunks), np.bool_),
            decodes=decodes,
        )
        batch = forward_batch(plan, self.tables, np.zeros(len(chunks), np.int32), self.pool.page_size)
        batch.sampled = torch.arange(len(batch.token_ids))  # the logits of every token
        scores, self.failed[: len(chunks)] = self.kernels.compute(batch)
        return scores.clone()  # they are valid until the next step only

    def logits(self, ids: list[int], chunks: list[int]) -> torch.Tensor:
        """Logits (T, V) of one Sequence computed in chunks of these sizes; a chunk of 1 is a decode."""
        assert sum(chunks) == len(ids)
        out, start = [], 0
        for size in chunks:
            out.append(self.step([ids[start : start + size]], [start], decodes=int(size == 1)))
            start += size
        return torch.cat(out)
