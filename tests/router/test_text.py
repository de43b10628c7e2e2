"""Text in, whole code points out; what cannot be read is refused. With the demo's tokenizer, whose tokens are bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.checkpoint import local_folder
from services.router.text import ChatTemplate, Text
from tandem.errors import CheckpointRefused, InvalidRequest

DEMO = Path(__file__).parents[2] / "demo" / "model"
TEXT = Text.load(DEMO)


@given(st.text(max_size=40), st.lists(st.integers(1, 5), max_size=60))
def test_pieces_are_whole_code_points_and_add_up(text: str, cuts: list[int]) -> None:
    """However the tokens are cut into messages: together they are the decoded text, and none has half a letter."""
    assert TEXT.tokenizer is not None
    ids = TEXT.encode(text)
    whole = TEXT.tokenizer.decode(ids, skip_special_tokens=True)
    stream, pieces, rest = TEXT.stream(), [], ids
    for cut in cuts:
        pieces.append(stream.push(rest[:cut]))
        rest = rest[cut:]
    pieces.append(stream.push(rest))
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == whole


def test_an_answer_cut_inside_a_letter_shows_it_at_the_end_only() -> None:
    """The control: a stream that ends within a code point holds it back until it is certain that no more comes."""
    ids = TEXT.encode("\N{OLD PERSIAN SIGN A}")
    assert len(ids) > 1
    stream = TEXT.stream()
    assert stream.push(ids[:-1]) == ""
    assert "\N{REPLACEMENT CHARACTER}" in stream.finish()


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    """A checkpoint's template is somebody else's program: it gets no further than the messages."""
    template = ChatTemplate("{{ messages.__class__.__mro__[-1].__subclasses__() }}", {})
    with pytest.raises(InvalidRequest) as caught:
        template.render([{"role": "user", "content": "x"}])
    assert caught.value.field == "chat.messages"


def test_a_template_may_refuse_messages() -> None:
    """Its own words reach the client."""
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template.render([{"role": "user", "content": "x"}])


def test_a_checkpoint_without_a_tokenizer_takes_ids_alone(tmp_path: Path) -> None:
    """It serves ids, gives out no text, and says what to send instead."""
    text = Text.load(tmp_path)
    assert text.stream().push([1, 2]) == text.stream().finish() == ""
    with pytest.raises(InvalidRequest) as caught:
        text.encode("x")
    assert caught.value.bound == "token_ids instead"


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path, file: str) -> None:
    """Not skipped: half a tokenizer would serve other tokens."""
    (tmp_path / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    (tmp_path / file).write_text("{")
    with pytest.raises(CheckpointRefused, match=file):
        Text.load(tmp_path)


def test_of_several_templates_the_default_one_is_taken(tmp_path: Path) -> None:
    """As transformers does; a checkpoint that names no default has no chat."""
    (tmp_path / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    for name, expected in (("default", "A"), ("tool_use", None)):
        config = {"chat_template": [{"name": name, "template": "A"}], "bos_token": {"content": "<s>"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        template = Text.load(tmp_path).template
        assert (template.source if template else None) == expected
        assert template is None or template.variables == {"bos_token": "<s>"}


def test_the_router_and_the_workers_look_in_the_same_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tilde is a home directory for both; a path to nothing is refused without asking the hub."""
    monkeypatch.setenv("HOME", str(DEMO.parent))
    assert local_folder("~/model") == DEMO
    with pytest.raises(CheckpointRefused, match="there is no folder"):
        local_folder(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    "source",
    ["{{ 1 / 0 }}", "{{ [][5] + 1 }}", "{{ messages.x.y }}", "{{ '%d' % 'x' }}", "{{ messages | tojson }}"],
)
def test_a_template_that_fails_refuses_the_messages(source: str) -> None:
    """Whatever goes wrong in it, it was the messages that it could not take: also ones that are nested too deep."""
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": deep}])
    assert caught.value.field == "chat.messages"
