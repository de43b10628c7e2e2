"""With a file of keys, no request gets a token or information about the cluster without a permitted key."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
import grpc.aio
import httpx2
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.router.tenancy import api_keys
from services.router.tenancy.api_keys import ApiKeys
from tandem.async_client import AsyncClient
from tandem.errors import PermissionDenied, SettingsError, Unauthenticated

USER, ADMIN = "user-key-0123456789", "admin-key-0123456789"
SCRAPER = "scraper-key-0123456789"
FILE = f"# who may\nanna {USER}\nops {ADMIN} admin  # scales\nprometheus {SCRAPER} metrics\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(FILE)
    return path


async def test_each_key_may_what_the_file_says(inside: Any, file: Path) -> None:
    """No key, a wrong one, a user's and an admin's, over gRPC and HTTP; a health check needs none."""
    model = str(Path(__file__).parents[2] / "demo/model")
    async with inside(model=model, http_port=0, kv_blocks=1024, api_keys=file) as cluster:
        target, url = cluster.router.address, f"http://{cluster.router.http.address}"
        for key in ("", "wrong-key-0123456789", USER[:-1], USER + "x"):
            async with AsyncClient(target, api_key=key) as client:
                with pytest.raises(Unauthenticated):
                    await client.generate("x", max_tokens=1)
                with pytest.raises(Unauthenticated):
                    await client.workers()
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key or "none", max_retries=0) as http:
                with pytest.raises(openai.AuthenticationError):
                    await http.completions.create(model="", prompt="x", max_tokens=1)
        async with AsyncClient(target, api_key=USER) as client:
            done = await client.generate("x", max_tokens=1, ignore_eos=True)
            assert len(done.token_ids) == 1
            with pytest.raises(PermissionDenied):
                await client.scale(decode=2)
        async with AsyncClient(target, api_key=ADMIN) as client:
            assert {worker.worker_id for worker in await client.workers()} >= {"decode-0"}
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=USER, max_retries=0) as http:
            answer = await http.completions.create(model="", prompt="x", max_tokens=1)
            assert answer.usage.completion_tokens == 1
        async with httpx2.AsyncClient(base_url=url) as raw:
            for path in ("/v1/models", "/nothing"):
                refused = await raw.get(path)
                assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
                assert refused.json()["error"]["param"] == "authorization"
            assert (await raw.get("/health")).status_code == 200
            for key, status in ((USER, 403), (SCRAPER, 200), (ADMIN, 200)):
                bearer = {"authorization": f"Bearer {key}"}
                for path in ("/metrics", "/metrics%0A"):  # a line end after it leads to the same endpoint
                    assert (await raw.get(path, headers=bearer)).status_code == status
                assert (await raw.get("/v1/models", headers=bearer)).status_code == 200
            assert (await raw.get("/metrics")).status_code == 401
            assert (await raw.get("/v1/models", headers={"authorization": f"Basic {USER}"})).status_code == 401
        async with grpc.aio.insecure_channel(target) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert (await check).status == health_pb2.HealthCheckResponse.SERVING


async def test_control_without_the_setting_nobody_is_asked(inside: Any) -> None:
    """Control: the keys cause the refusals above."""
    async with inside() as cluster, AsyncClient(cluster.router.address, api_key="") as client:
        assert (await client.generate([1, 2], max_tokens=1, ignore_eos=True)).token_ids
        assert await client.workers()


def test_a_changed_file_counts_and_a_broken_one_does_not(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removed key is refused, a new one is accepted; a file that cannot be parsed changes nothing."""
    monkeypatch.setattr(api_keys, "RECHECK_S", 0.0)
    monkeypatch.setattr(api_keys, "MAX_LOOK_S", 30.0)
    known = ApiKeys(file)
    assert known.check(f"Bearer {USER}").name == "anna"
    file.write_text("ben another-key-0123456789\n")
    with pytest.raises(Unauthenticated):
        known.check(f"Bearer {USER}")
    assert known.check("bearer another-key-0123456789").name == "ben"
    for broken in ("", "ben\n", "ben short\n"):
        file.write_text(broken)
        assert known.check("Bearer another-key-0123456789").name == "ben"
    file.unlink()
    assert known.check("Bearer another-key-0123456789").name == "ben"
    other = file.with_name("other")
    other.write_text(FILE)
    os.replace(other, file)
    assert known.check(f"Bearer {ADMIN}", admin=True).name == "ops"


def test_a_file_system_that_hangs_holds_up_no_request(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The known keys count until the file can be read again."""
    monkeypatch.setattr(api_keys, "RECHECK_S", 0.0)
    known, over, look = ApiKeys(file), threading.Event(), api_keys._version
    file.write_text("ben another-key-0123456789\n")
    monkeypatch.setattr(api_keys, "_version", lambda path: look(path) if over.wait(60) else None)
    for _ in range(100):
        began = monotonic()
        assert known.check(f"Bearer {USER}").name == "anna"
        assert monotonic() - began < 30
    over.set()
    monkeypatch.setattr(api_keys, "MAX_LOOK_S", 30.0)
    assert known._looking
    known._looking.result(30)
    assert known.check("Bearer another-key-0123456789").name == "ben"


@pytest.mark.parametrize(
    "text",
    ["", "# none\n", "anna\n", "anna short\n", f"anna {USER} root\n", f"an/na {USER}\n", f"a {USER}\nb {USER}\n"],
)
def test_a_file_that_means_nothing_is_refused_at_the_start(file: Path, text: str) -> None:
    """It is refused before the router listens. The message names the place, and never a key."""
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        ApiKeys(file)
    assert caught.value.field == "api_keys"
    assert USER not in caught.value.message
    file.unlink()
    with pytest.raises(SettingsError):
        ApiKeys(file)
