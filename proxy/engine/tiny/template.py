"""The chat template and training text of the built-in model.

The template renders every conversation to the same string as the template of Qwen3 models, so the renderer of that
family fits the built-in model; a test compares the two.
"""

from __future__ import annotations

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Special tokens, which decoding may skip: they structure the conversation and are not part of its text."""

MARKER_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Added tokens that decoding keeps, because output parsers look for them."""

CHAT_TEMPLATE = r"""
{%- macro begin(role) %}{{- '<|im_start|>' ~ role ~ '\n' }}{%- endmacro %}
{%- macro call(entry) %}
    {%- set function = entry.function if entry.function else entry %}
    {{- '<tool_call>\n{"name": "' ~ function.name ~ '", "arguments": ' }}
    {{- function.arguments if function.arguments is string else function.arguments | tojson }}
    {{- '}\n</tool_call>' }}
{%- endmacro %}
{%- set head = messages[0].content if messages[0].role == 'system' else none %}
{%- if tools %}
    {{- begin('system') }}
    {{- head ~ '\n\n' if head is not none else '' }}
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments ' }}
    {{- 'within <tool_call></tool_call> XML tags:\n<tool_call>\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- elif head is not none %}
    {{- begin('system') ~ head ~ '<|im_end|>\n' }}
{%- endif %}
{%- set last = namespace(query=messages | length - 1) %}
{%- for message in messages %}
    {%- if message.role == 'user' and message.content is string
        and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set last.query = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set text = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- begin(message.role) ~ text ~ '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in text %}
            {%- set thought = text.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set text = text.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- begin('assistant') }}
        {%- if loop.index0 > last.query and (loop.last or thought) %}
            {{- '<think>\n' ~ thought.strip('\n') ~ '\n</think>\n\n' ~ text.lstrip('\n') }}
        {%- else %}
            {{- text }}
        {%- endif %}
        {%- for entry in message.tool_calls or [] %}
            {{- '\n' if text or not loop.first else '' }}
            {{- call(entry) }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' }}
        {{- '\n<tool_response>\n' ~ text ~ '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- begin('assistant') }}
    {{- '<think>\n\n</think>\n\n' if enable_thinking is defined and enable_thinking is false else '' }}
{%- endif %}
""".strip()

TRAINING_TEXT = """
You are a helpful assistant. You may call one or more functions to assist with the user query.
You are provided with function signatures within XML tags. For each function call, return a json object with the
function name and the arguments. Think step by step, then answer in the language of the user.
{"type": "function", "function": {"name": "read_file", "description": "Read a file of the workspace", "parameters":
{"type": "object", "properties": {"path": {"type": "string", "description": "Path of the file"}, "offset": {"type":
"integer"}, "limit": {"type": "integer"}}, "required": ["path"]}}}
{"name": "write_file", "arguments": {"path": "src/main.py", "content": "print('hello, world')\\n"}}
{"name": "run_command", "arguments": {"command": "git status --short && python -m pytest -q", "timeout": 120}}
def read_lines(path: str, encoding: str = "utf-8") -> list[str]:
    with open(path, encoding=encoding) as handle:
        return [line.rstrip("\\n") for line in handle if line.strip()]
class Session:
    def __init__(self, name, tokens=None):
        self.name = name
        self.tokens = tokens or []
    def append(self, token, logprob=0.0):
        self.tokens.append((token, logprob))
        return len(self.tokens)
for index, value in enumerate(values):
    if value is None or value == "":
        continue
    total += value * weights[index]
import json, os, sys, time
Traceback (most recent call last): File "main.py", line 12, in <module> raise ValueError("expected an integer")
The agent reads the error, opens the file, finds the function that raises it, and changes the condition. Then it runs
the tests again. Two of them still fail because the expected result was written for the old behaviour, so the agent
looks at the history of the file before it decides which of the two is right. A reward is given when all tests pass.
What is the weather like in Paris today? It is 18 degrees and partly cloudy, with a light wind from the west.
Please list the three largest files in this directory and tell me what each of them is for. Thank you very much!
The quick brown fox jumps over the lazy dog. She sells sea shells by the sea shore. There is no place like home.
Reinforcement learning samples trajectories from a policy, scores them with a reward, and updates the weights so that
actions with a higher return become more likely. The prompt and the output are sequences of token ids.
$ ls -la /usr/local/bin | grep python | sort -r | head -n 20
<html><head><title>Results</title></head><body><p class="note">Nothing was found.</p></body></html>
SELECT id, name, created_at FROM sessions WHERE status = 'active' ORDER BY created_at DESC LIMIT 100;
0 1 2 3 4 5 6 7 8 9 10 11 12 100 200 404 500 1000 2024 2025 3.14159 0.001 1e-6
"""
