"""The gRPC front door: GenerationService."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import grpc

from services.router.generation import Generation
from services.router.preprocess.served_model import ServedModel
from services.router.preprocess.tokenizer import Tokenizer
from tandem.settings import Settings
from tandem.v1 import generation_pb2, generation_pb2_grpc


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, settings: Settings, generation: Generation, model: ServedModel, tokenizer: Tokenizer) -> None:
        self._settings = settings
        self._generation = generation
        self._model = model
        self._tokenizer = tokenizer

    def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        return self._generation.generate(
            request,
            context.time_remaining(),
            authorization=authorization(context),
            headers=context.invocation_metadata,
        )

    async def GetModelInfo(
        self, request: generation_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.GetModelInfoResponse:
        facts = self._model.facts()
        return generation_pb2.GetModelInfoResponse(
            model=self._settings.model_names[0],
            max_context_tokens=facts.context,
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            has_tokenizer=self._tokenizer.backend is not None,
            has_chat_template=self._tokenizer.template is not None,
            adapters=list(facts.adapters),
        )


def authorization(context: grpc.aio.ServicerContext) -> str | None:
    """The header that holds the caller's key."""
    value = dict(context.invocation_metadata() or ()).get("authorization")
    return value if isinstance(value, str) else None
