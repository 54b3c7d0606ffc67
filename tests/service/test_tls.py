"""TLS on the main port: what a client that checks certificates sees, and files that cannot be used."""

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest
import uvloop

from service.api import make_app
from service.errors import ConfigurationError
from service.front_end import ApiSettings, FrontEnd
from service.http_server import addresses_of, listen, make_runner, tls_context
from service.questions import Answers

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cert.pem and key.pem for localhost; other.pem is the key of another certificate."""
    path = tmp_path_factory.mktemp("tls")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
    for key, certificate in (("key.pem", "cert.pem"), ("other.pem", "of_other.pem")):
        files = ["-keyout", str(path / key), "-out", str(path / certificate)]
        made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        subprocess.run([*made, *files, *subject], check=True, capture_output=True)
    return path


def settings(folder: Path, key: str = "key.pem", certificate: str = "cert.pem") -> ApiSettings:
    return ApiSettings(version="1", tls_cert=str(folder / certificate), tls_key=str(folder / key))


async def test_a_client_that_checks_the_certificate(folder: Path) -> None:
    from http_house import CountingMetrics

    front_end = FrontEnd(settings(folder), CountingMetrics(), lambda **numbers: None, Answers())
    runner = make_runner(make_app(front_end))
    await runner.setup()
    await listen(runner, await addresses_of("127.0.0.1", 0), tls=tls_context(front_end.settings))
    port = runner.addresses[0][1]
    try:
        trusting = ssl.create_default_context(cafile=str(folder / "cert.pem"))
        async with aiohttp.ClientSession() as session:
            url = f"https://localhost:{port}/live"
            async with session.get(url, ssl=trusting) as response:
                assert response.status == 200
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get(url)
        old = ssl.create_default_context(cafile=str(folder / "cert.pem"))
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        old.set_ciphers("DEFAULT")
        _, writer = await asyncio.open_connection("localhost", port, ssl=old)
        assert writer.get_extra_info("ssl_object").version() == "TLSv1.2"
        writer.close()
    finally:
        await runner.cleanup()


def test_of_clients_that_come_together_one_without_tls_disturbs_nobody(folder: Path) -> None:
    """On the loop of production: it hands over the first, the others are accepted beside it."""
    from http_house import CountingMetrics

    async def statuses() -> list[bytes]:
        front_end = FrontEnd(settings(folder), CountingMetrics(), lambda **numbers: None, Answers())
        runner = make_runner(make_app(front_end))
        await runner.setup()
        try:
            await listen(runner, await addresses_of("127.0.0.1", 0), tls=tls_context(front_end.settings))
            clients = [socket.create_connection(runner.addresses[0]) for _ in range(4)]
            trusting = ssl.create_default_context(cafile=str(folder / "cert.pem"))
            with clients.pop(1) as plain:
                plain.sendall(b"GET /live HTTP/1.1\r\n\r\n")
                return [await status(client, trusting) for client in clients]
        finally:
            await runner.cleanup()

    async def status(client: socket.socket, trusting: ssl.SSLContext) -> bytes:
        reader, writer = await asyncio.open_connection(sock=client, ssl=trusting, server_hostname="localhost")
        writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer.split(b"\r\n")[0]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        assert loop.run(statuses()) == [b"HTTP/1.1 200 OK"] * 3


def test_without_files_there_is_no_tls() -> None:
    assert tls_context(ApiSettings(version="1")) is None


@pytest.mark.parametrize(("key", "certificate"), [("other.pem", "cert.pem"), ("cert.pem", "key.pem")])
def test_files_that_cannot_be_used(folder: Path, key: str, certificate: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--tls-cert .*cannot be used"):
        tls_context(settings(folder, key, certificate))


@pytest.mark.parametrize(("flag", "name"), [("--tls-cert", "cert.pem"), ("--tls-key", "key.pem")])
def test_a_file_that_is_missing_and_a_pipe_in_its_place(folder: Path, tmp_path: Path, flag: str, name: str) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).unlink()
    with pytest.raises(ConfigurationError, match=f"^{flag} .*{name} cannot be read: No such file or directory$"):
        tls_context(settings(tmp_path))
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigurationError, match=f"^{flag} .*{name} cannot be read: it is no plain file$"):
        tls_context(settings(tmp_path))
