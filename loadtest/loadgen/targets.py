"""Servers as a load client uses them: a prompt goes in, messages with tokens come out, over gRPC or OpenAI's HTTP API.

Only this file imports aiohttp.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import aiohttp

from tandem.async_client import AsyncClient
from tandem.errors import Busy, Unavailable
from tandem.results import Receipt

CONNECT_TIMEOUT_S = 10.0
EVENT, DONE = b"data:", b"[DONE]"


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a stream. `total`: the number of all tokens, if the server reports it at the end."""

    tokens: int
    total: int | None = None
    receipt: Receipt | None = None


class Target(ABC):
    """One server. Use it as `async with`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.model = ""
        self.context: int | None = None
        """Tokens of the longest request, where the server says so."""

    @abstractmethod
    async def open(self) -> None:
        """Asks for the model. Raises TandemError."""

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def stream(self, prompt: Sequence[int], output: int) -> AsyncGenerator[Message, None]:
        """Greedy sampling without an end at an end-of-sequence token. The request is built at once, and sent when the
        first message is requested. Raises Busy when the server rejects it, another TandemError when it fails."""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Grpc(Target):
    """A router of Tandem. `TANDEM_API_KEY` and `TANDEM_TLS_CA` mean what they mean to any client."""

    async def open(self) -> None:
        self._client = AsyncClient(self.address)
        info = await self._client.model_info()
        self.model, self.context = info.model, info.max_context_tokens

    async def close(self) -> None:
        await self._client.close()

    def stream(self, prompt: Sequence[int], output: int) -> AsyncGenerator[Message, None]:
        pieces = self._client.stream(prompt, max_tokens=output, ignore_eos=True, temperature=0.0)
        return self._messages(pieces)

    async def _messages(self, pieces: AsyncGenerator[Any, None]) -> AsyncGenerator[Message, None]:
        async for piece in pieces:
            yield Message(len(piece.token_ids), receipt=piece.receipt)


class Http(Target):
    """Any server with OpenAI's streaming completions that takes token ids for a prompt. `OPENAI_API_KEY` is sent.

    Where it names the token ids of a message (`return_token_ids`, as vLLM and Tandem do), they are counted. Elsewhere a
    message with text is one token, and the usage at the end says how many there were in all.
    """

    def __init__(self, address: str, model: str = "") -> None:
        super().__init__(address.rstrip("/").removesuffix("/v1"))
        self._wanted = model

    async def open(self) -> None:
        key = os.environ.get("OPENAI_API_KEY")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),  # the load determines the end
            headers={"authorization": f"Bearer {key}"} if key else {},
            read_bufsize=2**20,
        )
        try:
            timeout = aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S)
            async with self._session.get(f"{self.address}/v1/models", timeout=timeout) as answer:
                if answer.status == 404 and self._wanted:  # it does not say what it serves
                    self.model = self._wanted
                    return
                if answer.status != 200:
                    raise await _error(answer)
                models = (await answer.json())["data"]
            chosen = next((entry for entry in models if entry["id"] == (self._wanted or entry["id"])), None)
            if chosen is None and self._wanted:  # it may be listed under its first name only
                async with self._session.get(
                    f"{self.address}/v1/models/{quote(self._wanted)}", timeout=timeout
                ) as answer:
                    chosen = await answer.json() if answer.status == 200 else None
            if chosen is None:
                raise Unavailable(f"{self.address} serves no {self._wanted or 'model'}")
            self.model, self.context = chosen["id"], chosen.get("max_model_len")
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            await self._session.close()
            raise Unavailable(f"{self.address} does not answer as an OpenAI server does: {error!r}") from error
        except BaseException:
            await self._session.close()
            raise

    async def close(self) -> None:
        await self._session.close()

    def stream(self, prompt: Sequence[int], output: int) -> AsyncGenerator[Message, None]:
        body = {
            **{"model": self.model, "prompt": list(prompt), "max_tokens": output, "temperature": 0, "stream": True},
            **{"ignore_eos": True, "return_token_ids": True, "stream_options": {"include_usage": True}},
        }
        return self._messages(json.dumps(body).encode())

    async def _messages(self, body: bytes) -> AsyncGenerator[Message, None]:
        headers = {"content-type": "application/json"}
        try:
            async with self._session.post(f"{self.address}/v1/completions", data=body, headers=headers) as answer:
                if answer.status != 200:
                    raise await _error(answer)
                async for line in answer.content:
                    if not line.startswith(EVENT):
                        continue
                    data = line.removeprefix(EVENT).strip()
                    if data == DONE:
                        return
                    if (message := read_event(data)) is not None:
                        yield message
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Unavailable(f"{self.address} hung up: {error!r}") from error
        raise Unavailable(f"{self.address} ended the stream early")


def read_event(data: bytes) -> Message | None:
    """Parses one event of a stream; None if it has no tokens. Raises Unavailable for an error."""
    event = json.loads(data)
    if "choices" not in event:
        raise Unavailable(f"the server broke off: {data.decode(errors='replace')[:2000]}")
    total = (event.get("usage") or {}).get("completion_tokens")
    for choice in event["choices"]:
        ids = choice.get("token_ids")
        tokens = len(ids) if ids is not None else int(bool(choice.get("text")))
        return Message(tokens, total)
    return Message(0, total) if total is not None else None


async def _error(answer: aiohttp.ClientResponse) -> Busy | Unavailable:
    message = f"{answer.url.host}:{answer.url.port} answered {answer.status}: {(await answer.text())[:2000]}"
    if answer.status != 429:
        return Unavailable(message)
    after = answer.headers.get("retry-after", "")
    return Busy(message, retry_after=float(after) if after.isdecimal() else None)


def target(address: str, model: str = "") -> Target:
    """http:// and https:// are OpenAI servers; HOST:PORT, with or without grpc://, is a router of Tandem."""
    if address.startswith(("http://", "https://")):
        return Http(address, model)
    return Grpc(address.removeprefix("grpc://"))
