"""What reads a stranger's bytes before anything is reserved, each as a function that raises only for a bug.

    python -m tests.support.guided admit|openai|calls|keys|settings [-runs=1000000] [FOLDER of inputs that were of use]

looks for such a bug with atheris, which changes inputs so that other lines are reached. tests/router/test_guided.py
takes a few inputs of chance.
"""

from __future__ import annotations

import atexit
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from services.router.answer.call_formats.registry import NAMES, reader_of
from services.router.answer.parts import CallBegin, Part, joined
from services.router.frontend.openai import openai_errors, openai_protocol
from services.router.preprocess.request import build_request as admitted
from services.router.preprocess.sampling_defaults import Defaults
from services.router.preprocess.served_model import ModelFacts
from services.router.preprocess.tokenizer import Tokenizer
from services.router.tenancy import api_keys
from tandem.errors import SettingsError, TandemError
from tandem.settings import Settings, load
from tandem.v1 import generation_pb2
from tests.support.fuzz import GOOD, TEMPLATE

DEMO = Path(__file__).parents[2] / "demo/model"
FACTS = ModelFacts(context=96, vocab_size=2048, eos_token_ids=(0,))
REFUSED = {"INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"}
CHAT = b'{"messages": [{"role": "user", "content": "hi"}], "tools": [{"function": {"name": "f"}}], "n": 2}'
CALL = b'\x05<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call> and text'


def temporary() -> Path:
    """A folder of this process, which goes with it."""
    folder = tempfile.mkdtemp(prefix="tandem-guided-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@cache
def text() -> Tokenizer:
    folder = temporary()
    for file in DEMO.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer.load(folder)


@cache
def folder() -> Path:
    return temporary()


def _refused(error: TandemError) -> None:
    assert error.status in REFUSED, error
    assert error.status == "RESOURCE_EXHAUSTED" or error.field, error


def _of_settings(error: SettingsError) -> None:
    assert error.field.partition(".")[0] in Settings.model_fields, error


def admit(data: bytes) -> None:
    """A request over gRPC."""
    try:
        request = generation_pb2.GenerateRequest.FromString(data)
    except DecodeError:
        return
    try:
        job = admitted(request, text(), FACTS)
    except TandemError as error:
        _refused(error)
    else:
        assert 0 < job.prompt_len < job.prompt_len + job.max_tokens <= FACTS.context
        assert all(0 <= token < FACTS.vocab_size for token in job.tokens)


def body(data: bytes) -> None:
    """A request over HTTP; what it becomes is admitted, or refused by a name that the client knows."""
    for kind in (openai_protocol.Chat, openai_protocol.Completions):
        try:
            asked: Any = openai_protocol.parse(data, kind)
            for request in openai_protocol.requests(asked, "id", Defaults(), ""):
                admitted(request, text(), FACTS)
        except TandemError as error:
            _refused(error)
            json.loads(openai_errors.error_body(error))


def calls(data: bytes) -> None:
    """A model's text. What comes out of it does not depend on how it was cut."""
    size, said = (data[0] % 16 + 1 if data else 1), data[1:].decode(errors="replace")
    for format in NAMES:
        whole, cut = reader_of(format), reader_of(format)
        once = joined(whole.push(said) + whole.finish())
        parts = [part for at in range(0, len(said), size) for part in cut.push(said[at : at + size])]
        assert list(map(_unnamed, joined(parts + cut.finish()))) == list(map(_unnamed, once))


def _unnamed(part: Part) -> Part:
    """Without the id, which is random."""
    return CallBegin("", part.name) if isinstance(part, CallBegin) else part


def key_file(data: bytes) -> None:
    """A file of keys: read, or refused whole."""
    path = folder() / "keys"
    path.write_bytes(data)
    try:
        found = api_keys.ApiKeys(path)
    except SettingsError as error:
        _of_settings(error)
    else:
        assert found


def settings(data: bytes) -> None:
    """Settings from a command line: taken, or refused by the name of one of them."""
    words = data.decode(errors="replace").split("\n")
    names = list(Settings.model_fields)
    given: dict[str, Any] = {"model": "m"}
    for place, word in enumerate(words):
        name, found, value = word.partition("=")
        given[name if found and name in names else names[(place + len(word)) % len(names)]] = value
    try:
        load(**given)
    except SettingsError as error:
        _of_settings(error)


TARGETS: dict[str, tuple[Callable[[bytes], None], list[bytes]]] = {
    "admit": (admit, GOOD),
    "openai": (body, [CHAT, b'{"prompt": ["a", "b"], "max_tokens": 3, "stop": ["x"], "logit_bias": {"5": 1}}']),
    "calls": (calls, [CALL, b'\x01{"name": "f", "parameters": {}}; {"name": "g"}', b"\x03text"]),
    "keys": (
        key_file,
        [b"anna anna-key-0123456789 admin requests=8 # a note\n", b"ben ben-key-0123456789 priority=-5\n"],
    ),
    "settings": (
        settings,
        [b"port=0\nkv_blocks=64\ndtype=float32", b"adapters={}\nredis=redis://h", b"slo_ttft_s=1e400"],
    ),
}


def main() -> None:
    import atheris

    name = sys.argv.pop(1)
    target, good = TARGETS[name]
    atheris.instrument_all()
    inputs = temporary()
    for number, one in enumerate(good):
        (inputs / str(number)).write_bytes(one)
    atheris.Setup([*sys.argv, str(inputs)], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
