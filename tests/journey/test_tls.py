"""Encrypted calls: at the router, with and without client certificates, and inside the cluster."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx2
import pytest
from pydantic import SecretStr

from loadtest.harness import certificates
from services import launch
from services.cluster_credentials import to_workers
from services.grpc_server import Channels
from tandem.async_client import AsyncClient
from tandem.errors import InvalidRequest, SettingsError, Unavailable
from tandem.rpc.channel import Tls
from tandem.settings import Settings, load
from tandem.v1 import prefill_pb2, prefill_pb2_grpc
from tests.support import oracle
from tests.support.waiting import until


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities, ours and a stranger's, each with a certificate for this machine, the cluster and a client."""
    return certificates.make(tmp_path_factory.mktemp("pems"), "ours", "strange")


def router(pems: Path, **more: Any) -> dict[str, Any]:
    return {"tls_cert": pems / "ours-router.pem", "tls_key": pems / "ours-router.key", **more}


def inner(pems: Path, authority: str = "ours") -> dict[str, Any]:
    names = {"cluster_cert": f"{authority}-cluster.pem", "cluster_key": f"{authority}-cluster.key"}
    return {name: pems / file for name, file in names.items()} | {"cluster_ca": pems / f"{authority}.pem"}


async def served(cluster: Any, tls: Tls | None, prompt: list[int]) -> list[int]:
    async with AsyncClient(cluster.router.address, tls=tls) as client:
        return (await client.generate(prompt, max_tokens=4, ignore_eos=True, timeout=60)).token_ids


async def test_a_client_knows_the_router_by_its_certificate(inside: Any, tiny: Path, pems: Path) -> None:
    """Over gRPC and HTTP, a client that trusts another authority, or does not encrypt, cannot connect."""
    prompt = oracle.prompts(tiny, [30])[0]
    async with inside(**router(pems), http_port=0) as cluster:
        assert await served(cluster, Tls(pems / "ours.pem"), prompt) == oracle.greedy(tiny, prompt, 4)
        for wrong in (Tls(), Tls(pems / "strange.pem")):
            with pytest.raises(Unavailable):
                await served(cluster, wrong, prompt)
        url = f"https://{cluster.router.http.address}/v1/models"
        async with httpx2.AsyncClient(verify=ssl.create_default_context(cafile=pems / "ours.pem")) as http:
            assert (await http.get(url)).status_code == 200
        async with httpx2.AsyncClient(verify=ssl.create_default_context(cafile=pems / "strange.pem")) as http:
            with pytest.raises(httpx2.ConnectError):
                await http.get(url)


async def test_a_router_may_ask_for_a_certificate(inside: Any, tiny: Path, pems: Path) -> None:
    """No certificate, or a stranger's, is refused over gRPC and HTTP."""
    prompt, ours = oracle.prompts(tiny, [30])[0], pems / "ours.pem"

    def client(authority: str) -> tuple[Path, Path]:
        return pems / f"{authority}-client.pem", pems / f"{authority}-client.key"

    async with inside(**router(pems, tls_client_ca=ours), http_port=0) as cluster:
        assert await served(cluster, Tls(ours, *client("ours")), prompt) == oracle.greedy(tiny, prompt, 4)
        for wrong in (Tls(ours), Tls(ours, *client("strange"))):
            with pytest.raises(Unavailable):
                await served(cluster, wrong, prompt)
        url = f"https://{cluster.router.http.address}/v1/models"
        for authority, welcome in (("ours", True), ("strange", False)):
            context = ssl.create_default_context(cafile=ours)
            context.load_cert_chain(*client(authority))
            async with httpx2.AsyncClient(verify=context) as http:
                if welcome:
                    assert (await http.get(url)).status_code == 200
                else:
                    with pytest.raises(httpx2.TransportError):
                        await http.get(url)


async def test_inside_nobody_is_answered_without_a_certificate(inside: Any, tiny: Path, pems: Path) -> None:
    """The router and the decode worker present theirs, and requests cross both pools; strangers reach no handler."""
    prompt = oracle.prompts(tiny, [30])[0]
    async with inside(**inner(pems)) as cluster:
        done = await cluster.client.generate(prompt, max_tokens=8, ignore_eos=True)
        assert done.token_ids == oracle.greedy(tiny, prompt, 8)
        assert done.receipt.path == "disaggregated"
        shown = {
            "ours": Channels(None, to_workers(cluster.settings)),
            "strange": Channels(None, to_workers(Settings(model="m", **inner(pems, "strange")))),
            "nothing": Channels(),
        }
        for name, channels in shown.items():
            stub = prefill_pb2_grpc.PrefillServiceStub(channels.to(cluster.workers["prefill-0"].address))
            if name == "ours":
                assert (await stub.GetPeer(prefill_pb2.GetPeerRequest(), timeout=30)).layout_json
            else:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.GetPeer(prefill_pb2.GetPeerRequest(), timeout=30)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            await channels.close()


@pytest.mark.parametrize("change", ["certificates", "token"])
async def test_a_router_that_reaches_no_worker_is_not_ready(inside: Any, pems: Path, change: str) -> None:
    """As in an upgrade that switches encryption on, or changes the token: the former routers serve until a worker is
    there that this one reaches, whose later loss does not count. The control is the router beside it, which has the
    workers' settings."""
    async with inside(prefill=0, cluster_token=SecretStr("a-token-of-24-characters")) as cluster:
        await until(cluster.router._ready)
        token = {"cluster_token": SecretStr("b-token-of-24-characters")}
        changed = cluster.settings.model_copy(update=inner(pems) if change == "certificates" else token)
        router: Any = await launch.start("router", changed, "router-1")
        try:
            await until(router.models.ready)
            await asyncio.sleep(1.0)
            assert not router._ready()
            worker: Any = await launch.start("decode", changed, "decode-1")
            await until(router._ready)
            await worker.stop(0.0)
            assert router._ready()
        finally:
            await router.stop(0.0)


def test_half_of_a_pair_is_refused(pems: Path) -> None:
    """Settings and clients report which part is missing; a missing file is named."""
    with pytest.raises(SettingsError) as refused:
        load(model="m", tls_cert=pems / "ours-router.pem")
    assert refused.value.field == "tls_key"
    with pytest.raises(SettingsError) as refused:
        load(model="m", cluster_cert=pems / "ours-cluster.pem", cluster_key=pems / "ours-cluster.key")
    assert refused.value.field == "cluster_ca"
    with pytest.raises(SettingsError):
        load(model="m", tls_client_ca=pems / "ours.pem")
    with pytest.raises(SettingsError, match="no-such"):
        to_workers(Settings(model="m", **inner(pems) | {"cluster_ca": pems / "no-such.pem"}))
    with pytest.raises(InvalidRequest):
        AsyncClient("localhost:1", tls=Tls(pems / "ours.pem", pems / "ours-client.pem"))
