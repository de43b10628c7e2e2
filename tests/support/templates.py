"""Chat templates that know tools, in the two ways in which models write calls."""

HERMES = (
    "{%- if tools %}<|system|>{{ tools | tojson }} as <tool_call>...</tool_call><|end|>{% endif -%}"
    "{%- for message in messages %}{% if message.role == 'skip' %}{% continue %}{% endif -%}"
    "<|{{ message.role }}|>{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}"
    "<|end|>{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LLAMA = '{% if tools %}ipython {{ tools }} {"name": ..., "parameters": ...}{% endif %}{{ messages }}'
