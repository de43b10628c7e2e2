"""Builds Requests on threads, so that a long prompt does not block the event loop."""

from __future__ import annotations

from services.router.preprocess.offload import MEDIUM_BYTES, SHORT_BYTES, Offload
from services.router.preprocess.request import DEFAULT_MAX_TOKENS, Request, build_request
from services.router.preprocess.served_model import ServedModel
from services.router.preprocess.tokenizer import Tokenizer
from tandem.errors import NoWorker
from tandem.v1 import generation_pb2


class Preprocessor:
    def __init__(self, tokenizer: Tokenizer, model: ServedModel, offload: Offload) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._offload = offload

    async def build(
        self,
        message: generation_pb2.GenerateRequest,
        tenant: str,
        default_max_tokens: int = DEFAULT_MAX_TOKENS,
        *,
        fixed: bool = False,
    ) -> Request:
        """`fixed`: the router made the message itself, from a request that it had validated. Raises InvalidRequest,
        NotFound, NoWorker, and Busy when no thread came free."""
        try:
            facts = self._model.facts()
        except NoWorker:  # the first worker may have started a moment ago, and the view does not have it yet
            await self._model.refresh()
            facts = self._model.facts()
        about = message, self._tokenizer, facts, default_max_tokens, fixed
        size = message.ByteSize()
        if message.chat.template:  # a program, which may run for long whatever its size
            size = max(size, MEDIUM_BYTES + 1)
        elif message.sampling.HasField("grammar") or message.chat.HasField("tool_choice"):  # of schemas; likewise
            size = max(size, SHORT_BYTES + 1)
        return await self._offload.run(tenant, size, build_request, *about)
