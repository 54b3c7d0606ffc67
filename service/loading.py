"""A model from its files to its first tokens: find, load, warm up, check, let go.

Loading runs in threads, since the event loop must not wait; torch is imported there, not before.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import structlog

from cuda.errors import DriverError, UnsupportedDevice
from model.errors import ModelError, OutOfDeviceMemory
from model.step_plan import SamplingParameters
from service.doors import FLUSH_S
from service.engine_client import DEFAULT_TENANT, Ended, EngineDied, Event, Submit
from service.errors import ConfigurationError
from service.metrics import Metrics
from service.plain_files import read_text
from service.progress import StartProgress
from service.questions import OWN_FRONT_END
from service.served_model import TokenizerFiles
from service.settings import Settings
from service.tokenization import Tokenizer, TokenizerNotUsable

if TYPE_CHECKING:
    from model.source import ModelFiles
    from service.assembly import Assembly

EXIT_MODEL, EXIT_DEVICE, EXIT_FAULT = 3, 4, 70
WARM_UP = OWN_FRONT_END + 1
"""The engine's front end for the generation before the doors open."""

log = structlog.get_logger("pagewalk.server")
T = TypeVar("T")


class Failure(Exception):
    """The server cannot go on. The message is one line that says what to do; `code` is the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(" ".join(message.split()))
        self.code = code


class Loaded:
    """A model with everything around it, not yet running."""

    def __init__(
        self,
        name: str,
        root: str,
        tokenizer: Tokenizer,
        assembly: "Assembly",
        files: TokenizerFiles,
        phases_s: dict[str, float] | None = None,
    ) -> None:
        """files: what `tokenizer` was loaded from. phases_s: what the parts of loading took."""
        self.phases_s = phases_s or {}
        self._is_closed = False
        self.name = name
        self.root = root
        self.tokenizer = tokenizer
        self.tokenizer_files = files
        self.assembly = assembly

    def close(self) -> None:
        """Idempotent, also where it raises."""
        if self._is_closed:
            return
        self._is_closed = True
        self.assembly.executor.close()
        if self.assembly.engine.held.grammars is not None:
            self.assembly.engine.held.grammars.close()
        self.tokenizer.close()


async def load(settings: Settings, metrics: Metrics) -> Loaded:
    """Find the model, then load its tokenizer and its weights side by side, in threads.

    Raises Failure, ConfigurationError.
    """
    report = StartProgress()
    template = None if settings.chat_template is None else _read_template(settings.chat_template)
    files, vocabulary = await in_thread(lambda: _find(settings))
    report.ended("find model")
    folder = files.folder if settings.tokenizer is None else Path(settings.tokenizer)
    assembling = in_thread(lambda: _assemble(settings, files.folder, metrics, report))
    tokenizing = in_thread(lambda: _load_tokenizer(settings, folder, template, vocabulary))
    (tokenizer_files, tokenizer), assembly = await asyncio.gather(tokenizing, assembling)
    report.ended("rest")
    log.info("loaded", model=files.name, seconds=round(sum(report.seconds.values()), 2))
    return Loaded(files.name, files.root, tokenizer, assembly, tokenizer_files, report.seconds)


def in_thread(work: Callable[[], T]) -> "asyncio.Future[T]":
    """Run `work` in a thread of its own that nobody waits for: a signal ends the process while a model loads."""
    result: concurrent.futures.Future[T] = concurrent.futures.Future()

    def target() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
            result.set_exception(error)

    threading.Thread(target=target, name="load", daemon=True).start()
    return asyncio.wrap_future(result)


def _find(settings: Settings) -> "tuple[ModelFiles, int]":
    """Where the model is, and the size of its vocabulary. A folder that is no model of ours is refused here already."""
    from model.config import read_config
    from model.source import resolve

    with _failures("find the model"):
        files = resolve(
            settings.model,
            revision=settings.revision,
            cache_dir=None if settings.model_cache is None else Path(settings.model_cache),
            demo_wheel=None if settings.demo_wheel is None else Path(settings.demo_wheel),
            report=log.info,
        )
        return files, read_config(files.folder).vocabulary


def _load_tokenizer(
    settings: Settings, folder: Path, template: str | None, vocabulary: int
) -> tuple[TokenizerFiles, Tokenizer]:
    with _failures("load the tokenizer"):
        files = TokenizerFiles.read(folder, template, vocabulary, settings.tool_call_format)
        return files, files.load()


def _assemble(settings: Settings, folder: Path, metrics: Metrics, report: StartProgress) -> "Assembly":
    with _failures("load the model"):
        from service.assembly import assemble  # imports torch: seconds

        report.ended("imports")
        try:
            return assemble(settings, folder, metrics, report)
        finally:
            report.close()


@contextmanager
def _failures(what: str) -> Iterator[None]:
    """Turns what can go wrong outside of us into a Failure of one line."""
    try:
        yield
    except OutOfDeviceMemory as error:
        raise Failure(str(error), EXIT_DEVICE) from error
    except (ModelError, TokenizerNotUsable) as error:
        raise Failure(str(error), EXIT_MODEL) from error
    except MemoryError as error:
        raise Failure(f"not enough memory to {what}: {error}", EXIT_DEVICE) from error
    except (DriverError, UnsupportedDevice) as error:
        raise Failure(f"the device cannot {what}: {error}", EXIT_DEVICE) from error
    except OSError as error:
        raise Failure(f"cannot {what}: {error}", EXIT_MODEL) from error
    except RuntimeError as error:
        if not _is_of_the_device(error):
            raise
        raise Failure(f"the device cannot {what}: {error}", EXIT_DEVICE) from error


def _is_of_the_device(error: RuntimeError) -> bool:
    from model.out_of_memory import is_out_of_memory  # imports torch

    text = str(error).lower()
    return is_out_of_memory(error) or "cuda error" in text or "no nvidia" in text


def _read_template(path: str) -> str:
    try:
        return read_text(path)
    except ValueError as error:
        raise ConfigurationError(f"--chat-template {error}") from error


async def warm_up(loaded: Loaded) -> None:
    """Generate once before anybody is let in: kernels are built and chosen; a model that cannot run is found out."""
    limits = loaded.assembly.client.limits
    vocabulary, longest = limits.vocabulary, limits.request_tokens(DEFAULT_TENANT)
    prompt = [position % vocabulary for position in range(1, min(64, longest - 2))]
    await generate(loaded, prompt or [0], min(2, longest - 1))


async def generate(loaded: Loaded, prompt_ids: list[int], max_tokens: int) -> list[int]:
    """Greedy tokens after a prompt, before the engine is open to others. Raises RuntimeError."""
    receiver = _Receiver(asyncio.get_running_loop())
    engine = loaded.assembly.engine
    engine.connect(WARM_UP, receiver)
    engine.post(
        WARM_UP,
        Submit(
            sequence_id=1,
            request_id="warm-up",
            prompt_ids=prompt_ids,
            max_tokens=max_tokens,
            sampling=SamplingParameters(temperature=0.0),
            end_ids=[],
            prefix_cache=False,  # nobody will ever ask this again
        ),
    )
    ended = await receiver.ended
    if ended.reason == "error":
        raise RuntimeError(ended.message)
    return receiver.tokens


class _Receiver:
    """Collects the tokens of one Sequence (engine.FrontEnd)."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.tokens: list[int] = []
        self.ended: asyncio.Future[Ended] = loop.create_future()

    def deliver(self, event: Event) -> None:
        if self.ended.done():
            return
        if isinstance(event, EngineDied):
            self.ended.set_exception(RuntimeError(event.message))
            return
        self.tokens += event.tokens
        for ended in event.ended:
            self.ended.set_result(ended)


async def check(settings: Settings) -> str:
    """Load the model and generate a little; returns one line for a person. Raises Failure, ConfigurationError."""
    loaded = await load(settings, Metrics("check"))
    engine = loaded.assembly.engine
    running = asyncio.create_task(engine.run())
    try:
        prompt = "The capital of France is"
        ids = loaded.tokenizer.encode(prompt, add_special_tokens=True)
        tokens = asyncio.ensure_future(generate(loaded, ids, 8))
        await asyncio.wait([tokens, running], return_when=asyncio.FIRST_COMPLETED)
        if not tokens.done():
            await running
        text = loaded.tokenizer.decode(tokens.result(), skip_special_tokens=True)
        assembly = loaded.assembly
        where = (
            assembly.device if assembly.device == assembly.kernels else f"{assembly.device}, {assembly.kernels} kernels"
        )
        place = f"{assembly.dtype} on {where}, {assembly.executor.frames} frames"
        return f"{loaded.name} works ({place}): {prompt + text!r}"
    except RuntimeError as error:
        cause = await end(loaded, running) or error
        raise Failure(f"the model does not run: {cause}", EXIT_FAULT) from cause
    finally:
        await end(loaded, running)


async def end(loaded: Loaded, running: "asyncio.Task[None]") -> BaseException | None:
    """Stop the engine (what still runs gets an error) and let go of the model; returns what broke it. Idempotent."""
    loaded.assembly.engine.stop()
    await asyncio.wait([running], timeout=FLUSH_S)
    if not running.done():
        log.error("a step does not end: it is left behind")
        return None
    broken = running.exception()
    try:
        loaded.close()
    except RuntimeError as error:
        if broken is None:
            raise
        why = str(error).split("\n")[0]
        log.warning("a broken device lets nothing go: its memory goes with the process", reason=why)
    return broken
