"""`tandem chat`: a conversation. Each turn sends all messages so far; the prefix cache makes that cheap."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from cli import receipt_rendering
from cli.output import sentence
from tandem.client import Client
from tandem.errors import TandemError
from tandem.results import Receipt

HELP = """\
/new            forget the conversation
/system TEXT    set the system message; without TEXT: remove it
/again          another answer to the last question
/model NAME     go on with this model or adapter; without NAME: list them
/receipt        the receipt of the last answer
/quit           end, as Ctrl-D does; Ctrl-C ends an answer"""


@dataclass
class Chat:
    """The messages so far, and what to do with the next line. `write` prints the model's answer, `think` its reasoning,
    `tell` the rest: text, or what rich can print."""

    client: Client
    write: Callable[[str], None]
    think: Callable[[str], None]
    tell: Callable[[Any], None]
    options: dict[str, Any] = field(default_factory=dict)
    system: str = ""
    messages: list[dict[str, str | bytes]] = field(default_factory=list)
    receipt: Receipt | None = None
    failed: bool = False

    def run(self, lines: Iterable[str]) -> bool:
        """Runs until the lines end or one is /quit. Returns whether no line failed."""
        for line in lines:
            if line.strip() == "/quit":
                break
            self.take(line.strip())
        return not self.failed

    def take(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if not line.startswith("/"):
            if line:
                self._ask(line)
        elif command == "/new":
            self.messages.clear()
            self.tell("forgotten")
        elif command == "/system":
            self.system = rest.strip()
            self.tell("system message set" if self.system else "system message removed")
        elif command == "/again":
            self._again()
        elif command == "/model":
            self._choose_model(rest.strip())
        elif command == "/receipt":
            self._show_receipt()
        else:
            self.tell(HELP)

    def _again(self) -> None:
        """Replaces the last answer, unless there is no other one."""
        if not self.messages:
            self.tell("there is no question yet")
            return
        before = self.messages
        self.messages, question = before[:-2], before[-2]["content"]
        assert isinstance(question, str)
        if not self._ask(question):
            self.messages = before

    def _choose_model(self, name: str) -> None:
        """Sets the adapter of the requests, empty for the model itself, and the model if there are several."""
        try:
            chosen = self.client.model_info(self.options.get("model") or "")
            others = [self.client.model_info(one) for one in chosen.models if one != chosen.model]
        except KeyboardInterrupt:
            self.tell("ended")
            return
        except TandemError as error:
            self._tell_failure(error)
            return
        if not name:
            current = self.options.get("adapter") or chosen.model
            names = [known for info in (chosen, *others) for known in (info.model, *info.adapters)]
            self.tell("\n".join(f"{'*' if known == current else ' '} {known}" for known in names))
            return
        for info in (chosen, *others):
            if name in (info.model, *info.adapters):
                self.options["model"] = info.model if others else None
                self.options["adapter"] = None if name == info.model else name
                self.tell(f"{name} answers from now on")
                return
        self.failed = True
        self.tell(f"there is no model {name}; /model lists them")

    def _show_receipt(self) -> None:
        if self.receipt is None:
            self.tell("there is no complete answer yet")
        else:
            self.tell(receipt_rendering.receipt(self.receipt))

    def _ask(self, question: str) -> bool:
        """Streams the answer. A failed question is dropped, and one that Ctrl-C ends before its answer has begun; an
        answer that it ends is kept as it is. Returns whether there is an answer."""
        self.messages.append({"role": "user", "content": question})
        system: list[dict[str, str | bytes]] = [{"role": "system", "content": self.system}] if self.system else []
        answer = reasoning = ""
        try:
            with closing(self.client.stream(messages=[*system, *self.messages], **self.options)) as pieces:
                for piece in pieces:
                    self.think(piece.reasoning)
                    reasoning += piece.reasoning
                    if reasoning and piece.text and not answer:
                        self.think("\n\n")
                    answer += piece.text
                    self.write(piece.text)
                    if piece.receipt:
                        self.receipt = piece.receipt
                        self.write("\n")
                        self.tell(about(piece.receipt))
        except KeyboardInterrupt:
            self.write("\n")
            self.tell("ended" if answer else "ended before the answer began")
            if not answer:
                self.messages.pop()
                return False
        except TandemError as error:
            self.messages.pop()
            self._tell_failure(error)
            return False
        self.messages.append({"role": "assistant", "content": answer})
        return True

    def _tell_failure(self, error: TandemError) -> None:
        self.failed = True
        self.tell(f"error: {sentence(error)}")


def about(receipt: Receipt) -> str:
    """One line about an answer."""
    ttft = receipt.client_ttft if receipt.client_ttft is not None else receipt.ttft
    parts = [f"{receipt.completion_tokens} tokens", f"the first after {ttft:.2f} s"]
    if receipt.tpot:
        parts.append(f"{1 / receipt.tpot:.0f} a second")
    if receipt.cached_tokens:
        parts.append(f"{receipt.cached_tokens / receipt.prompt_tokens:.0%} of the prompt was cached")
    where = f"{receipt.prefill_worker} → {receipt.decode_worker}" if receipt.prefill_worker else receipt.decode_worker
    return ", ".join([*parts, where])


def converse(chat: Chat) -> bool:
    """The conversation that is typed, or comes through a pipe. Returns whether all was answered; on a terminal, the
    person has seen it."""
    return chat.run(typed()) or sys.stdin.isatty()


def typed(prompt: str = "> ") -> Iterator[str]:
    """Lines from a terminal, with editing and history, or from a pipe."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with suppress(ImportError):
        import readline  # noqa: F401  input() edits lines with it
    while True:
        try:
            yield input(prompt)
        except KeyboardInterrupt:  # the line is discarded, as in a shell
            print()
        except EOFError:
            print()
            return
