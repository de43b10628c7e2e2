"""llama-index: its client for servers like OpenAI's, with a forced call."""

from __future__ import annotations

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from report import QUESTION, check, need, target

SERVER = target()
URL, MODEL = SERVER.url, SERVER.model
llm = OpenAILike(
    model=MODEL,
    api_base=f"{URL}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    max_tokens=200,
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


def height(peak: str) -> int:
    """The height of a mountain in metres."""
    return 3967


def tools() -> object:
    tool = FunctionTool.from_defaults(height)
    answer = llm.chat_with_tools([tool], user_msg=QUESTION, tool_required=True, allow_parallel_tool_calls=False)
    (call,) = llm.get_tool_calls_from_response(answer)
    return f"{call.tool_name}({call.tool_kwargs})"


for work in (chat, tools):
    check(work.__name__, work)
