"""llama-index: its client for servers like OpenAI's."""

from __future__ import annotations

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from report import QUESTION, check, need, target

URL, MODEL = target()
llm = OpenAILike(
    model=MODEL,
    api_base=f"{URL}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    max_tokens=16,
    temperature=0.0,
    max_retries=0,
    additional_kwargs={"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
)
MESSAGES = [ChatMessage(role="user", content=QUESTION)]


def chat() -> object:
    whole = str(llm.chat(MESSAGES).message.content)
    streamed = "".join(str(piece.delta) for piece in llm.stream_chat(MESSAGES))
    need(whole == streamed, (whole, streamed))
    return whole


check("chat", chat)
