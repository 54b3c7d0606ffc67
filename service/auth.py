"""Keys: who may come in, and whose requests theirs are.

A key belongs to one tenant (tenant_settings.py), whose limits its requests meet. Only SHA-256 digests are kept: keys
are long and random, so there is no dictionary that a slower hash would have to hold up.

A file of keys has one on each line, as it is or hashed; lines that begin with # are comments:

    sk-Zk3...                          a key of the tenant `default`
    sha256:9f86d0...                   the same, by the digest of its bytes (64 hex digits): the file holds no secret
    batch:sha256:60303a...             a key of the tenant `batch`

The file is read again when it changes. One that is empty, broken or gone then changes nothing but the log: no mistake
in it may open the doors, or close them.
"""

import asyncio
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import structlog

from service.engine_client import DEFAULT_TENANT
from service.plain_files import read_text
from service.tenant_settings import TENANT_NAME, is_tenant_name

WATCH_S = 2.0
"""How often a file of keys is looked at."""

log = structlog.get_logger("pagewalk.auth")


class Caller(NamedTuple):
    """Who sent a request."""

    tenant: str = DEFAULT_TENANT
    owner: str = ""
    """What its key's requests have in common: from the key's digest, not the key. Empty where no key was asked for."""

    address: str = ""  # that its connection comes from: a client's, or a proxy's


def digest_of(key: str) -> bytes:
    """SHA-256 of a key's bytes."""
    # surrogateescape: header bytes that are not UTF-8 arrive so, and must be hashed like any other wrong key
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class KeyRing:
    """Secrets that open a door."""

    def __init__(self, keys: Iterable[str] = (), file: Path | None = None) -> None:
        """`keys` are of the tenant `default`. Raises ValueError for a file that cannot be used."""
        self._given = {digest_of(key): DEFAULT_TENANT for key in keys}
        self._file = file
        self.on_reload: Callable[[], None] = lambda: None  # there may be other keys now
        self._seen = _stamp(file)
        # The table is found by a digest under this process's own secret. So how long a look-up takes depends on nothing
        # that a client can choose or work out, and thousands of keys cost as much as one.
        self._secret = secrets.token_bytes(32)
        self._table: dict[bytes, tuple[bytes, str]] = {}
        self._fill()

    @classmethod
    def of(cls, known: Mapping[str, str]) -> "KeyRing":
        """One that opens to the keys that another has `known`."""
        ring = cls()
        ring.take(known)
        return ring

    @property
    def known(self) -> dict[str, str]:
        """Each key's digest (64 hex digits) -> its tenant."""
        return {digest.hex(): tenant for digest, tenant in self._table.values()}

    def take(self, known: Mapping[str, str]) -> None:
        """In place of all keys, those that another ring has `known`."""
        self._given = {bytes.fromhex(digest): tenant for digest, tenant in known.items()}
        self._fill()

    def _fill(self) -> None:
        tenants = self._given if self._file is None else self._given | read_key_file(self._file)
        self._table = {self._place(digest): (digest, tenant) for digest, tenant in tenants.items()}

    def _place(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")

    def __bool__(self) -> bool:
        return bool(self._table)

    @property
    def tenants(self) -> set[str]:
        """Of all keys."""
        return {tenant for _, tenant in self._table.values()}

    def find(self, key: str) -> Caller | None:
        """Whose key it is; None for nobody's."""
        digest = digest_of(key)
        known, tenant = self._table.get(self._place(digest), (b"", ""))
        return Caller(tenant, digest.hex()[:32]) if hmac.compare_digest(known, digest) else None

    def reload(self) -> None:
        """Read the file again. What is wrong with it is logged, and then the keys stay as they were."""
        if self._file is None:
            return
        self._seen = _stamp(self._file)
        try:
            self._fill()
        except ValueError as error:
            log.error("keys not reloaded", file=str(self._file), reason=str(error))
        else:
            log.info("keys reloaded", file=str(self._file), keys=len(self._table))
            self.on_reload()

    async def watch(self) -> None:
        """Reload whenever the file changes, until cancelled."""
        while self._file is not None:
            await asyncio.sleep(WATCH_S)
            if _stamp(self._file) != self._seen:
                self.reload()


def _stamp(file: Path | None) -> tuple[int, ...] | None:
    """What changes when the file does; None if there is none."""
    try:
        found = None if file is None else file.stat()
    except OSError:
        return None
    return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev)


_HASHED = re.compile(r"(?:(?P<tenant>.+):)?sha256:(?P<hex>[0-9a-fA-F]{64})")
_KEY = re.compile(r"[!-~]+")


def read_key_file(path: Path) -> dict[bytes, str]:
    """Digest of each key -> its tenant. Raises ValueError in words that name a line and never a key."""
    lines = read_text(path).splitlines()
    found: dict[bytes, str] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        if hashed := _HASHED.fullmatch(line):
            digest, tenant = bytes.fromhex(hashed["hex"]), hashed["tenant"] or DEFAULT_TENANT
            if not is_tenant_name(tenant):
                raise ValueError(f"{path}, line {number}: the name of a tenant is {TENANT_NAME}")
        elif "sha256:" in line or not _KEY.fullmatch(line):
            raise ValueError(
                f"{path}, line {number}: must be KEY (printable, no spaces) or [TENANT:]sha256:64 hex digits"
            )
        else:
            digest, tenant = digest_of(line), DEFAULT_TENANT
        if found.setdefault(digest, tenant) != tenant:
            raise ValueError(f"{path}, line {number}: this key is also that of another tenant")
    if not found:
        raise ValueError(f"{path} holds 0 keys")
    return found
