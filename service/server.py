"""The life of a server: bind, load, warm up, serve, drain, stop. Everything is made and joined here.

    bind ──▶ load ──▶ warm up ──▶ ready ──SIGTERM──▶ drain ──idle or timeout──▶ stop
    /live 200 ──────────────────────────────────────────────────────────────▶
    /ready 503 ─────────────────▶ 200 ──────────────▶ 503 ────────────────────▶

Sockets come first: a port that is taken is known before minutes of loading, and probes are answered from the start.

HTTP is answered here, by `Doors`, or by processes of their own, `FrontEnds`. Either way a front end asks what concerns
the whole server (questions.py), and `Server` says who answers.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from model.cpu_threads import usable_cores
from model.step_plan import SamplingParameters
from service import logs
from service.admin_views import Inside
from service.doors import Doors, cannot_listen, url_host
from service.engine_client import DEFAULT_TENANT, EngineSnapshot
from service.engine_link import Hello, Serve, addresses
from service.errors import ConfigurationError
from service.front_end import ApiSettings, FrontEnd
from service.front_ends import FrontEndFailed, FrontEnds, give_up
from service.grammars import Grammars
from service.http_server import addresses_of, reserve, tls_context
from service.inspector import inspector
from service.loading import EXIT_FAULT, Failure, Loaded, end, load, warm_up
from service.metrics import Metrics, ServedFacts
from service.operations import Operations
from service.plain_files import check_folder
from service.process import allow_many_sockets, settle
from service.questions import Answers, CountGenerating, MetricsText, RenderMetrics, TakeSnapshot
from service.request_answers import answer_about_requests
from service.served_model import ModelFacts
from service.settings import Origin, Settings

if TYPE_CHECKING:
    from model.executor import Executor

MOST_FRONT_ENDS, CORES_A_FRONT_END = 4, 4
"""What --front-ends auto comes to on a GPU: one process streams 50,000 tokens a second and more."""

log = structlog.get_logger("pagewalk.server")
T = TypeVar("T")


class Server:
    """One server: the engine's process, with all that it starts."""

    def __init__(self, settings: Settings, version: str, origins: Mapping[str, Origin] | None = None) -> None:
        """origins: where each setting came from, for those who look; None: all are defaults."""
        self._origins = origins or {}
        self._operations: Operations | None = None  # once the model is loaded
        self.settings = settings
        self.metrics = Metrics(version, vllm_names=settings.metrics_compat == "vllm")
        self.answers = Answers()
        self.answers.on(RenderMetrics, self._render_metrics)
        self.answers.on(CountGenerating, self._count_generating)
        self.api = ApiSettings(
            version=version,
            api_keys=tuple(settings.api_keys),
            api_key_file=settings.api_key_file,
            tls_cert=settings.tls_cert,
            tls_key=settings.tls_key,
            body_limit_bytes=settings.max_body_bytes,
            cors_allow_origins=tuple(settings.cors_allow_origins),
            admin_api_key=settings.admin_api_key,
            sse_keep_alive_s=settings.sse_keep_alive_s,
            stream_interval=settings.stream_interval,
            unknown_fields=settings.unknown_fields,
            max_logprobs=settings.max_logprobs,
            max_generating=allow_many_sockets(),
        )
        if settings.checkpoint_dir is not None:
            try:
                check_folder(settings.checkpoint_dir)
            except ValueError as error:
                raise ConfigurationError(f"--checkpoint-dir {error}") from error
        tls = tls_context(self.api)  # front ends make their own: here it is known early that they can
        count = front_end_count(settings)
        self.doors: Doors | None = None  # one of these two
        self.front_ends: FrontEnds | None = None
        if count == 0:
            self.doors = Doors(FrontEnd(self.api, self.metrics.http, logs.log_request, self.answers), tls)
            self._keys = self.doors.front_end.api_keys
        else:
            self._keys = self.api.key_ring()  # which front ends are told
            self._keys.on_reload = self._tell_keys
            self.front_ends = FrontEnds(self._hello, count, self.answers, self.metrics.http)
            self.metrics.add_front_ends(self.front_ends.reports)
        self.is_open = False  # requests are admitted, or were
        self._stop = asyncio.Event()
        self._started_s = time.monotonic()
        self._held: list[socket.socket] = []  # the port and the admin port that front ends share
        self._admin_from = 0  # in `_held`, those of the admin port
        self.port = 0
        self.admin_port = 0

    async def run(self) -> int:
        """Serve until a signal; returns the exit code. Raises Failure, ConfigurationError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        watches = [asyncio.create_task(self.metrics.http.watch_loop())]
        if self.front_ends is not None:
            watches.append(asyncio.create_task(self._keys.watch()))
        try:
            self._warn_of_tenants()
            await self._bind()
            starting = asyncio.gather(load(self.settings, self.metrics), self._start_front_ends())
            try:
                if not await self._unless_stopped(starting):
                    return 0
            finally:
                await give_up(starting)
            loaded, _ = starting.result()
            return await self._serve(loaded)
        finally:
            for watch in watches:
                watch.cancel()
            await self._close_doors()  # handlers send what is left, for FLUSH_S at most

    async def _bind(self) -> None:
        """Take the ports; without front ends of their own, also answer there. Raises ConfigurationError."""
        chosen = self.settings
        if self.doors is not None:
            await self.doors.open_at(chosen.host, chosen.port, chosen.admin_host, chosen.admin_port)
            self.port, self.admin_port = self.doors.port, self.doors.admin_port
        if self.front_ends is not None:
            self._held = await _reserved(chosen.host, chosen.port, "port")
            self._admin_from = len(self._held)
            self._held += await _reserved(chosen.admin_host, chosen.admin_port, "admin-port")
            self.port = self._held[0].getsockname()[1]
            self.admin_port = self._held[self._admin_from].getsockname()[1]

    async def _start_front_ends(self) -> None:
        """Those in processes of their own, which answer from then on. Raises Failure."""
        if self.front_ends is not None:
            try:
                await self.front_ends.open()
            except FrontEndFailed as error:
                raise Failure(f"a front end cannot start: {error}", EXIT_FAULT) from error

    async def _close_doors(self) -> None:
        if self.doors is not None:
            await self.doors.close()
        if self.front_ends is not None:
            await self.front_ends.close()
        for held in self._held:
            held.close()

    def _hello(self, number: int) -> Hello:
        """What a front end in a process of its own must know."""
        held = addresses([(bound.family, bound.getsockname()) for bound in self._held])
        return Hello(
            front_end=number,
            settings=self.api,
            keys=self._keys.known,
            addresses=held[: self._admin_from],
            admin_addresses=held[self._admin_from :],
            log_level=self.settings.log_level,
            log_format=self.settings.log_format,
            silence_s=self.settings.step_timeout_s,
        )

    @property
    def generating(self) -> int:
        """Requests that generate or wait. Of front ends in processes of their own: as they reported last."""
        if self.front_ends is not None:
            return self.front_ends.generating
        assert self.doors is not None
        return self.doors.front_end.generating

    def _tell_state(self) -> None:
        """The engine's state has changed: front ends in processes of their own must be told."""
        if self.front_ends is not None:
            self.front_ends.tell_status()

    # --- questions of front ends

    async def _render_metrics(self, front_end: int, question: RenderMetrics) -> MetricsText:
        if self.front_ends is not None:
            await self.front_ends.fresh_reports()
        return MetricsText(*self.metrics.render(question.accept))

    async def _count_generating(self, front_end: int, question: CountGenerating) -> int:
        if self.front_ends is not None:
            await self.front_ends.fresh_reports()
        return self.generating

    # --- with a model

    async def _serve(self, loaded: Loaded) -> int:
        engine = loaded.assembly.engine
        running = asyncio.create_task(engine.run())
        try:
            began_s = time.monotonic()
            warm: asyncio.Future[Any] = asyncio.gather(warm_up(loaded), self._publish(loaded))
            await asyncio.wait([warm, running], return_when=asyncio.FIRST_COMPLETED)
            if warm.done():
                warm.result()
                engine.open()
                loaded.phases_s["warm-up"] = round(time.monotonic() - began_s, 3)
                self._tell_state()
                settle()
                self._announce(loaded)
                self.is_open = True
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

    async def _publish(self, loaded: Loaded) -> None:
        """Let the front ends and the metrics know the model. Raises Failure."""
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
                frames=assembly.engine.scheduler.memory.frames.usable,
                gpu_memory_utilization=settings.gpu_memory_utilization,
                max_model_len=assembly.client.limits.max_model_len,
                tier="gpu" if assembly.device == "cuda" else "host",
                prefix_caching=settings.enable_prefix_caching,
                snapshot=assembly.engine.snapshot,
            )
        )

        async def take_snapshot(front_end: int, question: TakeSnapshot) -> EngineSnapshot:
            return assembly.engine.snapshot()

        self.answers.on(TakeSnapshot, take_snapshot)
        inside = Inside(assembly.engine, shows_text=settings.admin_show_text)
        inspector(inside, self.metrics, settings, self._origins).answer_with(self.answers)
        later = asyncio.get_running_loop().call_later
        self._operations = Operations(inside, self._tell_state, later)
        self._operations.answer_with(self.answers)
        from service.checkpoint_file import CheckpointFolder
        from service.checkpoints import Checkpoints

        folder = None if settings.checkpoint_dir is None else Path(settings.checkpoint_dir)
        Checkpoints(self._operations, assembly.model_identity, CheckpointFolder(folder)).answer_with(self.answers)
        facts = ModelFacts(
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
            dtype=assembly.dtype,
            weights_bytes=assembly.weights_bytes,
        )
        grammars = Grammars(loaded.tokenizer, assembly.config.vocabulary, facts.end_ids)
        assembly.engine.held.grammars = grammars
        if self.doors is not None:
            self.doors.front_end.model = facts.served(loaded.tokenizer, assembly.client, grammars)
        if self.front_ends is not None:
            polls = may_poll(assembly.executor, self.front_ends.count)
            message = Serve(facts, loaded.tokenizer_files, assembly.client.limits, polls)
            try:
                await self.front_ends.serve(assembly.engine, message)
            except FrontEndFailed as error:
                raise Failure(f"a front end cannot start: {error}", EXIT_FAULT) from error

    def _announce(self, loaded: Loaded) -> None:
        assembly = loaded.assembly
        limits, frames = assembly.client.limits, assembly.engine.scheduler.memory.frames.usable
        log.info(
            "ready",
            model=loaded.name,
            device=assembly.device,
            dtype=assembly.dtype,
            kernels=assembly.kernels,
            url=self._url(),
            admin=f"http://{url_host(self.settings.admin_host)}:{self.admin_port}/admin/",
            max_model_len=limits.max_model_len,
            largest_request_tokens=limits.request_tokens(DEFAULT_TENANT),
            frames=frames,
            kv_bytes=frames * assembly.executor.frame_bytes,
            seconds=round(time.monotonic() - self._started_s, 2),
            phases_s=loaded.phases_s,
        )
        with suppress(OSError):  # a hint for people: a disk that is full must not end a server for it
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
        key = ' -H "Authorization: Bearer $PAGEWALK_API_KEY"' if self._keys else ""
        data = json.dumps({**body, "stream": True})
        return f"curl -N {self._url()}/v1/{path} -H 'Content-Type: application/json'{key} -d '{data}'"

    def _url(self) -> str:
        scheme = "http" if self.settings.tls_cert is None else "https"
        return f"{scheme}://{url_host(self.settings.host)}:{self.port}"

    async def _drain(self, loaded: Loaded, running: "asyncio.Task[None]") -> None:
        """Admit nothing more, and wait for what runs, up to the timeout."""
        engine = loaded.assembly.engine
        engine.drain()
        self._tell_state()
        log.info("draining", requests=self.generating, timeout_s=self.settings.shutdown_timeout_s)
        drained: asyncio.Task[None] = asyncio.create_task(engine.drained())
        await asyncio.wait(
            [drained, running], timeout=self.settings.shutdown_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not drained.done():
            drained.cancel()
            log.warning("ending what still runs", requests=self.generating)

    def _reload(self) -> None:
        """SIGHUP: what can change while the server runs is read again."""
        self._keys.reload()
        if self._operations is not None:
            self._operations.note("reload", "SIGHUP", {}, {})
        self._warn_of_tenants()

    def _tell_keys(self) -> None:
        if self.front_ends is not None:
            self.front_ends.tell_keys(self._keys.known)

    def _warn_of_tenants(self) -> None:
        """A key of a tenant that has no table may be a mistyped name, and then has no limits."""
        listed = self.settings.tenants
        if listed and (unlisted := self._keys.tenants - {*listed, DEFAULT_TENANT}):
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


async def _reserved(host: str, port: int, flag: str) -> list[socket.socket]:
    """Every address of a host, held for processes to share. Raises ConfigurationError."""
    try:
        return reserve(await addresses_of(host, port))
    except OSError as error:
        raise cannot_listen(error, host, port, flag) from None


def has_nvidia_driver() -> bool:
    return Path("/dev/nvidiactl").exists()


def front_end_count(settings: Settings) -> int:
    """Processes that answer HTTP. Whether there is a GPU is told by its driver: torch would take seconds to say so."""
    if settings.front_ends is not None:
        return settings.front_ends
    on_gpu = settings.device == "cuda" or (settings.device == "auto" and has_nvidia_driver())
    return min(MOST_FRONT_ENDS, max(1, usable_cores() // CORES_A_FRONT_END)) if on_gpu else 0


def may_poll(executor: "Executor", front_ends: int) -> bool:
    """Whether front ends poll (busy_poll.py): beside a device that is polled for, too, and where each can have a core
    to itself, with some to spare.
    """
    return executor.polls > 0 and usable_cores() >= CORES_A_FRONT_END * front_ends
