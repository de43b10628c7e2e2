"""The gRPC front door: GenerationService."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import grpc

from services.router.models import Models
from tandem.v1 import generation_pb2, generation_pb2_grpc


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, models: Models) -> None:
        self._models = models

    def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        return self._models.named(request.model).generation.generate(
            request,
            context.time_remaining(),
            authorization=authorization(context),
            headers=context.invocation_metadata,
        )

    async def GetModelInfo(
        self, request: generation_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.GetModelInfoResponse:
        model = self._models.named(request.model) if request.model else self._models.first
        facts = model.served.facts()
        return generation_pb2.GetModelInfoResponse(
            model=model.names[0],
            max_context_tokens=facts.context,
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            has_tokenizer=model.tokenizer.backend is not None,
            has_chat_template=model.tokenizer.template is not None,
            adapters=list(facts.adapters),
            models=[one.names[0] for one in self._models],
        )


def authorization(context: grpc.aio.ServicerContext) -> str | None:
    """The header that holds the caller's key."""
    value = dict(context.invocation_metadata() or ()).get("authorization")
    return value if isinstance(value, str) else None
