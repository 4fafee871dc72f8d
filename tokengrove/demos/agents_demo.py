"""Two short agents with the stock `openai` package, and the trees and samples that the server recorded.

The agents have only an address and a key, and do not know this project. Everything shown is fetched over HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tokengrove.client import Client, Sample, Session
from tokengrove.errors import ConfigurationError, how_to_get
from tokengrove.texts import printable
from tokengrove.tree_view import session_tree

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat import ChatCompletionMessageFunctionToolCall, ChatCompletionMessageParam

QUESTIONS = ("Name a tree.", "And another one?", "Which of the two grows higher?")
DISCOUNT = 0.9
REPLY_TOKENS = 24
"""About one second on one core."""
CALL_TOKENS = 128
"""Far above the longest call that the grammar allows, so calls are never cut off."""
SHOWN_CHARACTERS = 72


def run_demo(url: str, console: Console, admin_key: str | None = None) -> None:
    """Run both agents against the server at `url` and print their trees and samples.

    Raises ConfigurationError if the `openai` package is missing, and the errors of `Client` and `openai`.
    """
    if find_spec("openai") is None:
        raise ConfigurationError(f"the demo's agents need the package openai: {how_to_get('openai')}")
    console.print(
        "The built-in model is tiny and has random weights: [bold]its words are noise[/]. Everything else is real.\n"
    )
    with Client(url, admin_key) as client:
        session_ids = [
            _rollout(client, console, "chat", _chat_agent),
            _rollout(client, console, "tools", _tool_agent),
        ]
        console.print(f"The recorded trees, with prompt+sampled tokens and returns at discount {DISCOUNT}:")
        for session_id in session_ids:
            console.print(session_tree(client.session_tree(session_id)))
        console.print()
        console.print(_table(client.export(session_ids=session_ids, layout="concat").samples))
    console.print(NEXT_STEPS, markup=False, highlight=False, soft_wrap=True)


def _rollout(client: Client, console: Console, task_id: str, agent: Callable[[OpenAI, Console], float]) -> str:
    """Run one session: the agent runs, then the environment sets the reward and ends it. Return the session id."""
    from openai import OpenAI

    with client.session(task_id, group_id="demo", discount=DISCOUNT) as session:
        console.rule(f"agent {task_id}: base_url={_without_secret(session)}", align="left")
        with OpenAI(base_url=session.base_url, api_key=session.api_key) as openai:
            reward = agent(openai, console)
        session.set_reward(reward)
        session.end(outcome="Finished")
    console.print()
    return session.session_id


def _without_secret(session: Session) -> str:
    """The agent's address without the secret in its path, which must not be in a terminal's history."""
    shown, _, secret = session.base_url.rpartition("~")
    return f"{shown}~.../v1" if shown else secret


def _chat_agent(openai: OpenAI, console: Console) -> float:
    """Hold a streamed conversation. As an example, the reward is the share of letters in the last reply."""
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": "You are terse."}]
    reply = ""
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        _say(console, "user", question)
        reply = _streamed_reply(openai, messages)
        messages.append({"role": "assistant", "content": reply})
        _say(console, "model", reply)
    return round(sum(map(str.isalpha, reply)) / max(1, len(reply)), 3)


def _streamed_reply(openai: OpenAI, messages: list[ChatCompletionMessageParam]) -> str:
    stream = openai.chat.completions.create(model="demo", messages=messages, max_tokens=REPLY_TOKENS, stream=True)
    return "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)


def add(a: int, b: int) -> int:
    """The tool: a real function that runs in the agent's process."""
    return a + b


_NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
_ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": _NUMBER, "b": _NUMBER},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


def _tool_agent(openai: OpenAI, console: Console) -> float:
    """Make a tool call that the grammar enforces and answer with its result. The reward is 1 if there is a call."""
    question = "What is 17 plus 25? Use the tool."
    _say(console, "user", question)
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": question}]
    asked = openai.chat.completions.create(
        model="demo",
        messages=messages,
        tools=[_ADD],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=CALL_TOKENS,
    )
    calls = [call for call in asked.choices[0].message.tool_calls or () if call.type == "function"]
    assistant: Any = asked.choices[0].message.model_dump(exclude_none=True)
    messages.append(assistant)
    for call in calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": _run_tool(call, console)})
    if not calls:
        return 0.0
    answered = openai.chat.completions.create(model="demo", messages=messages, tools=[_ADD], max_tokens=REPLY_TOKENS)
    _say(console, "model", answered.choices[0].message.content or "(no text)")
    return 1.0


def _run_tool(call: ChatCompletionMessageFunctionToolCall, console: Console) -> str:
    arguments = json.loads(call.function.arguments)
    result = str(add(**arguments))
    _say(console, "call", f"{call.function.name}({call.function.arguments})")
    _say(console, "tool", result)
    return result


def _say(console: Console, who: str, text: str) -> None:
    """Print one line. Unprintable characters become dots, because random bytes can contain control characters."""
    shown = printable(text).replace("\n", "·")
    cut = shown[:SHOWN_CHARACTERS] + ("…" if len(shown) > SHOWN_CHARACTERS else "")
    console.print(Text.assemble((f"{who:>6} ", "dim"), cut))


def _table(samples: list[Sample]) -> Table:
    """The exported samples, one row each."""
    table = Table(title="Export, layout concat", title_justify="left")
    for column in ("session", "turns", "tokens", "trained tokens", "reward", "mean logprob"):
        table.add_column(column, justify="left" if column == "session" else "right")
    for sample in samples:
        table.add_row(escape(sample.session_id), *_numbers(sample))
    return table


def _numbers(sample: Sample) -> tuple[str, ...]:
    trained = sample.loss_mask == 1
    return (
        str(len(sample.turns)),
        str(len(sample.input_ids)),
        str(int(trained.sum())),
        f"{float(sample.rewards[0]):g}",
        f"{float(sample.logprobs[trained].mean()):.3f}" if trained.any() else "-",
    )


NEXT_STEPS = """
To do the same by hand, start a server and point any agent at http://127.0.0.1:8080/<a name of your choice>/v1:

  tokengrove serve
  curl -s http://127.0.0.1:8080/first/v1/chat/completions \\
    -H 'content-type: application/json' \\
    -d '{"model": "any", "max_tokens": 16, "messages": [{"role": "user", "content": "Hello"}]}'
  curl -s http://127.0.0.1:8080/first/rl/set_reward -H 'content-type: application/json' -d '{"reward": 1.0}'
  curl -s http://127.0.0.1:8080/rl/sessions/first
  curl -s http://127.0.0.1:8080/trajectories/export -H 'content-type: application/json' \\
    -d '{"session_id": "first", "layout": "concat"}'
"""
