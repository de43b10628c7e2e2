"""A worker serves only its own cluster: a call without the token is refused, and nothing is reserved for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from pydantic import SecretStr

from services import cluster_credentials
from services.grpc_server import Channels
from tandem.errors import SettingsError, Unauthenticated
from tandem.grpc_errors import WRITE_FAILED, from_rpc
from tandem.settings import Settings, load
from tandem.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.journey.conftest import both_transports
from tests.support import oracle

TOKEN, OTHER = SecretStr("a-token-of-24-characters"), SecretStr("b-token-of-24-characters")


def calls(decode: Any, prefill: Any, prompt: list[int]) -> dict[str, Callable[[], Any]]:
    """Begins one call of each kind that a worker answers, with the content that a stranger who knows the protocol would
    send."""
    asked = decode_pb2.DecodeRequest(
        request_id="r",
        attempt=1,
        token_ids=prompt,
        prompt_tokens=len(prompt),
        max_tokens=4,
        sampling={"top_p": 1.0},
        feed_id="f",
    )
    return {
        "decode": lambda: decode_pb2_grpc.DecodeServiceStub(decode).Decode(asked),
        "feed": lambda: decode_pb2_grpc.DecodeServiceStub(decode).Feed(decode_pb2.FeedRequest(feed_id="f")),
        "peer": lambda: prefill_pb2_grpc.PrefillServiceStub(prefill).GetPeer(prefill_pb2.GetPeerRequest()),
        "link": lambda: prefill_pb2_grpc.PrefillServiceStub(prefill).Link(iter([prefill_pb2.LinkRequest()])),
        "cache": lambda: worker_pb2_grpc.WorkerServiceStub(prefill).WatchCache(worker_pb2.WatchCacheRequest()),
    }


TRIES = 5  # one of a thousand calls under load ends before its first request is written, which hides its status


async def first(begin: Callable[[], Any]) -> Any:
    """The first answer of a call.

    Raises:
        grpc.aio.AioRpcError: the status with which the worker ended it.
    """
    for tries_left in reversed(range(TRIES)):
        call = begin()
        try:
            return await (call.read() if hasattr(call, "read") else call)
        except grpc.aio.AioRpcError as error:
            if error.details() != WRITE_FAILED or not tries_left:
                raise
        finally:
            call.cancel()
    raise AssertionError("unreachable")


async def refusals(cluster: Any, token: SecretStr | None, prompt: list[int]) -> dict[str, bool]:
    """For each kind of call, whether it was refused because of the token."""
    channels, found = Channels(token), {}
    decode = channels.to(cluster.workers["decode-0"].address)
    prefill = channels.to(cluster.workers["prefill-0"].address)
    for name, begin in calls(decode, prefill, prompt).items():
        try:
            answer = await first(begin)
            assert answer is not grpc.aio.EOF
            found[name] = False
        except grpc.aio.AioRpcError as error:
            failed = from_rpc(error)
            if not isinstance(failed, Unauthenticated) and failed.reason != "FEED_LOST" and name != "link":
                raise  # raised after the guard
            found[name] = isinstance(failed, Unauthenticated)
    await channels.close()
    return found


@both_transports
async def test_only_the_cluster_itself_is_served(inside: Any, tiny: Path) -> None:
    """Without the token, or with another one, every call is refused; requests through the router are served."""
    prompt = oracle.prompts(tiny, [30])[0]
    async with inside(cluster_token=TOKEN) as cluster:
        done = await cluster.client.generate(prompt, max_tokens=8, ignore_eos=True)
        assert done.token_ids == oracle.greedy(tiny, prompt, 8)
        assert done.receipt.path == "disaggregated"
        for token in (None, OTHER):
            refused = await refusals(cluster, token, prompt)
            assert all(refused.values()), refused
        assert set((await refusals(cluster, TOKEN, prompt)).values()) == {False}
        await cluster.freed()
        assert (await cluster.client.audit()).balanced
        assert not any(
            task.done() for task in cluster.router._following
        )  # which connects to workers before a request needs them


async def test_control_without_a_token_a_stranger_is_served(inside: Any, tiny: Path) -> None:
    """Control: the token causes the refusals above."""
    prompt = oracle.prompts(tiny, [30])[0]
    async with inside() as cluster:
        assert set((await refusals(cluster, None, prompt)).values()) == {False}


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_worker_with_another_token_fails_no_request(inside: Any, tiny: Path, role: str) -> None:
    """As while the token is changed: the client's key is right, and other workers serve."""
    prompt = oracle.prompts(tiny, [30])[0]
    async with inside(cluster_token=TOKEN) as cluster:
        cluster.settings = cluster.settings.model_copy(update={"cluster_token": OTHER})
        await cluster.start_worker(f"{role}-1")
        await cluster.seen(3)
        asked = (cluster.client.generate(prompt, max_tokens=8, ignore_eos=True) for _ in range(4))
        answers = await asyncio.gather(*asked)
        assert [one.token_ids for one in answers] == [oracle.greedy(tiny, prompt, 8)] * 4
        assert {getattr(one.receipt, f"{role}_worker") for one in answers} == {f"{role}-0"}


def test_a_worker_in_a_network_needs_a_token() -> None:
    """It must also have the address at which others call it."""
    assert cluster_credentials.guard(Settings(model="m")) is None
    with pytest.raises(SettingsError) as refused:
        cluster_credentials.guard(Settings(model="m", host="0.0.0.0"))
    assert refused.value.field == "cluster_token"
    assert cluster_credentials.guard(Settings(model="m", host="0.0.0.0", cluster_token=TOKEN))


async def test_who_listens_everywhere_says_where_to_call(inside: Any, tiny: Path) -> None:
    """The registry holds the address for others; a wildcard is refused before the worker listens."""
    prompt = oracle.prompts(tiny, [30])[0]
    everywhere = {"host": "0.0.0.0", "cluster_token": TOKEN}
    with pytest.raises(SettingsError, match="all addresses"):
        async with inside(**everywhere):
            pass
    async with inside(**everywhere, advertise_host="127.0.0.1") as cluster:
        assert cluster.workers["decode-0"].address.startswith("127.0.0.1:")
        done = await cluster.client.generate(prompt, max_tokens=8, ignore_eos=True)
        assert done.token_ids == oracle.greedy(tiny, prompt, 8)


def test_a_token_is_long_and_never_shown() -> None:
    """An empty token would admit every caller; none appears in the settings as people and logs see them."""
    for short in ("", "too-short"):
        with pytest.raises(SettingsError, match="cluster_token") as refused:
            load(model="m", cluster_token=short)
        assert not short or short not in f"{refused.value.message} {refused.value.__cause__}"
    settings = load(model="m", cluster_token=TOKEN)
    assert TOKEN.get_secret_value() not in f"{settings!r} {settings}"
