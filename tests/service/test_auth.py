"""Keys and their tenants: how a file of keys is read, when it is read again, and whose requests a key's are."""

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest
from http_house import Start
from structlog.testing import capture_logs

from service.auth import KeyRing, read_key_file


def hashed(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def bearer(key: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {key}"}}


def test_a_file_has_plain_and_hashed_keys_of_tenants(tmp_path: Path) -> None:
    upper = f"sha256:{hashed('c').removeprefix('sha256:').upper()}"
    lines = ["# ours", "plain:with:colons", "", f"  {hashed('b')}", f"batch:{upper}", f"a b:{hashed('d')}"]
    file = write(tmp_path / "keys", *lines)
    ring = KeyRing(["given"], file)
    tenants = {key: found.tenant for key in ("plain:with:colons", "b", "c", "d", "given") if (found := ring.find(key))}
    assert tenants == {"plain:with:colons": "default", "b": "default", "c": "batch", "d": "a b", "given": "default"}
    assert ring.find(hashed("b")) is None, "a digest is no key"
    assert ring.find("") is None
    assert ring.tenants == {"default", "batch", "a b"}


def test_owners_are_told_apart_and_say_nothing_of_the_key() -> None:
    ring = KeyRing(["one", "two"])
    first, second = ring.find("one"), ring.find("two")
    assert first is not None
    assert second is not None
    assert first.owner != second.owner
    assert first == KeyRing(["one"]).find("one"), "the same in every process"
    assert "one" not in first.owner


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("two words", "line 2"), ("sha256:abc", "line 2"), ("batch:sha256:" + "g" * 64, "line 2"),
        ("cl\u00e9", "line 2"), ("other:" + hashed("first"), "another tenant"),
        ("a\x07b:" + hashed("x"), "line 2: the name of a tenant is 1 to 128 printable characters"),
        ("a" * 129 + ":" + hashed("x"), "line 2: the name of a tenant"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named_and_not_printed(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        read_key_file(write(tmp_path / "keys", "first", line))
    assert line not in str(caught.value)


async def test_a_changed_file_opens_and_closes_doors_while_the_server_runs(start: Start, tmp_path: Path) -> None:
    file = write(tmp_path / "keys", "old")
    server = await start(settings={"api_key_file": str(file)})
    assert (await server.get("/v1/models", **bearer("old"))).status == 200
    write(file, "new")
    with capture_logs() as log:
        server.front_end.api_keys.reload()
    assert [line["event"] for line in log] == ["keys reloaded"]
    assert (await server.get("/v1/models", **bearer("old"))).status == 401
    assert (await server.get("/v1/models", **bearer("new"))).status == 200


@pytest.mark.parametrize("content", [None, "", "# nobody\n", "two words\n"])
def test_no_mistake_in_the_file_opens_or_closes_the_doors(tmp_path: Path, content: str | None) -> None:
    """Above all an empty one: a server without keys lets everybody in."""
    file = write(tmp_path / "keys", "old")
    ring = KeyRing([], file)
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    with capture_logs() as log:
        ring.reload()
    assert [line["event"] for line in log] == ["keys not reloaded"]
    assert ring
    assert ring.find("old") is not None
    assert ring.find("anything") is None


async def test_a_change_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.auth.WATCH_S", 0.01)
    file = write(tmp_path / "keys", "old")
    ring = KeyRing([], file)
    watching = asyncio.create_task(ring.watch())
    other = write(tmp_path / "other", "new")
    other.replace(file)  # as orchestrators change a mounted secret
    async with asyncio.timeout(30):
        while ring.find("new") is None:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)
    watching.cancel()


async def test_the_tenant_of_a_key_is_that_of_its_sequences(start: Start, tmp_path: Path) -> None:
    """On every route that generates, and in the log line; without keys it is the default."""
    file = write(tmp_path / "keys", "mine", f"batch:{hashed('theirs')}")
    server = await start(settings={"api_key_file": str(file)})
    chat = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 5}
    for path, body in (
        ("/v1/completions", {"prompt": "the"}), ("/v1/chat/completions", chat), ("/v1/messages", chat),
        ("/v1/responses", {"input": "the"}),
    ):  # fmt: skip
        for key in ("mine", "theirs"):
            assert (await server.post(path, body, **bearer(key))).status == 200
    assert [submit.tenant for submit in server.engine.submitted] == ["default", "batch"] * 4
    assert len({submit.owner for submit in server.engine.submitted}) == 2
    assert [line["tenant"] for line in server.log] == ["default", "batch"] * 4
    assert "theirs" not in repr(server.log)
    open_server = await start()
    await open_server.complete()
    assert [(submit.tenant, submit.owner) for submit in open_server.engine.submitted] == [("default", "")]


async def test_the_share_of_a_tenant_bounds_its_requests(start: Start, tmp_path: Path) -> None:
    """C15: what can never fit into the memory of the key's tenant is refused with that tenant's numbers."""
    file = write(tmp_path / "keys", "mine", f"small:{hashed('theirs')}")
    server = await start(settings={"api_key_file": str(file)}, limits={"tenant_request_tokens": {"small": 32}})
    body = {"prompt": [5] * 20, "max_tokens": 20}
    assert (await server.post("/v1/completions", body, **bearer("mine"))).status == 200
    answer = await server.post("/v1/completions", body, **bearer("theirs"))
    assert answer.status == 400
    assert "share of this server's KV memory that is yours holds 32 tokens" in answer.error["message"]
    cut = await server.post("/v1/completions", body | {"truncate_prompt_tokens": -1}, **bearer("theirs"))
    assert cut.json["usage"]["prompt_tokens"] == 12
