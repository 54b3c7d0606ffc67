"""The whole server under load over HTTP, with open-loop arrivals: `bench.loadgen` against a server that it starts.

    pagewalk bench serve --shape smol --runs 20@seq,1000@50,1000@100,1000@inf [--out FILE.jsonl] [--plot FILE.svg]
    pagewalk bench serve --url http://127.0.0.1:8000 --name m --vocabulary 49152 --runs 400@8,400@16
    pagewalk bench serve --shape 8b --runs 1000@inf -- --front-ends 4        further flags for the server
    pagewalk bench serve --drawn FILE.jsonl --shape 8b --plot FILE.svg       a picture of earlier runs

A run is REQUESTS@RATE: so many rows of the workload, at so many arrivals a second (Poisson, from a fixed seed), or
`inf` at once, or `seq` one after the other. --shape: a network with random weights and a made-up tokenizer of its
size, no page cache, as the peers' numbers were measured; --model: a real one. Prompts are token ids, greedy, ends
ignored. Definitions of the figures: bench/loadgen.py. A table, then one line of JSON a run.
"""

import argparse
import json
import random
import resource
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench import loadgen, serve_plot, workload
from bench.offline import SHAPES, write_config
from bench.server_process import NAME, serving
from model.config import read_config
from model.source import resolve

RANDOM_WEIGHTS = ("--load-format", "dummy", "--no-enable-prefix-caching")


@contextmanager
def shape_folder(shape: str) -> Iterator[Path]:
    """A model folder with the config.json of a shape, and a byte-level tokenizer with as many tokens."""
    vocabulary = SHAPES[shape]["vocab_size"]
    letters, draw = sorted(pre_tokenizers.ByteLevel.alphabet()), random.Random(0)
    tokens = {letter: i for i, letter in enumerate(letters)}
    while len(tokens) < vocabulary:
        tokens.setdefault("Ġ" + "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=5)), len(tokens))
    tokenizer = Tokenizer(models.BPE(tokens, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_config(folder, shape)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text("{}")
        yield folder


def load(url: str, name: str, vocabulary: int, run: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Carry out one run; returns the generator's figures."""
    limit, _, rate = run.partition("@")
    path = workload.path_of(chosen.workload)
    arguments = ["--base-url", url, "--model", name, "--workload", str(path), "--vocab", str(vocabulary)]
    arguments += ["--rate", rate, "--limit", limit, "--procs", str(chosen.procs), "--label", chosen.label or run]
    options = loadgen.parse_args(arguments)
    start, results, cpu = loadgen.run(options, loadgen.load_rows(options.workload, options.limit))
    return {"network": chosen.shape or name} | loadgen.summary(options, start, results, cpu)


COLUMNS = ("run", "failures", "duration s", "tok/s", "TTFT mean / p50 / p99 ms", "TPOT mean / p50 / p99 ms", "ITL p99")


def row(result: dict[str, Any]) -> list[str]:
    """The table's line of a run, in the order of COLUMNS."""

    def of(name: str) -> str:
        found = result[name]
        return "-" if found is None else " / ".join(f"{found[part]:.2f}" for part in ("mean", "p50", "p99"))

    itl = result["itl_ms"]
    return [
        f"{result['requests']}@{result['rate']}".removesuffix(".0"),
        str(result["failures"]),
        f"{result['duration_s']:.2f}",
        f"{result['output_tok_s']:.0f}",
        of("ttft_ms"),
        of("tpot_ms"),
        "-" if itl is None else f"{itl['p99']:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shape", choices=SHAPES, help="random weights of this shape")
    parser.add_argument(
        "--drawn", type=Path, metavar="FILE", help="run nothing: draw the lines of this file, of --shape"
    )
    what.add_argument("--model", help="a real model")
    what.add_argument("--url", help="a server that runs already, of whatever kind")
    parser.add_argument("--name", default=NAME, help="what the server at --url calls its model")
    parser.add_argument("--vocabulary", type=int, help="ids that prompts are drawn from, for --url")
    parser.add_argument("--workload", default="chat-1000", help=", ".join(workload.names()) + ", or a .jsonl file")
    parser.add_argument("--runs", default="20@seq,400@8,400@16,1000@inf", help="REQUESTS@RATE, separated by commas")
    parser.add_argument("--procs", type=int, default=4, help="processes of the generator")
    parser.add_argument("--label", help="goes into the JSON")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the lines of JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture of the runs with a rate (svg)")
    parser.add_argument("flags", nargs="*", help="for the server, behind --")
    chosen = parser.parse_args()
    if chosen.url is not None and chosen.vocabulary is None:
        parser.error("--url needs --vocabulary")
    if chosen.drawn is not None:
        if chosen.shape is None or chosen.plot is None:
            parser.error("--drawn needs --shape and --plot")
        earlier = [json.loads(line) for line in chosen.drawn.read_text("utf-8").splitlines()]
        serve_plot.plot([each for each in earlier if each["network"] == chosen.shape], chosen.shape, chosen.plot)
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    results: list[dict[str, Any]] = []
    with shape_folder(chosen.shape) if chosen.shape else nullcontext(chosen.model) as folder:
        server: AbstractContextManager[str]
        if chosen.url is None:
            vocabulary = read_config(Path(folder) if chosen.shape else resolve(str(folder)).folder).vocabulary
            server = serving(["--model", str(folder), *(RANDOM_WEIGHTS if chosen.shape else ()), *chosen.flags])
        else:
            vocabulary, server = chosen.vocabulary, nullcontext(chosen.url)
        with server as url:
            for run in chosen.runs.split(","):
                results.append(load(url, chosen.name, vocabulary, run, chosen))
                line = json.dumps(results[-1])
                print(line, flush=True)
                if chosen.out is not None:
                    with chosen.out.open("a", encoding="utf-8") as file:
                        file.write(line + "\n")
    print("| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS), sep="\n", file=sys.stderr)
    for result in results:
        print("| " + " | ".join(row(result)) + " |", file=sys.stderr)
    if chosen.plot is not None:
        serve_plot.plot(results, results[0]["network"], chosen.plot)
    if any(result["failures"] for result in results):
        raise SystemExit("some requests failed")


if __name__ == "__main__":
    main()
