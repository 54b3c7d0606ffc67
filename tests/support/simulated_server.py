"""A model that computes nothing, in place of the one that a Server would load."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from simulated_executor import VOCABULARY, SimulatedExecutor
from tiny_tokenizer import tiny_tokenizer

from mm import MemoryManager
from service.checkpoint_file import ModelIdentity
from service.engine import Engine
from service.engine_client import EngineClient, Limits
from service.loading import Loaded
from service.metrics import Metrics
from service.scheduler import Scheduler, SchedulerSettings
from service.served_model import TokenizerFiles
from service.tokenization import read_files


def simulated(folder: Path | None = None) -> Loaded:
    """folder: whose tokenizer front ends in processes of their own have; None: there are none."""
    memory = MemoryManager(frames=100, max_rows=4, max_pages=32)
    executor = SimulatedExecutor(memory)
    executor.close = lambda: None  # type: ignore[attr-defined]
    limits = Limits(max_model_len=512, max_request_tokens=512, max_queue_requests=10, vocabulary=VOCABULARY)
    scheduler = Scheduler(memory, SchedulerSettings(max_running=4, max_batched_tokens=64, max_length=512))
    engine = Engine(scheduler, executor, limits, Metrics("x"))
    client = EngineClient(engine)
    engine.connect(0, client)
    advice = SimpleNamespace(temperature=None, top_k=None, top_p=None, repetition_penalty=None)
    config = SimpleNamespace(end_ids=(2,), sampling=advice, vocabulary=VOCABULARY)
    assembly: Any = SimpleNamespace(
        config=config,
        executor=executor,
        engine=engine,
        client=client,
        device="cpu",
        dtype="float32",
        kernels="simulated",
        weights_bytes=1,
        model_identity=ModelIdentity("Simulated", 1, 1, 4, VOCABULARY, "int64", 16, "c", "w"),
    )
    tokenizer = tiny_tokenizer.__wrapped__()  # its own: the server closes it
    files = {} if folder is None else read_files(folder)
    return Loaded("tiny", "/models/tiny", tokenizer, assembly, TokenizerFiles("/models/tiny", files, None, VOCABULARY))
