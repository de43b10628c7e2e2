"""The format of a model's answers: the markers around its reasoning, and the format of its calls. The checkpoint's chat
template determines both; settings can override it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.router.answer import harmony_reader
from services.router.answer.call_formats import registry
from services.router.answer.reasoning_reader import SPACE, Markers
from tandem.errors import SettingsError

HARMONY, NONE = "harmony", "none"

# By name, with the models that use it. If a template has the markers of two, the first one counts.
FORMATS: dict[str, Markers] = {
    # Gemma 4. Without reasoning it writes an empty reasoning part.
    "gemma4": Markers(("<|channel>thought",), ("<channel|>",), tokens=("<|channel>",)),
    "seed_oss": Markers(("<seed:think>",), ("</seed:think>",)),
    "minimax_m3": Markers(("<mm:think>",), ("</mm:think>",)),
    "hy_v3": Markers(("<think:opensource>",), ("</think:opensource>",)),
    # Command R7B, Command A Reasoning.
    "cohere": Markers(
        ("<|START_THINKING|>",), ("<|END_THINKING|>",), answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    ),
    # Later ones.
    "cohere_text": Markers(("<|START_THINKING|>",), ("<|END_THINKING|>",), answer=("<|START_TEXT|>", "<|END_TEXT|>")),
    "apertus": Markers(("<|inner_prefix|>",), ("<|inner_suffix|>",)),
    "kimi_vl": Markers(("◁think▷",), ("◁/think▷",)),
    "exaone_deep": Markers(("<thought>",), ("</thought>",)),
    # Magistral, Mistral Small 4.
    "mistral": Markers(("[THINK]",), ("[/THINK]",)),
    # Granite 3.2; quantized, it also writes the short forms.
    "granite": Markers(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    # Granite 3.3.
    "granite_tags": Markers(("<think>",), ("</think>",), answer=("<response>", "</response>")),
    # Hunyuan A13B.
    "hunyuan": Markers(("<think>",), ("</think>",), answer=("<answer>", "</answer>")),
    # Qwen3, QwQ, DeepSeek R1 and V3.1, GLM-4.5, MiniMax M1 and M2, SmolLM3, Kimi K2 Thinking, EXAONE 4, Nemotron, ...
    "think": Markers(("<think>",), ("</think>",)),
}

# Texts in a template that prove markers around the answer, if the markers alone do not: MiniMax M2 has the results of
# tools between <response> and </response>.
ANSWER_SHOWN = {"granite_tags": "<response></response>"}

# gpt-oss begins a message with this token; its answer is the message after these texts.
HARMONY_ANSWER = (harmony_reader.CHANNEL, f"final{harmony_reader.MESSAGE}")
# The headers of its messages where the answer must fit a grammar: those of reasoning, and the answer's.
HARMONY_HEADERS = (
    *(f"{end}{harmony_reader.START}" for end in harmony_reader.ENDS),
    f"{harmony_reader.START}assistant{harmony_reader.CHANNEL}",
    f"{harmony_reader.CHANNEL}analysis{harmony_reader.MESSAGE}",
    "".join(HARMONY_ANSWER),
)
HARMONY_HEADERS_AND_CALLS = (  # calls have recipients, before or after the channel
    f"{harmony_reader.CHANNEL}analysis",
    f"{harmony_reader.CHANNEL}commentary",
    "".join(HARMONY_ANSWER),
)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """`reasoning`: None if the answer has no reasoning. `calls`: a name of call_formats.registry, or "harmony"; None:
    calls stay text. `harmony`: gpt-oss, whose messages are reasoning, text and calls; then `reasoning` is None."""

    reasoning: Markers | None = None
    calls: str | None = None
    harmony: bool = False

    @classmethod
    def of_template(
        cls,
        source: str,
        *,
        knows_tools: bool,
        written: str = "",
        reasoning: str | None = None,
        calls: str | None = None,
    ) -> AnswerFormat:
        """The format of a model with this chat template. `knows_tools`: the template shows the model its tools.
        `written`: a rendered answer with a call, because some templates compose their markers from pieces. `reasoning`
        and `calls`: the settings, each the name of a format, or "none"; None: as the template shows. `reasoning` may
        also be two markers with a space between them. Raises SettingsError for an unknown name, and if only one of the
        two is harmony."""
        template = re.sub(r"\{#.*?#\}", "", source, flags=re.DOTALL)
        found = HARMONY if _is_harmony(template) else _reasoning_of(template + written)
        chosen = found if reasoning is None else reasoning
        if chosen == HARMONY or (reasoning is None and calls == HARMONY):
            if calls not in (None, NONE, HARMONY):
                raise SettingsError(
                    f"this model writes harmony, whose calls are its own, not {calls!r:.60}",
                    field="tool_call_format",
                    bound=f"{HARMONY}, {NONE} or absent",
                )
            return cls(None, None if calls == NONE else HARMONY, True)
        if calls == HARMONY:
            raise SettingsError(
                f"calls in harmony go with reasoning in harmony, not with {reasoning!r:.60}",
                field="reasoning_format",
                bound=f"{HARMONY} or absent",
            )
        if calls is None:
            return cls(_markers(chosen), registry.format_of(source, written) if knows_tools else None)
        if calls != NONE and calls not in registry.NAMES:
            raise _unknown("tool_call_format", calls, (*registry.NAMES, HARMONY, NONE))
        return cls(_markers(chosen), None if calls == NONE else calls)

    @property
    def reasons(self) -> bool:
        """The answer may begin with reasoning."""
        return self.harmony or self.reasoning is not None

    @property
    def reasoning_markers(self) -> tuple[str, str]:
        """The text that begins an answer with reasoning, and the text that ends the reasoning. Empty without
        reasoning."""
        if self.harmony:
            return HARMONY_ANSWER
        return (self.reasoning.open[0], self.reasoning.close[0]) if self.reasoning else ("", "")

    def headers(self, *, offers_tools: bool) -> tuple[str, ...]:
        """The headers of messages before a text that fits a grammar."""
        if not self.harmony:
            return ()
        return HARMONY_HEADERS_AND_CALLS if offers_tools and self.calls else HARMONY_HEADERS

    @property
    def markers(self) -> frozenset[str]:
        """The texts that separate the parts. Of all special tokens only these stay visible to the reader of the
        answer."""
        if self.harmony:
            return frozenset(harmony_reader.MARKERS)
        reasoning = self.reasoning.texts if self.reasoning else ()
        calls = (*registry.MARKERS[self.calls], *registry.TOKENS[self.calls]) if self.calls else ()
        return frozenset((*reasoning, *calls))

    def begins_inside(self, prompt_end: str, *, continued: bool = False) -> bool:
        """Whether the answer begins within reasoning: the rendered prompt ends with the opening marker and white space.
        With `continued` the answer continues the model's message, and then also if that has an opening marker without a
        later closing one. A marker before other text counts only in this case, because users may write markers, too."""
        opening: tuple[str, ...]
        close: tuple[str, ...]
        if self.harmony:
            opening = (f"{harmony_reader.CHANNEL}analysis{harmony_reader.MESSAGE}",)
            close = harmony_reader.ENDS
        elif self.reasoning:
            opening, close = self.reasoning.open, self.reasoning.close
        else:
            return False
        if not continued:
            return prompt_end.rstrip(SPACE).endswith(opening)
        return max(map(prompt_end.rfind, opening)) > max(map(prompt_end.rfind, close))


PLAIN = AnswerFormat()


def _is_harmony(template: str) -> bool:
    return all(marker in template for marker in (harmony_reader.CHANNEL, harmony_reader.MESSAGE, harmony_reader.START))


def _reasoning_of(template: str) -> str:
    """The format whose markers the template writes, requests, or removes from earlier answers."""
    for name, markers in FORMATS.items():
        either = any(marker in template for marker in (*markers.open, *markers.close))
        if either and (markers.answer is None or ANSWER_SHOWN.get(name, markers.answer[0]) in template):
            return name
    return NONE


def _markers(name: str) -> Markers | None:
    if name == NONE:
        return None
    if name in FORMATS:
        return FORMATS[name]
    opening, _, close = name.partition(" ")
    if not opening or not close or " " in close:
        raise _unknown("reasoning_format", name, (*FORMATS, HARMONY, NONE, "two markers with a space between them"))
    return Markers((opening,), (close,))


def _unknown(field: str, name: str, known: tuple[str, ...]) -> SettingsError:
    bound = ", ".join(known)
    return SettingsError(f"{field} {name!r:.60} is unknown; there are: {bound}", field=field, bound=bound)
