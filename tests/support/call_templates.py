"""Chat templates in small that have what those of real models have where they tell of calls and write them.

Each is named by the format of its model's calls; a few formats are written in more than one way.
"""

_TOOLS = "{%- if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif -%}"
_EACH = "{%- for message in messages %}{% if message.tool_calls %}{% for call in message.tool_calls %}"
_END = "{% endfor %}{% else %}{{ message.content }}{% endif %}{% endfor -%}"


def _template(writes: str, tells: str = "") -> str:
    """NAME and ARGS stand for the expressions of a call's name and arguments."""
    source = f"{{%- if tools %}}{tells}{{% endif %}}{_TOOLS}{_EACH}{writes}{_END}"
    return source.replace("NAME", "call.function.name").replace("ARGS", "call.function.arguments")


_XML = "<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>"
_ARG_TAGS = "<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>"
_IPYTHON = "Environment: ipython\n"
_JSON = '{"name": function name, "parameters": dictionary of argument name and its value}'
_WRITES_JSON = "{{- '{\"name\": \"' + NAME + '\", ' }}{{- '\"parameters\": ' }}{{- ARGS | tojson }}{{- '}' }}"

TEMPLATES: list[tuple[str, str]] = [
    # Qwen2.5 and Qwen3
    (
        "hermes",
        _template(
            '{{- \'<tool_call>\\n{"name": "\' }}{{- NAME }}{{- \'", "arguments": \' }}{{- ARGS | tojson }}'
            "{{- '}\\n</tool_call>' }}",
            'In <tool_call></tool_call>:\n<tool_call>\n{"name": <function-name>, "arguments": <args>}\n</tool_call>',
        ),
    ),
    # Hermes 2 Pro and 3
    ("hermes", _template("<tool_call>{{ call.function | tojson }}</tool_call>")),
    # Qwen3-Coder
    (
        "qwen3_coder",
        _template(
            "{{- '\\n<tool_call>\\n<function=' + NAME + '>\\n' }}{% for key, value in ARGS | items %}"
            "{{- '<parameter=' + key + '>\\n' }}{{- value }}{{- '\\n</parameter>\\n' }}{% endfor %}"
            "{{- '</function>\\n</tool_call>' }}",
            f"Reply as follows:\n{_XML}\nA <function=...></function> block is within <tool_call></tool_call>",
        ),
    ),
    # Seed-OSS
    ("qwen3_coder", _template("<seed:tool_call>\n<function={{ NAME }}>\n<parameter=a>b</parameter>\n")),
    # GLM-4.5
    (
        "glm",
        _template(
            "{{ '\\n<tool_call>' + NAME }}{% for k, v in ARGS.items() %}\n<arg_key>{{ k }}</arg_key>\n"
            "<arg_value>{{ v | tojson if v is not string else v }}</arg_value>{% endfor %}\n</tool_call>",
            f"<tool_call>{{function-name}}\n{_ARG_TAGS}\n</tool_call>",
        ),
    ),
    # Llama 3.1 to 3.3
    ("llama3", _template(_WRITES_JSON, _IPYTHON + _JSON)),
    # Llama 4
    (
        "llama3",
        _template(
            "{{- '<|python_start|>' }}{{- message.content }}{{- '<|python_end|>' }}" + _WRITES_JSON, _IPYTHON + _JSON
        ),
    ),
    # Llama 3.2 and 4 as vLLM's examples have them in Python
    (
        "pythonic",
        _template(
            "[{{- NAME + '(' -}}{% for param in ARGS %}{{- param + '=' -}}{{- ARGS[param] }}{% endfor %}{{- ')' -}}]",
            _IPYTHON + "Write [func_name1(params_name1=params_value1, params_name2=params_value2...)]",
        ),
    ),
    # Mistral 7B v0.3, Nemo, Small 3.1
    (
        "mistral",
        "{%- if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}"
        "{%- for message in messages %}{{- '[TOOL_CALLS] [' }}{% for call in message.tool_calls %}"
        "{%- set out = call.function | tojson %}{{- out[:-1] }}{{- ', \"id\": \"' + call.id + '\"}' }}{% endfor %}]"
        "{% endfor %}",
    ),
    # Ministral 3, Devstral
    ("mistral", _template("{{- '[TOOL_CALLS]' + NAME + '[ARGS]' + ARGS }}")),
    # DeepSeek-R1, V3
    (
        "deepseek_v3",
        _template(
            "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + NAME + '\\n' + "
            "'```json' + '\\n' + ARGS + '\\n' + '```' + '<｜tool▁call▁end｜>'}}"
        ),
    ),
    # DeepSeek-V3.1
    (
        "deepseek_v31",
        _template(
            "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + NAME + '<｜tool▁sep｜>' + ARGS + '<｜tool▁call▁end｜>'}}"
        ),
    ),
    # Kimi-K2
    (
        "kimi_k2",
        _template(
            "<|tool_calls_section_begin|><|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
            "{{ ARGS | tojson }}<|tool_call_end|><|tool_calls_section_end|>"
        ),
    ),
    # DeepSeek-V3.2, which puts its markers together
    (
        "deepseek_v32",
        _template(
            "{%- set mark = '｜DSML｜' %}"
            "{{ '<' + mark + 'function_calls>\\n<' + mark + 'invoke name=\"' + NAME + '\">\\n' }}"
            "{% for k, v in ARGS.items() %}{{ '<' + mark + 'parameter name=\"' + k + '\" string=\"true\">' }}{{ v }}"
            "{{ '</' + mark + 'parameter>' }}{% endfor %}{{ '</' + mark + 'invoke></' + mark + 'function_calls>' }}"
        ),
    ),
    # DeepSeek-V4
    (
        "deepseek_v4",
        _template(
            "{%- set mark = '｜DSML｜' %}"
            "{{ '<' + mark + 'tool_calls>\\n<' + mark + 'invoke name=\"' + NAME + '\">\\n' }}"
            "{{ ARGS | tojson }}{{ '</' + mark + 'invoke></' + mark + 'tool_calls>' }}"
        ),
    ),
    # MiniMax-M2
    (
        "minimax_m2",
        _template(
            "{%- set begin = '<minimax:tool_call>' %}{{ begin }}\n<invoke name=\"{{ NAME }}\">"
            "{% for k, v in ARGS.items() %}{{ '<parameter name=\"' + k + '\">' }}{{ v }}</parameter>"
            "{% endfor %}</invoke>\n</minimax:tool_call>",
            '<invoke name="tool-name-1">\n<parameter name="key-1">value-1</parameter>\n</invoke>',
        ),
    ),
    # Gemma 4
    (
        "gemma4",
        _template(
            "{{ '<|tool_call>call:' + NAME + '{' }}"
            '{% for k, v in ARGS.items() %}{{ k }}:<|"|>{{ v }}<|"|>{% endfor %}'
            "{{ '}<tool_call|>' }}"
        ),
    ),
    # FunctionGemma
    (
        "functiongemma",
        _template(
            "{{ '<start_function_call>call:' + NAME + '{' }}"
            "{% for k, v in ARGS.items() %}{{ k }}:<escape>{{ v }}<escape>{% endfor %}"
            "{{ '}<end_function_call>' }}"
        ),
    ),
    # Command R7B, Command A
    (
        "cohere",
        _template(
            "<|START_ACTION|>[\n    "
            '{"tool_call_id": "0", "tool_name": "{{ NAME }}", "parameters": {{ ARGS | tojson }}}\n]'
            "<|END_ACTION|>"
        ),
    ),
    # Hunyuan A13B, Apriel 1.5 and MiniMax-M1, of which the second one tells of <tool_call> too
    ("hunyuan_a13b", _template('<tool_calls>[{"name": "{{ NAME }}", "arguments": {{ ARGS | tojson }}}]</tool_calls>')),
    (
        "hunyuan_a13b",
        _template(
            "<tool_calls>[{{ {'name': NAME, 'arguments': ARGS} | tojson }}]</tool_calls>",
            'Write <tool_calls>[{"name": <name>, "arguments": <args>}]</tool_calls>, for each <tool_call> with tojson',
        ),
    ),
    ("hunyuan_a13b", _template("<tool_calls>\n{{ {'name': NAME, 'arguments': ARGS} | tojson }}\n</tool_calls>")),
    # Hunyuan 3, which puts its markers together, and its preview
    (
        "hy_v3",
        _template(
            "{%- set s = ':opensource' %}"
            "{{ '<tool_calls{}>\\n<tool_call{}>'.format(s, s) + NAME + '<tool_sep{}>'.format(s) }}"
            "{% for k, v in ARGS.items() %}{{ '<arg_key{}>'.format(s) + k }}{{ v }}{% endfor %}"
        ),
    ),
    (
        "hy_v3",
        _template(
            "<tool_calls>\n<tool_call>{{ NAME }}<tool_sep>\n{% for k, v in ARGS.items() %}<arg_key>{{ k }}</arg_key>"
            "<arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>"
        ),
    ),
    # LFM2, which shows no calls, and LFM2.5
    ("lfm2", "{{ '<|tool_list_start|>[' }}{{ tools | tojson }}]{% for one in messages %}{{ one.content }}{% endfor %}"),
    (
        "lfm2",
        _template(
            "<|tool_call_start|>[{{ NAME }}({% for k, v in ARGS.items() %}{{ k + '=' }}{{ v | tojson }}{% endfor %})]"
            "<|tool_call_end|>"
        ),
    ),
    # Apertus
    (
        "apertus",
        _template(
            "{%- set begin = '<|tools_prefix|>' %}{{ begin + '[' }}{{ '{\"' + NAME + '\": ' + ARGS | tojson + '}' }}]"
            "<|tools_suffix|>"
        ),
    ),
    # functionary v3.1, and Llama 3.1's second format
    (
        "functionary_v31",
        _template("{{ '<function=' + NAME + '>' + ARGS | tojson + '</function>' }}", _IPYTHON + '"parameters"'),
    ),
    (
        "functionary_v31",
        _template(
            "{{ '<function=' + NAME + '>' }}{{ ARGS | tojson }}</function>",
            _IPYTHON + 'Reply with <function=example_name>{"example": "value"}</function>',
        ),
    ),
    # functionary v3.2
    (
        "functionary_v32",
        _template(
            "{{ '>>>all\\n' }}{{ '>>>' + NAME + '\\n' + ARGS }}", "Respond in this format:\n>>>${recipient}\n${content}"
        ),
    ),
    # Nemotron Nano v2
    ("nemotron", _template('<TOOLCALL>[{"name": "{{ NAME }}", "arguments": {{ ARGS | tojson }}}]</TOOLCALL>')),
    # Granite 3.3, which shows no calls
    (
        "granite",
        "{%- if tools %}Respond with <|tool_call|> followed by a JSON list of tools used."
        "{{ tools | tojson }}{% endif %}"
        "{% for one in messages %}{{ one.content }}{% endfor %}",
    ),
]

# Templates with other formats of calls, or none: it is better to know none than to take one for another.
UNKNOWN = [
    "{{ messages }}",
    '{#- Not <tool_call>{"name": 1}</tool_call> but words. #}{{ messages }}',
    _template(']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="{{ NAME }}">'),  # MiniMax M3
    _template("<|tool_calls|><|tool_call:begin|>{{ call.id }}<|tool_call:name|>{{ NAME }}<|tool_call:args|>"),  # Solar
    _template("<|start|>assistant to=functions.{{ NAME }}<|channel|>commentary json<|message|>{}<|call|>"),
    _template('<function name="{{ NAME }}"><param name="a">b</param></function>'),  # MiniCPM5
    _template("<function_calls>\n{{ NAME + '(' }})</function_calls>"),  # Olmo 3
    _template("Action: ```json{{ ARGS | tojson }}```", "{{ '```python\ndef ' + tool.name + '(' }}"),  # Command R+
]
