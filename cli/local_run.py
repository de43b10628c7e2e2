"""`tandem run MODEL [PROMPT]`: a cluster for one question, or for one conversation."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cli.chat import Chat, converse
from cli.output import tell, write, write_dim
from cluster.local_cluster import LocalCluster
from tandem.client import Client
from tandem.settings import load
from tandem.telemetry import logs


def run(model: str, prompt: str, options: dict[str, Any]) -> bool:
    """Answers the prompt on stdout; without one every line of stdin is a turn of a conversation. Returns whether the
    lines of a pipe were all answered. Raises TandemError, also if the cluster does not start."""
    settings = load(model=model, port=0)
    logs.configure(settings, "run")
    with sigterm_interrupts(), LocalCluster(settings, lambda line: print(line, file=sys.stderr)) as cluster:
        with Client(cluster.target) as client:
            if not prompt:
                tell(f"{client.model_info().model}; /help says what a line can be, Ctrl-D ends")
                return converse(Chat(client, write, write_dim, tell, options))
            if client.model_info().has_chat_template:
                _show(client, messages=[{"role": "user", "content": prompt}], **options)
            else:
                _show(client, prompt, **options)
            return True


def _show(client: Client, *prompt: str, **options: Any) -> None:
    for piece in client.stream(*prompt, **options):
        write_dim(piece.reasoning)
        write(piece.text)
    write("\n")


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM stops the cluster as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
