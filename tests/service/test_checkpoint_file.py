"""Checkpoints as files: whole or not there, nothing outside the folder, and no junk is taken for one."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.step_plan import SamplingParameters
from service.checkpoint_file import (
    VERSION,
    CheckpointFolder,
    Damaged,
    Header,
    ModelIdentity,
    NotWritten,
    decode,
    encode,
)
from service.constraint import Constraint
from service.engine_client import Submit, TextWishes
from service.errors import BadRequest, NotFound, PermissionDenied

MODEL = ModelIdentity("Llama", 2, 1, 8, 50, "bfloat16", 16, "c", "w")
SUBMIT = Submit(0, "r", [1, 2, 3], 9, SamplingParameters(seed=2**64 - 1, logit_bias={3: -1.5}), [7])
HEADER = Header(model=MODEL, submit=SUBMIT, answer_begin=2, text_begin=2, positions=2, created=1.5)
PAGES = torch.randn(3, 2, 2, 1, 16, 8).to(torch.bfloat16)
MOST = 1 << 20


@given(
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=40),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.floats(0, 2),
    stops=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=4),
    salt=st.text(st.characters(exclude_categories=["Cs"])),
    pages=st.integers(0, 3),
)
def test_what_was_written_is_read(
    tokens: list[int], seed: int, temperature: float, stops: list[str], salt: str, pages: int
) -> None:
    sampling = SamplingParameters(temperature=temperature, seed=seed, bad_words=[tokens] if tokens else [])
    submit = Submit(0, "r", tokens, 9, sampling, [7], cache_salt=salt, text=TextWishes(stops=stops))
    header = Header(MODEL, msgspec.structs.replace(submit, constraint=Constraint("regex", salt)), 1, 1, 2, 3.5)
    read, read_pages = decode(encode(header, PAGES[:pages]))
    assert read == header
    assert torch.equal(read_pages, PAGES[:pages])


@given(st.binary(max_size=200))
def test_junk_is_no_checkpoint(junk: bytes) -> None:
    with pytest.raises(Damaged):
        decode(junk)


@given(st.data())
def test_no_byte_can_be_changed_and_nothing_cut(data: st.DataObject) -> None:
    whole = encode(HEADER, PAGES)
    at = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(Damaged):
        decode(whole[:at])
    changed = bytearray(whole)
    changed[at] ^= data.draw(st.integers(1, 255))
    try:
        read, pages = decode(bytes(changed))
    except Damaged:
        return
    assert (read, torch.equal(pages, PAGES)) == (HEADER, True), "only what stands for nothing, as a space, may differ"


def test_another_version_or_another_header_is_told_apart() -> None:
    with pytest.raises(Damaged, match=f"version {VERSION + 1}"):
        decode(encode(msgspec.structs.replace(HEADER, version=VERSION + 1), PAGES))
    with pytest.raises(Damaged, match="holds something else"):
        decode(safetensors.torch.save({"pages": PAGES}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder


def test_a_file_is_there_as_a_whole_for_its_owner_alone(folder: Path) -> None:
    checkpoints = CheckpointFolder(folder)
    size = checkpoints.write("a", HEADER, PAGES)
    assert [each.name for each in folder.iterdir()] == ["a"]
    assert ((folder / "a").stat().st_mode & 0o777, (folder / "a").stat().st_size) == (0o600, size)
    checkpoints.write("a", msgspec.structs.replace(HEADER, created=2.5), PAGES)
    header, pages = checkpoints.read("a", MOST)
    assert (header.created, torch.equal(pages, PAGES)) == (2.5, True)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_file_that_cannot_be_written_leaves_the_one_before(
    monkeypatch: pytest.MonkeyPatch, folder: Path, number: int, call: str
) -> None:
    checkpoints = CheckpointFolder(folder)
    checkpoints.write("a", HEADER, PAGES)

    def fails(*args: Any, **more: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fails)
        with pytest.raises(NotWritten) as raised:
            checkpoints.write("a", HEADER, PAGES[:1])
    assert ("the disk is full" in str(raised.value)) == (number == errno.ENOSPC)
    assert [each.name for each in folder.iterdir()] == ["a"]
    assert len(checkpoints.read("a", MOST)[1]) == 3


def test_a_folder_that_is_gone_is_told(folder: Path) -> None:
    folder.rmdir()
    with pytest.raises(NotWritten):
        CheckpointFolder(folder).write("a", HEADER, PAGES)
    with pytest.raises(NotFound):
        CheckpointFolder(folder).read("a", MOST)


def link(folder: Path) -> None:
    outside = folder.parent / "outside"
    outside.write_bytes(encode(HEADER, PAGES))
    (folder / "a").symlink_to(outside)


PLACES: dict[str, Callable[[Path], None]] = {
    "a link": link,
    "a folder": lambda folder: (folder / "a").mkdir(),
    "a pipe": lambda folder: os.mkfifo(folder / "a"),
    "a large file": lambda folder: os.truncate(os.open(folder / "a", os.O_CREAT | os.O_WRONLY), 1 << 40),
}


@pytest.mark.parametrize("place", PLACES)
def test_only_a_plain_file_of_a_likely_size_is_read(folder: Path, place: str) -> None:
    PLACES[place](folder)
    with pytest.raises(BadRequest, match="cannot be read"):
        CheckpointFolder(folder).read("a", MOST)


def test_a_link_is_replaced_and_not_followed(folder: Path) -> None:
    link(folder)
    before = (folder.parent / "outside").read_bytes()
    CheckpointFolder(folder).write("a", msgspec.structs.replace(HEADER, created=9.0), PAGES)
    assert (folder.parent / "outside").read_bytes() == before
    assert not (folder / "a").is_symlink()


def test_without_a_folder_there_are_none() -> None:
    with pytest.raises(PermissionDenied, match="--checkpoint-dir"):
        CheckpointFolder(None).check("a")
