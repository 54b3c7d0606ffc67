"""The life of a server: bind, load, warm up, serve, drain, stop. Everything is made and joined here.

    bind ──▶ load ──▶ warm up ──▶ ready ──SIGTERM──▶ drain ──idle or timeout──▶ stop
    /live 200 ──────────────────────────────────────────────────────────────▶
    /ready 503 ─────────────────▶ 200 ──────────────▶ 503 ────────────────────▶

Sockets come first: a port that is taken is known before minutes of loading, and probes are answered from the start.
Loading runs in threads, since the event loop must not wait; torch is imported there, not before.
"""

import asyncio
import concurrent.futures
import errno
import gc
import json
import os
import resource
import signal
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
from aiohttp import web

from model.errors import ModelError
from model.step_plan import SamplingParameters
from service import logs
from service.api import make_admin_app, make_app
from service.engine_client import DEFAULT_TENANT, Ended, EngineDied, Event, Submit
from service.errors import ConfigurationError
from service.front_end import ApiSettings, FrontEnd
from service.http_server import listen, make_runner, tls_context
from service.metrics import Metrics, ServedFacts
from service.progress import Progress
from service.questions import Answers
from service.request_answers import answer_about_requests
from service.served_model import ServedModel
from service.settings import Settings
from service.tokenization import Tokenizer, TokenizerNotUsable

if TYPE_CHECKING:
    from model.source import ModelFiles
    from service.assembly import Assembly

EXIT_MODEL, EXIT_DEVICE, EXIT_FAULT = 3, 4, 70
FLUSH_S = 5.0
"""At the end, how long handlers may take to send what is ready: error events, the last text."""

SPARE_FILES = 256
"""Open files beside those of requests that generate: probes, refusals, idle connections, bodies that are being read."""

HTTP_FRONT_END, WARM_UP = 0, 1
"""Numbers of the engine's front ends: the HTTP side, and the generation before it opens."""

log = structlog.get_logger("pagewalk.server")
T = TypeVar("T")


class Failure(Exception):
    """The server cannot go on. The message is one line that says what to do; `code` is the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(" ".join(message.split()))
        self.code = code


class Loaded:
    """A model with everything around it, not yet running."""

    def __init__(self, name: str, root: str, tokenizer: Tokenizer, assembly: "Assembly") -> None:
        self.name = name
        self.root = root
        self.tokenizer = tokenizer
        self.assembly = assembly

    def close(self) -> None:
        self.assembly.executor.close()
        self.tokenizer.close()


class Server:
    """One server process."""

    def __init__(self, settings: Settings, version: str) -> None:
        self.settings = settings
        self.metrics = Metrics(version, vllm_names=settings.metrics_compat == "vllm")
        api = ApiSettings(
            version=version,
            api_keys=tuple(settings.api_keys),
            api_key_file=settings.api_key_file,
            tls_cert=settings.tls_cert,
            tls_key=settings.tls_key,
            body_limit_bytes=settings.max_body_bytes,
            cors_allow_origins=tuple(settings.cors_allow_origins),
            admin_api_key=settings.admin_api_key,
            sse_keep_alive_s=settings.sse_keep_alive_s,
            unknown_fields=settings.unknown_fields,
            max_logprobs=settings.max_logprobs,
            max_generating=_allow_many_sockets(),
        )
        self.answers = Answers()
        self.front_end = FrontEnd(api, self.metrics, logs.log_request, self.answers)
        self._stop = asyncio.Event()
        self._runners: list[web.AppRunner] = []
        self.port = 0
        self.admin_port = 0

    async def run(self) -> int:
        """Serve until a signal; returns the exit code. Raises Failure, ConfigurationError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        watch = asyncio.create_task(self.metrics.watch_loop())
        self._warn_of_tenants()
        try:
            self.port = await self._listen(
                make_app(self.front_end),
                self.settings.host,
                self.settings.port,
                "port",
                tls=tls_context(self.front_end.settings),
            )
            admin = make_admin_app(self.front_end)
            self.admin_port = await self._listen(
                admin, self.settings.admin_host, self.settings.admin_port, "admin-port"
            )
            loading = asyncio.ensure_future(load(self.settings, self.metrics))
            if not await self._unless_stopped(loading):
                return 0
            return await self._serve(loading.result())
        finally:
            watch.cancel()
            for runner in self._runners:  # handlers send what is left, for FLUSH_S at most
                await runner.cleanup()

    async def _serve(self, loaded: Loaded) -> int:
        engine = loaded.assembly.engine
        running = asyncio.create_task(engine.run())
        try:
            self._publish(loaded)
            warm = asyncio.ensure_future(warm_up(loaded))
            await asyncio.wait([warm, running], return_when=asyncio.FIRST_COMPLETED)
            if warm.done():
                warm.result()
                engine.open()
                _settle()
                self._announce(loaded)
                await self._unless_stopped(running)
            if not running.done():
                await self._drain(loaded, running)
            if (broken := await end(loaded, running)) is not None:
                raise broken
            return 0
        except Exception as error:  # noqa: BLE001 - whatever it is, the process ends with a message
            # The engine has logged what broke it, and told every Sequence; a warm-up knows no more than that it broke.
            cause = await end(loaded, running) or error
            raise Failure(f"the engine has stopped: {cause}", EXIT_FAULT) from cause
        finally:
            await end(loaded, running)

    def _publish(self, loaded: Loaded) -> None:
        """Let the front end and the metrics know the model."""
        assembly, settings = loaded.assembly, self.settings
        answer_about_requests(self.answers, assembly.engine)
        names = tuple(settings.served_model_names or [loaded.name])
        advice = assembly.config.sampling
        self.metrics.serve(
            ServedFacts(
                model_name=names[0],
                dtype=assembly.dtype,
                kernels=assembly.kernels,
                page_size=settings.page_size,
                frames=assembly.executor.frames,
                gpu_memory_utilization=settings.gpu_memory_utilization,
                max_model_len=assembly.client.limits.max_model_len,
                tier="gpu" if assembly.device == "cuda" else "host",
                prefix_caching=settings.enable_prefix_caching,
                snapshot=assembly.client.snapshot,
            )
        )
        self.front_end.model = ServedModel(
            names=names,
            root=loaded.root,
            created=int(time.time()),
            end_ids=tuple(sorted({*assembly.config.end_ids, *loaded.tokenizer.end_ids})),
            defaults=SamplingParameters(
                temperature=1.0 if advice.temperature is None else advice.temperature,
                top_k=advice.top_k or 0,
                top_p=1.0 if advice.top_p is None else advice.top_p,
                repetition_penalty=1.0 if advice.repetition_penalty is None else advice.repetition_penalty,
            ),
            tokenizer=loaded.tokenizer,
            client=assembly.client,
            dtype=assembly.dtype,
            weights_bytes=assembly.weights_bytes,
        )

    def _announce(self, loaded: Loaded) -> None:
        assembly = loaded.assembly
        limits = assembly.client.limits
        log.info(
            "ready",
            model=loaded.name,
            device=assembly.device,
            dtype=assembly.dtype,
            kernels=assembly.kernels,
            url=self._url(),
            admin=f"http://{_host(self.settings.admin_host)}:{self.admin_port}/admin/v1/meminfo",
            max_model_len=limits.max_model_len,
            largest_request_tokens=limits.request_tokens(DEFAULT_TENANT),
            frames=assembly.executor.frames,
            kv_bytes=assembly.executor.frames * assembly.executor.frame_bytes,
        )
        sys.stdout.write(self._example(has_chat=loaded.tokenizer.template is not None) + "\n")
        sys.stdout.flush()

    def _example(self, *, has_chat: bool) -> str:
        """One line to copy and paste that streams an answer."""
        question = "What is a page table?"
        path = "chat/completions" if has_chat else "completions"
        body: dict[str, object] = {"prompt": question}
        if has_chat:
            body = {"messages": [{"role": "user", "content": question}]}
        body |= {"max_tokens": 200, "temperature": 0.2}  # small models ramble at 1 and without a bound
        key = ' -H "Authorization: Bearer $PAGEWALK_API_KEY"' if self.front_end.api_keys else ""
        data = json.dumps({**body, "stream": True})
        return f"curl -N {self._url()}/v1/{path} -H 'Content-Type: application/json'{key} -d '{data}'"

    def _url(self) -> str:
        scheme = "http" if self.settings.tls_cert is None else "https"
        return f"{scheme}://{_host(self.settings.host)}:{self.port}"

    async def _drain(self, loaded: Loaded, running: "asyncio.Task[None]") -> None:
        """Admit nothing more, and wait for what runs, up to the timeout."""
        engine = loaded.assembly.engine
        engine.drain()
        log.info("draining", requests=self.front_end.generating, timeout_s=self.settings.shutdown_timeout_s)
        drained: asyncio.Task[None] = asyncio.create_task(engine.drained())
        await asyncio.wait(
            [drained, running], timeout=self.settings.shutdown_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not drained.done():
            drained.cancel()
            log.warning("ending what still runs", requests=self.front_end.generating)

    async def _listen(
        self, app: web.Application, host: str, port: int, flag: str, *, tls: ssl.SSLContext | None = None
    ) -> int:
        """Start to answer on an address; returns the port. Raises ConfigurationError."""
        runner = make_runner(app, shutdown_timeout_s=FLUSH_S)
        await runner.setup()
        self._runners.append(runner)
        try:
            await listen(runner, host, port, tls=tls)
        except OSError as error:
            where = f"{_host(host, listening=True)}:{port}"
            if error.errno == errno.EADDRINUSE:
                raise ConfigurationError(
                    f"{where} is in use: stop what listens there, or choose another --{flag}"
                ) from None
            raise ConfigurationError(f"cannot listen on {where}: {error.strerror or error}") from None
        return int(runner.addresses[0][1])

    def _reload(self) -> None:
        """SIGHUP: what can change while the server runs is read again."""
        self.front_end.api_keys.reload()
        self._warn_of_tenants()

    def _warn_of_tenants(self) -> None:
        """A key of a tenant that has no table may be a mistyped name, and then has no limits."""
        listed = self.settings.tenants
        if listed and (unlisted := self.front_end.api_keys.tenants - {*listed, DEFAULT_TENANT}):
            log.warning("keys of tenants without limits", tenants=sorted(unlisted))

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            log.warning("second signal: exit at once", signal=signal.Signals(number).name)
            os._exit(128 + number)
        log.info("signal", signal=signal.Signals(number).name)
        self._stop.set()

    async def _unless_stopped(self, work: "asyncio.Future[T]") -> bool:
        """Wait for `work` or for a signal; whether the work is done. An exception of it is raised."""
        stop = asyncio.ensure_future(self._stop.wait())
        both: tuple[asyncio.Future[Any], ...] = (work, stop)
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if work.done():
            work.result()
        return work.done() and not self._stop.is_set()


async def check(settings: Settings) -> str:
    """Load the model and generate a little; returns one line for a person. Raises Failure, ConfigurationError."""
    loaded = await load(settings, Metrics("check"))
    engine = loaded.assembly.engine
    running = asyncio.create_task(engine.run())
    try:
        ids = loaded.tokenizer.encode("The capital of France is", add_special_tokens=True)
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
        return f"{loaded.name} works ({place}): The capital of France is{text!r}"
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
    loaded.close()
    return running.exception()


async def warm_up(loaded: Loaded) -> None:
    """Generate once before anybody is let in: kernels are built and chosen; a model that cannot run is found out."""
    limits = loaded.assembly.client.limits
    vocabulary, longest = limits.vocabulary, limits.request_tokens(DEFAULT_TENANT)
    prompt = [position % vocabulary for position in range(1, min(64, longest - 2))]
    await generate(loaded, prompt or [0], 2)


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


async def load(settings: Settings, metrics: Metrics) -> Loaded:
    """Find the model, then load its tokenizer and its weights side by side, in threads.

    Raises Failure, ConfigurationError.
    """
    began = time.monotonic()
    template = None if settings.chat_template is None else _read_template(Path(settings.chat_template))
    files, vocabulary = await in_thread(lambda: _find(settings))
    folder = files.folder if settings.tokenizer is None else Path(settings.tokenizer)
    assembling = in_thread(lambda: _assemble(settings, files.folder, metrics))
    tokenizing = in_thread(lambda: _load_tokenizer(folder, template, vocabulary))
    tokenizer, assembly = await asyncio.gather(tokenizing, assembling)
    log.info("loaded", model=files.name, seconds=round(time.monotonic() - began, 2))
    return Loaded(files.name, files.root, tokenizer, assembly)


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


def _load_tokenizer(folder: Path, template: str | None, vocabulary: int) -> Tokenizer:
    with _failures("load the tokenizer"):
        return Tokenizer.load(folder, template, vocabulary)


def _assemble(settings: Settings, folder: Path, metrics: Metrics) -> "Assembly":
    with _failures("load the model"):
        from service.assembly import assemble  # imports torch: seconds

        progress = Progress("weights")
        try:
            return assemble(settings, folder, metrics, progress)
        finally:
            progress.close()


@contextmanager
def _failures(what: str) -> Iterator[None]:
    """Turns what can go wrong outside of us into a Failure of one line."""
    try:
        yield
    except (ModelError, TokenizerNotUsable) as error:
        raise Failure(str(error), EXIT_MODEL) from error
    except MemoryError as error:
        raise Failure(f"not enough memory to {what}: {error}", EXIT_DEVICE) from error
    except OSError as error:
        raise Failure(f"cannot {what}: {error}", EXIT_MODEL) from error
    except RuntimeError as error:
        if not _is_of_the_device(error):
            raise
        raise Failure(f"the device cannot {what}: {error}", EXIT_DEVICE) from error


def _is_of_the_device(error: RuntimeError) -> bool:
    """torch says "out of memory" of CUDA in a class of its own, and of the CPU in the text only."""
    text = str(error).lower()
    return "out of memory" in text or "can't allocate memory" in text or "cuda error" in text or "no nvidia" in text


def _read_template(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--chat-template {path} cannot be read: {error}") from error


def _host(address: str, *, listening: bool = False) -> str:
    """An address as it stands in a URL; one that means "all" is reached as localhost."""
    if address in ("0.0.0.0", "::") and not listening:
        return "127.0.0.1"
    return f"[{address}]" if ":" in address else address


def _allow_many_sockets() -> int | None:
    """Allow as many open files as this user may have: each request is one, and shells give 1,024.

    Returns how many requests may hold one: without spare files not even a probe could come in. None: no bound.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # not allowed after all: serve with what there is
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return None if soft == resource.RLIM_INFINITY else max(soft - SPARE_FILES, soft // 2)


def _settle() -> None:
    """What was loaded stays: the collector need not look at it again, which would stop every stream for a while."""
    gc.collect()
    gc.freeze()
