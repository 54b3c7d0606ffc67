"""The load generator and what it is run against: the same prompts for every server, figures from known times."""

from array import array

from bench import loadgen, serve, serve_plot, workload
from bench.offline import SHAPES
from service.tokenization import Tokenizer


def test_prompts_are_those_of_the_other_benchmarks() -> None:
    for name in workload.names():
        rows = loadgen.load_rows(str(workload.FOLDER / f"{name}.jsonl"), 3)
        assert [loadgen.prompt_ids(row, 1000) for row in rows] == [
            item.prompt_ids for item in workload.load(name, 1000, 3)
        ]


def test_a_workload_may_be_a_file_of_one_s_own(tmp_path) -> None:
    file = tmp_path / "short.jsonl"
    file.write_text('{"id": 0, "seed": 3, "prompt_len": 5, "output_len": 2}\n')
    assert workload.path_of(str(file)) == file
    (item,) = workload.load(str(file), 1000)
    assert (item.prompt_ids, item.output_len) == (loadgen.prompt_ids(loadgen.load_rows(str(file), 1)[0], 1000), 2)


def test_a_made_up_tokenizer_has_a_token_for_every_id_of_the_shape() -> None:
    with serve.shape_folder("smol") as folder:
        tokenizer = Tokenizer.load(folder)
    assert tokenizer.vocabulary == SHAPES["smol"]["vocab_size"]
    ids = tokenizer.encode("What is this?", add_special_tokens=True)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "What is this?"


def test_figures_of_known_times() -> None:
    """First tokens after 0.1 and 0.3 s, gaps of 10 and 20 ms; a broken request counts as a failure and no more."""
    options = loadgen.parse_args(["--model", "m", "--workload", "w.jsonl", "--vocab", "9", "--rate", "4"])
    results = []
    for i, (first, gap) in enumerate([(0.1, 0.01), (0.3, 0.02)]):
        events = array("d", [100 + i + first + gap * k for k in range(5)])
        results.append(
            loadgen.Result(i, 5, 1, at=i, begun=100.0 + i, ended=102.0, tokens=5, prompt_tokens=7, events={0: events})
        )
    results.append(loadgen.Result(2, 5, 1, at=0, begun=100, ended=101, error="timeout"))
    found = loadgen.summary(options, 100.0, results, [0.5])
    assert (found["failures"], found["output_tokens"], found["duration_s"]) == (1, 10, 2.0)
    assert (found["ttft_ms"]["mean"], found["ttft_ms"]["p99"]) == (200.0, 300.0)
    assert (found["tpot_ms"]["p50"], found["tpot_ms"]["max"]) == (10.0, 20.0)
    assert serve.row(found)[0] == "3@4"


def test_a_picture_has_the_runs_with_a_rate_in_order_beside_the_peer_s() -> None:
    """Runs at once or one by one have no place on an axis of rates; a network without a peer stands alone."""
    runs = [
        {"rate": rate, "ttft_ms": {"p50": 1.0, "p99": 2.0}, "tpot_ms": {"p50": 3.0, "p99": rate}}
        for rate in ("inf", 16.0, "seq", 8.0)
    ]
    drawn = serve_plot.lines(runs, "8b", "tpot_ms")
    assert drawn["Pagewalk", "p99"] == [(8.0, 8.0), (16.0, 16.0)]
    assert drawn["vLLM 0.22.1", "p99"] == [(8, 5.98), (16, 6.72), (24, 7.78), (32, 9.68)]
    assert set(serve_plot.lines(runs, "another", "ttft_ms")) == {("Pagewalk", "p50"), ("Pagewalk", "p99")}
