"""Calls that are tags with the names as attributes: MiniMax M2, and DeepSeek from V3.2 on.

    minimax_m2     <minimax:tool_call>            deepseek_v32   <｜DSML｜function_calls>; V4 writes tool_calls
                   <invoke name="NAME">                          <｜DSML｜invoke name="NAME">
                   <parameter name="KEY">                        <｜DSML｜parameter name="KEY" string="true">
                   VALUE</parameter>                             VALUE</｜DSML｜parameter>
                   </invoke>                                     </｜DSML｜invoke>
                   </minimax:tool_call>                          </｜DSML｜function_calls>

A value begins directly after its tag. The arguments are passed on as a JSON object. Sources: the chat templates of
MiniMax M2 and DeepSeek V3.2 and V4.
"""

from __future__ import annotations

import re
from typing import ClassVar

from services.router.answer.call_formats.scanner import MAX_NAME, Ends, Steps
from services.router.answer.call_formats.typed_value import ANY, TEXT, Kind
from services.router.answer.call_formats.xml_calls import XmlCalls

_KEY = re.compile(r'[^<>"\n]+')
_AS_TEXT, _AS_JSON = '" string="true">', '" string="false">'  # the value's kind in DeepSeek's tag


class InvokeCalls(XmlCalls):
    name_closer = '">'
    key_closers: ClassVar[tuple[str, ...]] = ('">',)
    key_closer = ""  # the end of the current parameter

    def _key(self) -> Steps[str]:
        key = yield from self._in.run(_KEY, MAX_NAME)
        self.key_closer = yield from self._in.literal(self.key_closers)
        return key if len(key) <= MAX_NAME and self.key_closer else ""


class MiniMaxCalls(InvokeCalls):
    call_tag = '<invoke name="'
    openers = Ends("<minimax:tool_call>", call_tag)
    between = ("</invoke>", "</minimax:tool_call>")
    parameters = ('<parameter name="',)
    others = (*parameters, "</parameter>")
    closers = between
    value_closers = ("</parameter>",)
    value_ends = Ends("</parameter>", '\n<parameter name="', *(f"\n{tag}" for tag in between))


class DsmlCalls(InvokeCalls):
    call_tag = '<｜DSML｜invoke name="'
    openers = Ends("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", call_tag)
    between = ("</｜DSML｜invoke>", "</｜DSML｜function_calls>", "</｜DSML｜tool_calls>")
    parameters = ('<｜DSML｜parameter name="',)
    others = (*parameters, "</｜DSML｜parameter>")
    tokens = ("｜DSML｜",)
    closers = between
    key_closers = ('">', _AS_TEXT, _AS_JSON)
    value_closers = ("</｜DSML｜parameter>",)
    value_ends = Ends(*value_closers, *parameters, *between)

    def _kind(self, name: str, key: str) -> Kind:
        kinds = {_AS_TEXT: TEXT, _AS_JSON: ANY}
        return kinds.get(self.key_closer) or super()._kind(name, key)
