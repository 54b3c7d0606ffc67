"""The command `pagewalk`: settings, the wiring of every object, signals, exit codes.

    serve         load a model and answer requests
    check         load a model, generate a little, and say how it went
    config show   print the settings in force, and where each came from
    ps, meminfo, maps ID, trace, audit, top   look at a running server (operator_commands.py)
    openapi       print the description of the API
    bench NAME    measure something (bench/__main__.py)

Exit codes: 0 well; 2 a setting is wrong; 3 the model cannot be loaded; 4 the device or its memory is not enough;
70 a fault of ours; 74 what is printed cannot be written. Everything but 70 is one line that says what to do.
"""

import os

# Before torch and its OpenMP are loaded, or it is too late. Threads that spin while they wait make every step 5 to 20
# times slower on a machine with other work, as a laptop is; a sleeping thread costs microseconds to wake.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# Prompts are encoded one at a time beside a running engine: no threads of the tokenizer's own.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# torch says once, past every log, that to choose between cuBLAS and cuBLASLt (model/blas_choice.py) is experimental.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any

import msgspec
import uvloop

from service import logs
from service.errors import ConfigurationError
from service.loading import EXIT_FAULT, Failure, check
from service.openapi import document
from service.operator_commands import COMMANDS as OPERATOR_COMMANDS
from service.operator_commands import main as run_operator_command
from service.process import UnjoinedThreads
from service.server import Server
from service.settings import Origin, Settings, SettingsError
from service.settings_sources import Parser, add_flags, load_settings, to_toml

EXIT_OK, EXIT_SETTINGS, EXIT_OUTPUT = 0, 2, 74


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    code = EXIT_OK
    try:
        code = run(arguments)
        sys.stdout.flush()
    except OSError as error:
        if code == EXIT_OK and arguments[:1] != ["serve"]:  # what a server prints is a hint
            code = _fail(EXIT_OUTPUT, error)
    with suppress(OSError):
        sys.stderr.flush()
    # Not sys.exit: a thread that loads a model, or waits for a step, would be waited for.
    os._exit(code)


def run(arguments: list[str]) -> int:
    """Carry out one command; returns the exit code."""
    if arguments[:1] == ["bench"]:
        from bench.__main__ import main as bench  # only here: nothing else of the service knows the benchmarks

        try:
            return bench(arguments[1:])
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else EXIT_SETTINGS
    if arguments[:1] and arguments[0] in OPERATOR_COMMANDS:
        return run_operator_command(arguments)
    try:
        given = parser().parse_args(arguments)
    except SystemExit as end:  # argparse has said what is wrong, or has printed the help
        return end.code if isinstance(end.code, int) else EXIT_SETTINGS
    try:
        if given.command == "openapi":
            return _printed(msgspec.json.format(document(version("pagewalk")), indent=2).decode() + "\n")
        settings, origins = load_settings(vars(given), os.environ)
        if given.command == "config":
            return _printed(to_toml(settings, origins))
        logs.configure(settings.log_level, settings.log_format)
        return _run_in_loop(given.command, settings, origins)
    except (SettingsError, ConfigurationError) as error:
        return _fail(EXIT_SETTINGS, error)
    except Failure as error:
        return _fail(error.code, error)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        logging.getLogger("pagewalk").critical("this should not have happened", exc_info=error)
        return EXIT_FAULT


def _run_in_loop(command: str, settings: Settings, origins: Mapping[str, Origin]) -> int:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.get_loop().set_default_executor(UnjoinedThreads())
        if command == "check":
            print(runner.run(check(settings)))
            return EXIT_OK
        return runner.run(Server(settings, version("pagewalk"), origins).run())


def _printed(text: str) -> int:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        return _fail(EXIT_OUTPUT, error)
    return EXIT_OK


def _fail(code: int, error: Exception) -> int:
    with suppress(OSError):  # the code says it, too
        print(f"pagewalk: error: {error}", file=sys.stderr)
    return code


def parser() -> Parser:
    found = Parser(
        prog="pagewalk",
        description="A server for language models. Its KV cache is run like an operating system's virtual memory.",
    )
    found.add_argument("--version", action="version", version=f"pagewalk {version('pagewalk')}")
    commands = found.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    serve: dict[str, Any] = {
        "description": "Load a model and answer requests in the form of the OpenAI API. Each flag is also a variable "
        "(PAGEWALK_MAX_NUM_SEQS) and a name in the --config file (max_num_seqs); flags win over variables, "
        "variables over the file.",
    }
    add_flags(commands.add_parser("serve", help="load a model and answer requests", **serve))
    add_flags(commands.add_parser("check", help="load a model, generate a little, and exit"))
    commands.add_parser("bench", help="measure throughput, latency, kernels, swap", add_help=False)
    for name, text in OPERATOR_COMMANDS.items():
        commands.add_parser(name, help=f"of a running server: {text}", add_help=False)
    commands.add_parser("openapi", help="print the description of the API (OpenAPI 3.1)")
    config = commands.add_parser("config", help="look at the settings").add_subparsers(
        dest="action", required=True, metavar="ACTION", parser_class=Parser
    )
    add_flags(config.add_parser("show", help="print the settings in force as TOML, and where each came from"))
    return found


if __name__ == "__main__":
    main()
