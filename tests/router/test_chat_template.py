"""A conversation is rendered as by transformers, and in the form in which its template shows all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from services.router.preprocess.chat.chat_template import ChatTemplate, Rendering, load_template
from tandem.errors import CheckpointRefused, InvalidRequest
from tests.support.templates import HERMES

USER = {"role": "user", "content": "How high?"}
SAID = {"role": "assistant", "content": "So high."}
TOOLS = [{"type": "function", "function": {"name": "höhe", "parameters": {"type": "object"}}}]

PLAIN = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Shows no role that it does not know, and trims.
STRICT = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}[SYS]{{ message.content | trim }}[/SYS]"
    "{% elif message.role == 'user' %}[INST]{{ message.content | trim }}[/INST]"
    "{% elif message.role == 'assistant' %}{{ message.content | trim }}</s>{% endif %}{% endfor %}"
)
# Refuses a system message that is not the first, as Qwen3.5 does.
SYSTEM_FIRST = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}"
    "{% elif message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('unexpected role') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}{% endfor %}"
)
KNOWS_DEVELOPER = (
    "{% for message in messages %}{% if message.role in ('developer', 'user') %}"
    "<{{ message.role }}>{{ message.content }}{% endif %}{% endfor %}"
)
USERS_ONLY = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
# Reasoning in the manner of Qwen3.
THINKING = (
    "{% for message in messages %}{{ '<|' + message.role + '|>\n' }}"
    "{% if message.role == 'assistant' and message.reasoning_content %}"
    "{{ '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)


def expected(template: str, messages: list[Any], tools: list[Any] | None = None, **options: Any) -> str:
    """As transformers renders it."""
    options = {"add_generation_prompt": True, **options}
    (text,), _ = render_jinja_template([messages], tools=tools, chat_template=template, **options)
    assert isinstance(text, str)
    return text


# ---- what transformers adds to Jinja


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}",
        "{% set x = 'a' %}{%- generation -%} {% set x = 'b' %}{{ x }} {%- endgeneration -%} {{ x }}",
        "{% for m in messages %}{% generation %}{{ loop.index }}{{ m.role }}{% endgeneration %}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% generation %}{% set ns.n = 5 %}{% endgeneration %}{{ ns.n }}",
        "{{ {'b': 'é<', 'a': [1, 2]} | tojson }}",
        "{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=False) }}",
        "{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=True) }}",
        "{{ {'b': 'é', 'a': 1} | tojson(True) }}",
        "{{ {'b': 'é', 'a': [1]} | tojson(indent=4, sort_keys=true) }}",
        "{{ {'b': 'é', 'a': [1]} | tojson(separators=(',', ':')) }}",
        "{{ strftime_now('%Y') }}",
        "{{ documents is none }}{{ tools is none }}{{ documents is defined }}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    ],
)
def test_what_checkpoints_use_beyond_jinja_is_rendered_as_by_transformers(source: str) -> None:
    """`generation`, which marks what to train on, options of `tojson`, the date, and what is none if it is absent."""
    assert ChatTemplate(source, {}).render([USER, SAID]) == expected(source, [USER, SAID])


@pytest.mark.parametrize("source", ["{% generation %}x", "{% frob %}", "{{ ", "(" * 300, "{% if x %}" * 200])
def test_a_template_that_cannot_be_compiled_is_an_error_of_templates(source: str) -> None:
    """Also one that is nested deeper than Python takes."""
    source = "{{ " + source + "1" + ")" * 300 + " }}" if source.startswith("(") else source
    with pytest.raises(TemplateError):
        ChatTemplate(source + "{% endif %}" * 200 if "if x" in source else source, {})


# ---- a checkpoint's files


def write(folder: Path, *, config: Any = None, default: str | None = None, **more: str) -> ChatTemplate | None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": config, "bos_token": "<s>"}))
    if default is not None:
        (folder / "chat_template.jinja").write_text(default, "utf-8")
    for name, source in more.items():
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(source, "utf-8")
    return load_template(folder)


NAMED = [{"name": "default", "template": "plain é"}, {"name": "tool_use", "template": HERMES}]


@pytest.mark.parametrize(
    "files", [{"config": NAMED}, {"default": "plain é", "tool_use": HERMES}, {"config": "x", "default": "plain é"}]
)
def test_offered_tools_choose_the_template_for_tools(tmp_path: Path, files: Any) -> None:
    """Whether the checkpoint lists it in tokenizer_config.json or has a file of its own; otherwise the default serves
    all chats. Files prevail over tokenizer_config.json."""
    template = write(tmp_path, **files)
    assert template is not None
    assert template.render([USER]) == "plain é"
    if len(files) == 1 or "tool_use" in files:
        assert template.knows_tools
        assert template.tool_source == HERMES
        assert template.render([USER], TOOLS) == expected(HERMES, [USER], TOOLS)
        assert template.render([USER], how=Rendering(template="tool_use")) == expected(HERMES, [USER])
    else:
        assert not template.knows_tools


def test_a_checkpoint_without_a_default_template_has_no_chat(tmp_path: Path) -> None:
    """Whatever else it has."""
    assert write(tmp_path, rag="x") is None
    assert write(tmp_path, config="plain", rag="x") is not None, "the default may be in the other place"


@pytest.mark.parametrize("content", [b"\xff", b"{% frob %}"])
@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"])
def test_a_template_that_cannot_be_read_is_refused_by_its_folder(tmp_path: Path, name: str, content: bytes) -> None:
    """At the start, not when the first client offers tools."""
    write(tmp_path, default="x", tool_use="x")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointRefused, match=str(tmp_path)):
        load_template(tmp_path)


# ---- the developer's instructions


RULE = {"role": "developer", "content": "Be brief."}
LATER = {"role": "developer", "content": "Be long."}
SYSTEM = {"role": "system", "content": "You help."}
DEVELOPERS = [
    (KNOWS_DEVELOPER, [RULE, USER], "<developer>Be brief.<user>How high?"),
    (PLAIN, [RULE, USER], "<|system|>Be brief.<|end|><|user|>How high?<|end|><|assistant|>"),
    (STRICT, [RULE, USER], "[SYS]Be brief.[/SYS][INST]How high?[/INST]"),
    (STRICT, [USER, SAID, LATER, USER], "[INST]How high?[/INST]So high.</s>[SYS]Be long.[/SYS][INST]How high?[/INST]"),
    (SYSTEM_FIRST, [SYSTEM, RULE, USER], "<|system|>You help.\n\nBe brief.<|user|>How high?"),
    (SYSTEM_FIRST, [RULE, SYSTEM, USER], "<|system|>Be brief.\n\nYou help.<|user|>How high?"),
    (SYSTEM_FIRST, [RULE, USER, LATER], "<|system|>Be brief.\n\nBe long.<|user|>How high?"),
    (SYSTEM_FIRST, [USER, LATER], "<|system|>Be long.<|user|>How high?"),
]


@pytest.mark.parametrize(("source", "messages", "rendered"), DEVELOPERS)
def test_no_template_loses_the_developers_instructions(source: str, messages: list[Any], rendered: str) -> None:
    """A template that does not know the role gets them as the system's, where it shows those: in one message at the
    beginning if it shows no later one."""
    before = json.dumps(messages)
    assert ChatTemplate(source, {}).render(messages) == rendered
    assert json.dumps(messages) == before


def test_a_template_for_tools_gets_the_developers_instructions_too(tmp_path: Path) -> None:
    """What it does with messages is found out with a tool, where it fails without one."""
    template = write(tmp_path, default="", tool_use="{% for t in tools %}<tool_call>{% endfor %}" + STRICT)
    assert template is not None
    assert template.render([RULE, USER], TOOLS) == "<tool_call>[SYS]Be brief.[/SYS][INST]How high?[/INST]"


def test_control_these_templates_drop_or_refuse_a_developer() -> None:
    """Rendered as the client sent it, the instructions are gone, or the request is."""
    assert "brief" not in expected(STRICT, [RULE, USER])
    with pytest.raises(Exception, match="unexpected role"):
        expected(SYSTEM_FIRST, [RULE, USER])


def test_instructions_that_no_template_shows_are_refused_by_their_place() -> None:
    """With what to do instead; a system message is the template's own matter."""
    template = ChatTemplate(USERS_ONLY, {})
    with pytest.raises(InvalidRequest, match="user message") as caught:
        template.render([USER, RULE])
    assert (caught.value.field, template.render([SYSTEM, USER])) == ("chat.messages[1].role", "How high?")


# ---- calls in the history


CALLS = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
END = "{% endfor %}{% endfor %}"
OBJECT = f"{CALLS}{{% for k, v in c.function.arguments | items %}}<{{{{ k }}}}={{{{ v }}}}>{{% endfor %}}{END}"
JSON = f"{CALLS}{{{{ c.function.arguments | tojson }}}}{END}"
TEXT = f"{CALLS}{{{{ c.function.name + '(' + c.function.arguments + ')' }}}}{END}"
PYTHON = f"{CALLS}{{{{ c.function.arguments }}}}{END}"
EITHER = (
    f"{CALLS}{{% if c.function.arguments is string %}}{{{{ c.function.arguments }}}}"
    f"{{% else %}}{{{{ c.function.arguments | tojson }}}}{{% endif %}}{END}"
)
# As in DeepSeek's first templates, calls belong to a message whose content is none.
NO_CONTENT = (
    "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}"
    "{{ '<' + c.function.arguments + '>' }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def called(arguments: Any, content: str = "", **more: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call], **more}


@pytest.mark.parametrize(
    ("source", "shown", "broken"),
    [
        (OBJECT, "<a=é>", '<arguments={"a":>'),
        (JSON, '{"a": "é"}', '"{\\"a\\":"'),
        (TEXT, 'f({"a": "é"})', 'f({"a":)'),
        (PYTHON, '{"a": "é"}', '{"a":'),
        (EITHER, '{"a": "é"}', '{"a":'),
        (NO_CONTENT, '<{"a": "é"}>', '<{"a":>'),
    ],
)
def test_arguments_have_the_form_that_the_template_takes(source: str, shown: str, broken: str) -> None:
    """An object or text, and what a model wrote that is no JSON is shown too instead of refused: the client would send
    it again with every later turn."""
    template = ChatTemplate(source, {})
    assert template.render([called({"a": "é"})]) == shown
    assert template.render([called('{"a":')]) == broken


def test_control_templates_do_not_agree_on_the_form() -> None:
    """Without a form for each, one fails for an object, one for text, one shows an object as Python does, and one
    passes over the call."""
    for source, arguments in ((TEXT, {"a": 1}), (OBJECT, "text")):
        with pytest.raises(TypeError):
            expected(source, [called(arguments)])
    assert expected(PYTHON, [called({"a": 1})]) == "{'a': 1}"
    assert expected(NO_CONTENT, [called("{}")]) == ""


# ---- reasoning

HARMONY = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('both') }}"
    "{% elif m.content or m.thinking %}<|channel|>analysis{{ m.content or m.thinking }}{% endif %}"
    "to={{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{{ reasoning_effort }}"
)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_every_name_under_which_templates_look_for_it(name: str) -> None:
    """It is prompt.py that names it; a template reads its own name."""
    from services.router.preprocess.chat.prompt import _messages
    from tandem.v1 import generation_pb2

    message = generation_pb2.ChatMessage(role="assistant", content=b"x", reasoning="é".encode())
    source = "{% for m in messages %}{{ m." + name + " }}{{ m.content }}{% endfor %}"
    assert ChatTemplate(source, {}).render(_messages(generation_pb2.Chat(messages=[message]))) == "éx"


def test_reasoning_and_content_beside_a_call_are_joined_where_the_template_takes_one() -> None:
    """gpt-oss has one place for both; a template with two places gets both."""
    said = called({}, "I look.", **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "Hm."))
    assert ChatTemplate(HARMONY, {}).render([said]) == "<|channel|>analysisHm.\n\nI look.to=f{}"
    both = "{% for m in messages %}{{ m.thinking }}|{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments"
    assert ChatTemplate(both + " | tojson }}{% endfor %}{% endfor %}", {}).render([said]) == "Hm.|I look.{}"
    with pytest.raises(TemplateError, match="both"):
        expected(HARMONY, [said])


# ---- variables


def test_variables_reach_the_template_as_with_transformers() -> None:
    """Whatever the client names, and of whatever kind."""
    source = "{{ a }}{{ b | tojson }}{{ enable_thinking }}{{ bos_token }}"
    variables = {"a": "é", "b": {"c": [1, None]}, "enable_thinking": False, "unused": 1, "self": 2, "context": 3}
    got = ChatTemplate(source, {"bos_token": "<s>"}).render([USER], how=Rendering(variables))
    del variables["self"]
    assert got == expected(source, [USER], bos_token="<s>", **variables)


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "raise_exception", "namespace"]
)
def test_no_variable_replaces_what_the_server_gives_the_template(name: str) -> None:
    """Refused by its name, where it would be overwritten, or break the template."""
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(PLAIN, {}).render([USER], how=Rendering({name: "x"}))
    assert caught.value.field == f"chat.template_variables.{name}"
    assert caught.value.bound


def test_documents_are_refused_where_the_template_shows_none() -> None:
    """An answer without them would not be the one that was asked for."""
    how = Rendering({"documents": [{"title": "Eiger", "text": "3967"}]})
    source = "{% for d in documents or [] %}{{ d.title }}: {{ d.text }}{% endfor %}"
    assert ChatTemplate(source, {}).render([USER], how=how) == expected(source, [USER], **how.variables)
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(PLAIN, {}).render([USER], how=how)
    assert caught.value.field == "chat.template_variables.documents"


LEVELS = (
    "{% if reasoning_effort not in ('xhigh', 'medium', 'low') %}{{ raise_exception('effort') }}{% endif %}"
    "{{ reasoning_effort }}"
)
SHOWN = "{{ reasoning_effort }} {{ enable_thinking }} {{ thinking }}"


@pytest.mark.parametrize(
    ("source", "variables", "shown"),
    [
        (SHOWN, {"reasoning_effort": "none"}, "none False False"),
        (SHOWN, {"reasoning_effort": "low"}, "low True True"),
        (SHOWN, {"reasoning_effort": "high", "enable_thinking": False}, "high False "),
        (SHOWN, {"reasoning_effort": "none", "thinking": True}, "none  True"),
        (SHOWN, {"reasoning_effort": 5}, "5  "),
        (LEVELS, {"reasoning_effort": "none"}, "low"),
        (LEVELS, {"reasoning_effort": "minimal"}, "low"),
        (LEVELS, {"reasoning_effort": "high"}, "xhigh"),
        (LEVELS, {"reasoning_effort": "max"}, "xhigh"),
        ("{{ enable_thinking }}" + LEVELS.replace("not in", "is defined and reasoning_effort not in"), {}, ""),
        (HARMONY, {"reasoning_effort": "minimal"}, "How high?low"),
        (HARMONY, {"reasoning_effort": "xhigh"}, "How high?high"),
        (HARMONY, {}, "How high?"),
    ],
)
def test_an_effort_turns_reasoning_on_and_is_one_that_the_template_takes(
    source: str, variables: Any, shown: str
) -> None:
    """The effort "none" turns it off; a client that says so itself prevails; one that the template refuses becomes the
    nearest."""
    assert ChatTemplate(source, {}).render([USER], how=Rendering(variables)) == shown


def test_no_reasoning_leaves_the_effort_out_where_the_template_has_a_switch() -> None:
    """The lowest level that it takes would ask for some."""
    source = "{{ enable_thinking }}{% if reasoning_effort is defined %}" + LEVELS + "{% endif %}"
    assert ChatTemplate(source, {}).render([USER], how=Rendering({"reasoning_effort": "none"})) == "False"


# ---- the end of the text

OPEN_ENDED = Rendering(continue_last=True)


@given(st.text(alphabet="aé \n\t<", max_size=12), st.sampled_from([PLAIN, STRICT, THINKING]))
def test_an_answer_that_goes_on_is_rendered_as_by_transformers(content: str, source: str) -> None:
    """Whatever space it ends with. An answer of space alone is a case of its own: transformers would remove the space
    before it as well."""
    last = {"role": "assistant", "content": content}
    got = ChatTemplate(source, {}).render([USER, last], how=OPEN_ENDED)
    if content.strip():
        wanted = expected(source, [USER, last], add_generation_prompt=False, continue_final_message=True)
        assert got == wanted
    kept = content.strip() if source == STRICT else content
    assert got.endswith(kept)
    assert got.startswith(expected(source, [USER], add_generation_prompt=False))


def test_an_empty_answer_goes_on_after_its_header() -> None:
    """The line end after it stays, also where the template trims the content."""
    last = {"role": "assistant", "content": ""}
    source = "{% for m in messages %}{{ m.role + '\n' + m.content | trim }}!{% endfor %}"
    assert ChatTemplate(source, {}).render([USER, last], how=OPEN_ENDED) == "user\nHow high?!assistant\n"


def test_reasoning_goes_on_where_there_is_no_content_yet() -> None:
    """The text ends within the reasoning."""
    last = {"role": "assistant", "content": "", "reasoning_content": "Hm, "}
    rendered = ChatTemplate(THINKING, {}).render([USER, last], how=OPEN_ENDED)
    assert rendered == "<|user|>\nHow high?<|end|><|assistant|>\n<think>\nHm, "
    wanted = {"add_generation_prompt": False, "continue_final_message": "reasoning_content"}
    assert rendered == expected(THINKING, [USER, last], **wanted)


@pytest.mark.parametrize(
    ("source", "last"),
    [
        (PLAIN, USER),
        (PLAIN, called({})),
        (USERS_ONLY, SAID),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", SAID),
        ("{% for m in messages %}{{ m.content | replace('So', 'As') }}{% endfor %}", SAID),
    ],
)
def test_what_cannot_go_on_is_refused(source: str, last: Any) -> None:
    """Another's message, calls, and what the template does not show as it is."""
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source, {}).render([USER, last], how=OPEN_ENDED)
    assert caught.value.field == "chat.continue_last_message"
    assert caught.value.bound


def test_a_text_without_a_generation_prompt_ends_with_the_last_message() -> None:
    """As add_generation_prompt=False has it."""
    got = ChatTemplate(PLAIN, {}).render([USER], how=Rendering(generation_prompt=False))
    assert got == expected(PLAIN, [USER], add_generation_prompt=False) == "<|user|>How high?<|end|>"


# ---- templates of clients


def test_a_template_that_a_request_brings_is_run_only_where_that_is_permitted() -> None:
    """A template is a program; the checkpoint's own are known by name."""
    how = Rendering(template="{{ bos_token }}mine")
    with pytest.raises(InvalidRequest, match="allow_request_chat_template") as caught:
        ChatTemplate(PLAIN, {}).render([USER], how=how)
    assert (caught.value.field, caught.value.bound) == ("chat.template", "absent, or one of default")
    assert ChatTemplate(PLAIN, {"bos_token": "<s>"}, from_requests=True).render([USER], how=how) == "<s>mine"
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(PLAIN, {}, from_requests=True).render([USER], how=Rendering(template="{{"))
    assert caught.value.field == "chat.template"
