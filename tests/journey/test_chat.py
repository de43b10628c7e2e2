"""`tandem chat` sends the earlier turns, forgets them on request, and survives errors in a turn."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli.chat import HELP, Chat
from tandem.client import Client
from tandem.errors import Busy, Unavailable
from tandem.results import Piece

DEMO = str(Path(__file__).parents[2] / "demo/model")


class Told:
    """A client that answers with the number of messages that it received, and stores them."""

    def __init__(self) -> None:
        self.asked: list[list[Any]] = []
        self.adapters: list[str | None] = []
        self.fails: BaseException | None = None
        self.says = True

    def model_info(self, model: str = "") -> Any:
        return SimpleNamespace(model="base", models=["base"], adapters=["sql", "law"])

    def stream(self, messages: list[Any], **options: Any) -> Any:
        self.asked.append([message["content"] for message in messages])
        self.adapters.append(options.get("adapter"))

        def pieces() -> Any:
            if self.says:
                yield Piece(f"answer {len(self.asked)}", [1])
            if self.fails:
                raise self.fails

        return pieces()


@pytest.fixture
def chat() -> Chat:
    client: Any = Told()
    told: list[Any] = []
    return Chat(client, lambda text: None, lambda text: None, told.append)


def asked(chat: Chat) -> list[Any]:
    client: Any = chat.client
    return list(client.asked[-1])


def test_each_turn_has_all_that_was_said(chat: Chat) -> None:
    """The turns are kept until /new; /system comes first and is no turn; an empty line does nothing."""
    chat.run(["one\n", "\n", "two\n"])
    assert asked(chat) == ["one", "answer 1", "two"]
    chat.run(["/system Be brief.\n", "three"])
    assert asked(chat) == ["Be brief.", "one", "answer 1", "two", "answer 2", "three"]
    chat.run(["/new", "/system", "four", "/quit", "five"])
    assert asked(chat) == ["four"]


def test_again_asks_the_last_question_once_more(chat: Chat) -> None:
    """The former answer is forgotten."""
    chat.run(["/again", "one", "two", "/again"])
    assert asked(chat) == ["one", "answer 1", "two"]
    assert len(chat.messages) == 4


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("fails", [Busy("the queue is full"), KeyboardInterrupt()])
def test_another_answer_that_does_not_come_leaves_the_first(chat: Chat, fails: BaseException, says: bool) -> None:
    """The next /again asks the same question again. The control: what Ctrl-C ends after it has begun is the answer."""
    client: Any = chat.client
    chat.run(["one", "two"])
    client.fails, client.says = fails, says
    chat.run(["/again"])
    answer = "answer 3" if says and isinstance(fails, KeyboardInterrupt) else "answer 2"
    assert [message["content"] for message in chat.messages] == ["one", "answer 1", "two", answer]
    client.fails, client.says = None, True
    chat.run(["/again"])
    assert asked(chat) == ["one", "answer 1", "two"]
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2


def test_a_question_that_is_ended_before_its_answer_is_no_part_of_the_chat(chat: Chat) -> None:
    """Templates refuse an assistant's message without content, or two questions in a row."""
    client: Any = chat.client
    client.fails, client.says = KeyboardInterrupt(), False
    chat.run(["one"])
    assert chat.messages == []
    client.fails, client.says = None, True
    chat.run(["two"])
    assert asked(chat) == ["two"]


def test_what_goes_wrong_in_a_turn_ends_no_chat(chat: Chat) -> None:
    """After an error, the question is not part of the chat; after Ctrl-C, the beginning of the answer is."""
    client: Any = chat.client
    told: Any = chat.tell
    client.fails = Unavailable("nobody is there")
    chat.run(["lost"])
    assert chat.messages == []
    assert "nobody is there" in told.__self__[-1]
    client.fails = KeyboardInterrupt()
    chat.run(["one"])
    client.fails = None
    chat.run(["two", "/what"])
    assert asked(chat) == ["one", "answer 2", "two"]
    assert told.__self__[-1] == HELP


@pytest.mark.parametrize("fails", [Unavailable("nobody is there"), KeyboardInterrupt()])
def test_a_list_of_models_that_does_not_come_ends_no_chat(chat: Chat, fails: BaseException) -> None:
    """The next turn has all that was said before, also after Ctrl-C."""
    client: Any = chat.client

    def gone(model: str = "") -> Any:
        raise fails

    client.model_info = gone
    chat.run(["one", "/model", "/model sql", "two"])
    assert asked(chat) == ["one", "answer 1", "two"]


def test_a_model_that_does_not_exist_fails_the_line(chat: Chat) -> None:
    """The lines behind it in a pipe go to another model than they were meant for, so the exit code tells of it. The
    control: a known name, and the list of them, fail nothing."""
    assert chat.run(["/model sql", "/model", "one"])
    assert not chat.run(["/model cobol", "two"])


def test_a_turn_goes_to_the_model_that_was_chosen(chat: Chat) -> None:
    """A turn goes to an adapter by its name, or to the model itself; an unknown name changes nothing."""
    client: Any = chat.client
    told: Any = chat.tell
    chat.run(["one", "/model sql", "two", "/model cobol", "three", "/model", "/model base", "four"])
    assert client.adapters == [None, "sql", "sql", None]
    assert told.__self__[-2] == "  base\n* sql\n  law"


async def test_a_conversation_with_a_cluster(inside: Any) -> None:
    """The second turn finds the first one cached, and its line says so."""
    async with inside(model=DEMO, kv_blocks=1024) as cluster:
        said: list[str] = []
        told: list[Any] = []

        def talk() -> None:
            with Client(cluster.router.address) as client:
                Chat(client, said.append, said.append, told.append, {"max_tokens": 12}).run(
                    ["Once upon a time", "And then?"]
                )

        await asyncio.to_thread(talk)
        assert "".join(said).strip()
        assert "% of the prompt was cached" in told[-1]
        assert "prefill-0 → decode-0" in told[-1]
