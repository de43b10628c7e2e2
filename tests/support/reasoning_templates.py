"""Chat templates in small that have what those of models that reason have: they remove the reasoning from earlier
answers, write an empty one or the beginning of one, or tell the model which markers to write."""

_STRIPPED = "{%- if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif -%}"

# Qwen3: the model writes <think> itself; without thinking the template writes an empty one.
QWEN3 = (
    "{%- if tools %}<|im_start|>system\n<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>\n"
    'Within <tool_call></tool_call>: {"name": <function-name>, "arguments": <args-json-object>}<|im_end|>\n{% endif -%}'
    "{%- for message in messages %}{% set content = message.content %}{% if message.role == 'assistant' %}"
    + _STRIPPED
    + "{% endif %}{{- '<|im_start|>' + message.role + '\n' + content }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor -%}"
    "{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
# DeepSeek V3.1: the template writes <think>, or </think> alone.
DEEPSEEK = (
    "{{ bos_token }}{%- for message in messages %}{% set content = message.content -%}"
    "{%- if message.role == 'user' %}{{ '<｜User｜>' + content }}{% endif -%}"
    "{%- if message.role == 'assistant' %}{{ '<｜Assistant｜></think>' }}"
    "{%- if '</think>' in content %}{% set content = content.split('</think>', 1)[1] %}{% endif %}"
    "{{- content }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}"
    "{%- if not thinking %}{{ '</think>' }}{% else %}{{ '<think>' }}{% endif %}{% endif %}"
)
# GLM-4.5: as Qwen3, with another format of calls.
GLM = (
    "[gMASK]<sop>{%- if tools %}<|system|>{{ tools | tojson }}<tool_call>{function-name}\n"
    "<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n</tool_call>{% endif -%}"
    "{%- for message in messages %}{% set content = message.content -%}"
    "{%- if message.role == 'user' %}<|user|>\n{{ content }}"
    "{{- '/nothink' if enable_thinking is defined and not enable_thinking else '' }}"
    "{%- else %}<|assistant|>" + _STRIPPED + "{{- '\n<think></think>' }}{{ content }}{% endif %}{% endfor -%}"
    "{%- if add_generation_prompt %}<|assistant|>"
    "{{- '\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}{% endif %}"
)
# Magistral: messages have blocks of thoughts.
MAGISTRAL = (
    "{{ bos_token }}{%- for message in messages -%}"
    "{%- if message.role == 'user' %}{{ '[INST]' + message.content + '[/INST]' }}"
    "{%- elif message.content is string %}{{ message.content + eos_token }}{% else %}{% for block in message.content %}"
    "{%- if block.type == 'thinking' %}{{ '[THINK]' + block.thinking + '[/THINK]' }}{% else %}{{ block.text }}"
    "{%- endif %}{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
)
# Granite 3.3: the system message asks for the markers, also of the answer.
GRANITE = (
    "{%- if thinking %}<|start_of_role|>system<|end_of_role|>Put your thoughts in <think></think> and your response in "
    "<response></response>.<|end_of_text|>\n{% endif -%}"
    "{%- for message in messages %}<|start_of_role|>{{ message.role }}<|end_of_role|>{{ message.content }}"
    "<|end_of_text|>\n{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
# Hunyuan A13B: marks the answer too.
HUNYUAN = (
    "{%- for message in messages %}{% set content = message.content %}{% if message.role == 'assistant' %}"
    "{%- if '<answer>' in content %}{% set content = content.split('<answer>')[-1].split('</answer>')[0] %}{% endif -%}"
    "{%- endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}<|extra_0|>"
    "{%- if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n{% endif %}{% endif %}"
)
# EXAONE Deep: always writes the beginning.
EXAONE_DEEP = (
    "{%- for message in messages %}{% set content = message.content -%}"
    "{%- if '</thought>' in content %}{% set content = content.split('</thought>')[-1].lstrip('\\n') %}{% endif -%}"
    "{{ '[|' + message.role + '|]' + content }}{% if message.role != 'user' %}{{ '[|endofturn|]' }}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}{{ '[|assistant|]<thought>\n' }}{% endif %}"
)
# gpt-oss: harmony.
GPT_OSS = (
    "<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>"
    "{%- if tools %}<|start|>developer<|message|># Tools\n\n## functions\n{{ tools | tojson }}<|end|>{% endif -%}"
    "{%- for message in messages %}{% if message.role == 'assistant' -%}"
    "{%- for call in message.tool_calls or [] %}<|start|>assistant to=functions.{{ call.function.name }}<|channel|>"
    "commentary json<|message|>{{ call.function.arguments | tojson }}<|call|>{% endfor -%}"
    "<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>"
    "{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor -%}"
    "{%- if add_generation_prompt %}<|start|>assistant{% endif %}"
)
