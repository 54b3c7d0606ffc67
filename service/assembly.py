"""Puts an engine together: model files -> parameters -> executor -> memory manager -> scheduler -> engine.

One place, so that the server, `pagewalk check` and the benchmarks run the very same thing. Importing it imports torch.
"""

import ctypes
import hashlib
import os
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy.ma  # noqa: F401 - numpy.unique, which mm calls, imports it at its first call: 0.1 s amid a step
import structlog
import torch

from mm import PAGE_SIZE, MemoryManager, OvercommitMode, Watermarks, pages_for
from model.config import ModelConfig, read_config
from model.cpu_executor import CpuExecutor, choose_dtype
from model.cuda_namespace import check_cuda_namespace
from model.errors import NoNativeKernels
from model.executor import Executor
from model.kv_pool import frame_bytes
from model.loader import load_parameters, random_parameters
from model.native_kernels import DTYPES as NATIVE_DTYPES
from model.native_library import load as load_native
from model.parameters import Parameters, parts_of
from model.start_report import StartReport, Unreported
from service.checkpoint_file import ModelIdentity
from service.engine import Engine, EngineObserver
from service.engine_client import EngineClient, Limits
from service.errors import ConfigurationError
from service.rate_limits import RateLimits
from service.scheduler import Scheduler, SchedulerSettings
from service.settings import Settings, watermark_shares
from service.tenant_settings import tenant_limits

log = structlog.get_logger("pagewalk.assembly")

CPU_KV_BYTES = 2 << 30
"""Default bound of the CPU's KV pool. Its memory is taken when touched, so a server with little load stays small."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """An engine, ready to run, and what a front end needs to know of it."""

    config: ModelConfig
    executor: Executor
    engine: Engine
    client: EngineClient
    device: str
    dtype: str
    kernels: str  # "cuda", "native" or "torch"
    model_identity: ModelIdentity  # what a checkpoint depends on
    weights_bytes: int


def assemble(
    settings: Settings,
    folder: Path,
    observer: EngineObserver,
    report: StartReport | None = None,
    *,
    thin_rows: int | None = None,
) -> Assembly:
    """Load the model in `folder` and build everything around it. Takes seconds; the engine is not running yet.

    thin_rows: of the CUDA executor, for measurements: no setting of a server. None: as the executor likes best.

    Raises: model.errors.ModelError for the model; ConfigurationError for settings that cannot work with it.
    """
    report = report or Unreported()
    config = read_config(folder)
    device = settings.device if settings.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise ConfigurationError(
            "device is cuda, but PyTorch sees no GPU here: a driver or a CUDA build of it is missing"
        )
    dtype = device_dtype(config, settings.dtype) if on_gpu else choose_dtype(config, settings.dtype)
    max_length = _max_length(settings.max_model_len, config)
    sizes = _sizes(settings, max_length, on_gpu=on_gpu)
    native = None if on_gpu else _native_kernels(settings, dtype)  # before the weights: a bad setting fails at once
    if settings.load_format == "dummy":
        parameters = random_parameters(config, dtype, device, settings.seed)
    else:
        parameters = load_parameters(folder, config, dtype, device, partial(report.progress, "weights"))
    report.ended("weights")
    weights_bytes = parameters.size_bytes()
    facts = model_identity(config, parameters, settings.page_size)  # before an executor repacks them
    if on_gpu:
        executor, frames, slots = _cuda_executor(settings, config, parameters, sizes, thin_rows, report)
    elif thin_rows is None:
        executor, frames, slots = _cpu_executor(settings, config, parameters, sizes, native)
    else:
        raise ConfigurationError("thin_rows belongs to the CUDA kernels: on a CPU there are none")
    memory = _memory(settings, executor, sizes, frames, slots)
    scheduler = Scheduler(memory, _bounds_of_steps(settings, sizes, max_length, executor, on_gpu=on_gpu))
    rates = RateLimits({name: each.rate_limit for name, each in settings.tenants.items()}, time.monotonic)
    limits = _request_limits(settings, sizes, memory, rates, max_length=max_length, vocabulary=config.vocabulary)
    engine = Engine(scheduler, executor, limits, observer, step_timeout_s=settings.step_timeout_s, rates=rates)
    client = EngineClient(engine)
    engine.connect(0, client)
    return Assembly(
        config=config,
        executor=executor,
        engine=engine,
        client=client,
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        model_identity=facts,
        kernels="cuda" if on_gpu else "torch" if native is None else "native",
        weights_bytes=weights_bytes,
    )


def model_identity(config: ModelConfig, parameters: Parameters, page_size: int) -> ModelIdentity:
    """What keys and values depend on, beside the tokens. The weights are told by the first numbers of each tensor: a
    finetuned network has others.
    """
    fields = asdict(config)
    for name in ("sampling", "dtype", "end_ids", "start_id", "max_positions"):
        del fields[name]
    first = [part.target.flatten()[:64] for part in parts_of(config, parameters)]
    weights = torch.cat(first).cpu().view(torch.uint8).numpy().tobytes()
    return ModelIdentity(
        architecture=config.architecture,
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocabulary=config.vocabulary,
        dtype=str(parameters.embedding.dtype).removeprefix("torch."),
        page_tokens=page_size,
        config=hashlib.sha256(msgspec.json.encode(fields, order="sorted")).hexdigest(),
        weights=hashlib.sha256(weights).hexdigest(),
    )


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What the executor, the memory manager and the scheduler must agree about."""

    running: int  # Sequences in a step
    rows: int  # of the page tables: those that run, and those that are swapped out
    pages: int  # of one Sequence
    tokens: int  # of one step


def _sizes(settings: Settings, max_length: int, *, on_gpu: bool) -> _Sizes:
    running = settings.max_num_seqs or (1024 if on_gpu else 32)
    tokens = settings.max_num_batched_tokens or (8192 if on_gpu else 512)
    if tokens < running:
        raise ConfigurationError(
            f"max_num_batched_tokens ({tokens}) is below max_num_seqs ({running}): a step gives each Sequence a token"
        )
    swap, host = settings.swap_memory_bytes, _host_memory_bytes()
    if settings.swap_max_memory_bytes is not None:
        swap = max(swap or 0, settings.swap_max_memory_bytes)
    if swap is not None and swap > host:
        raise ConfigurationError(f"swap_memory_bytes is {swap}, but there are {host} bytes of memory here in all")
    has_swap = on_gpu if swap is None else swap > 0
    return _Sizes(
        running, running + (running // 2 if has_swap else 0), pages_for(max_length, settings.page_size), tokens
    )


def _max_length(asked: int | None, config: ModelConfig) -> int:
    if asked is not None and asked > config.max_positions:
        raise ConfigurationError(f"max_model_len is {asked}, but the model has {config.max_positions} positions")
    return asked or config.max_positions


def _memory(settings: Settings, executor: Executor, sizes: _Sizes, frames: int, slots: int) -> MemoryManager:
    """Over all that the executor has a place for; `frames` and `slots` of it are in use at the start."""
    memory = MemoryManager(
        frames=executor.frames,
        max_rows=sizes.rows,
        max_pages=sizes.pages,
        page_size=settings.page_size,
        slots=executor.slots,
        opened_slots=0,
        watermarks=Watermarks.from_shares(executor.frames, *watermark_shares(settings)),
    )
    if (frames, slots) != (executor.frames, executor.slots):
        memory.resize(frames, slots)  # there is room for more: operators may have it
        executor.resize(frames, slots)
    memory.ledger.mode = OvercommitMode(settings.overcommit)
    for name, limits in tenant_limits(settings.tenants, frames, slots, executor.frame_bytes).items():
        memory.tenants.set_limits(name, limits)
    return memory


def _bounds_of_steps(
    settings: Settings, sizes: _Sizes, max_length: int, executor: Executor, *, on_gpu: bool
) -> SchedulerSettings:
    return SchedulerSettings(
        max_running=sizes.running,
        max_batched_tokens=sizes.tokens,
        max_length=max_length,
        finds_shared_prefixes=on_gpu and settings.shared_prefixes == "auto",
        prefix_caching=settings.enable_prefix_caching,
        ageing_s=settings.priority_ageing_s if settings.scheduling_policy == "priority" else None,
        most_overtaken=settings.max_overtakes,
        max_gap_s=None if settings.max_itl_ms is None else settings.max_itl_ms / 1e3,
        step_sizes=executor.step_sizes,
    )


def _request_limits(
    settings: Settings, sizes: _Sizes, memory: MemoryManager, rates: RateLimits, *, max_length: int, vocabulary: int
) -> Limits:
    return Limits(
        max_model_len=max_length,
        max_request_tokens=memory.max_tokens_of(None),
        tenant_request_tokens={name: memory.max_tokens_of(name) for name in settings.tenants},
        rated_tenants=rates.tenants,
        max_queue_requests=settings.max_queue_requests,
        max_queue_tokens=settings.max_queue_tokens,
        vocabulary=vocabulary,
        takes_priority=settings.scheduling_policy == "priority",
        max_running=sizes.running,
    )


def device_dtype(config: ModelConfig, requested: str) -> torch.dtype:
    """auto: the checkpoint's, bfloat16 if it does not say."""
    name = (config.dtype or "bfloat16") if requested == "auto" else requested
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _cuda_executor(
    settings: Settings,
    config: ModelConfig,
    parameters: Parameters,
    sizes: _Sizes,
    thin_rows: int | None,
    report: StartReport,
) -> "tuple[Executor, int, int]":
    """The executor, and how many of its frames and slots are in use at the start."""
    check_cuda_namespace()
    # imports CuPy and the kernels' loader: absent where there is no GPU
    from model.cuda_executor import CudaExecutor

    if settings.page_size != PAGE_SIZE:
        raise ConfigurationError(f"page_size is {settings.page_size}: the CUDA kernels take {PAGE_SIZE}")
    frames, most = None, settings.kv_cache_max_memory_bytes
    if settings.kv_cache_memory_bytes is not None:
        frames = _frames_in(settings.kv_cache_memory_bytes, config, parameters, settings.page_size)
    swap_bytes = _host_memory_bytes() // 4 if settings.swap_memory_bytes is None else settings.swap_memory_bytes
    executor = CudaExecutor(
        config,
        parameters,
        frames=frames,
        most_frames=None
        if most is None
        else _frames_in(most, config, parameters, settings.page_size, "kv_cache_max_memory_bytes"),
        utilization=settings.gpu_memory_utilization,
        max_running=sizes.running,
        max_rows=sizes.rows,
        max_pages=sizes.pages,
        max_batched_tokens=sizes.tokens,
        swap_bytes=max(swap_bytes, settings.swap_max_memory_bytes or 0),
        thin_rows=thin_rows,
        report=report,
    )
    return executor, executor.start_frames, min(executor.slots, swap_bytes // executor.frame_bytes)


def _frames_in(
    size_bytes: int,
    config: ModelConfig,
    parameters: Parameters,
    page_size: int,
    setting: str = "kv_cache_memory_bytes",
) -> int:
    one = frame_bytes(config, parameters.embedding.dtype, page_size)
    if size_bytes < one:
        raise ConfigurationError(f"{setting} is {size_bytes}: one frame takes {one}")
    if size_bytes // one * page_size < 2:
        raise ConfigurationError(f"{setting} is {size_bytes}: that is one token, and a request has two at least")
    return size_bytes // one


def _native_kernels(settings: Settings, dtype: torch.dtype) -> ctypes.CDLL | None:
    """The compiled CPU kernels, or None for torch's; that it is torch's without having been asked for is logged.

    Raises: ConfigurationError if --cpu-kernels native cannot be.
    """
    if settings.cpu_kernels == "torch":
        return None
    try:
        if dtype not in NATIVE_DTYPES:
            name = str(dtype).removeprefix("torch.")
            raise NoNativeKernels(f"the CPU kernels compute in float32 or bfloat16, and --dtype is {name}")
        folder = None if settings.model_cache is None else Path(settings.model_cache)
        return load_native(cache_folder=folder, report=log.info)
    except NoNativeKernels as error:
        if settings.cpu_kernels == "native":
            raise ConfigurationError(f"--cpu-kernels native: {error}") from error
        log.warning(
            "the CPU kernels are not in use: computing with PyTorch's operators, less than half as fast",
            reason=str(error),
            to_silence="--cpu-kernels torch",
        )
        return None


def _cpu_executor(
    settings: Settings, config: ModelConfig, parameters: Parameters, sizes: _Sizes, native: ctypes.CDLL | None
) -> tuple[Executor, int, int]:
    """The executor, and how many of its frames and slots are in use at the start."""
    size_bytes, useful = settings.kv_cache_memory_bytes or CPU_KV_BYTES, sizes.running * sizes.pages
    frames = min(_frames_in(size_bytes, config, parameters, settings.page_size), useful)  # more could never be used
    most_bytes = max(size_bytes, settings.kv_cache_max_memory_bytes or 0)
    most = min(_frames_in(most_bytes, config, parameters, settings.page_size), useful)
    size = frame_bytes(config, parameters.embedding.dtype, settings.page_size)
    slots = (settings.swap_memory_bytes or 0) // size
    executor = CpuExecutor(
        config,
        parameters,
        frames=most,
        max_rows=sizes.rows,
        max_pages=sizes.pages,
        slots=max(slots, (settings.swap_max_memory_bytes or 0) // size),
        page_size=settings.page_size,
        threads=settings.threads,
        native=native,
    )
    return executor, frames, slots


def _host_memory_bytes() -> int:
    """What this process may use of the host's memory: the container's limit, or all there is."""
    limit = Path("/sys/fs/cgroup/memory.max")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return total if text == "max" else min(total, int(text))
