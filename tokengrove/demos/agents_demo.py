"""Short agents with the stock `openai` package, and the trees and samples that the server recorded of them.

Everything shown is fetched over HTTP, and every answer is sampled: nothing of what is printed was written beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tokengrove.client import Client, Sample, Session, SessionTree
from tokengrove.demos.agents import Agent, chat_agent, tool_agent
from tokengrove.texts import printable
from tokengrove.tree_view import session_tree

DISCOUNT = 0.9
GROUP_SIZE = 4
FIRST_SEED = 6
"""With it, some calls of the group are right and some are wrong."""
SHOWN_CHARACTERS = 72


@dataclass(frozen=True, slots=True)
class Played:
    """A session that has ended: its id, the address that its agent had, and who said what."""

    session_id: str
    base_url: str
    said: tuple[tuple[str, str], ...]


def run_demo(url: str, console: Console, admin_key: str | None = None, *, stays: bool) -> None:
    """Run the agents against the server at `url`, which serves a model with their lessons; print what it recorded.

    `stays`: whether the server still runs when this returns, for the page. Raises the errors of `Client` and `openai`.
    """
    with Client(url, admin_key) as client:
        chat = _play(client, "chat", chat_agent, 0)
        with ThreadPoolExecutor(GROUP_SIZE) as pool:
            sums = list(pool.map(partial(_play, client, "sum", tool_agent), range(GROUP_SIZE)))
        _tell(console, chat, sums)
        trees = [client.session_tree(each.session_id) for each in (chat, *sums)]
        _show(console, trees[:2])
        samples = client.export(session_id=chat.session_id, layout="concat", reward_scope="path").samples
        group = [each.session_id for each in sums]
        samples += client.export(session_ids=group, layout="concat", advantages="grpo").samples
    console.rule("What a trainer gets: samples", align="left")
    console.print(_table(sorted(samples, key=lambda sample: sample.session_id)))
    _explain(console, _count(samples, trees))
    if stays:
        _explain(console, _links(url, trees))
    _explain(console, NEXT_STEPS)


def _tell(console: Console, chat: Played, sums: Sequence[Played]) -> None:
    console.rule("An agent with an address and a key", align="left")
    _transcript(console, chat)
    console.print()
    console.rule(f"{len(sums)} agents with a tool and the same task: a group", align="left")
    _transcript(console, sums[0])
    for each in sums[1:]:
        _line(console, each.session_id, " → ".join(text for who, text in each.said if who != "user"))
    console.print()


def _show(console: Console, trees: Sequence[SessionTree]) -> None:
    console.rule("What the server recorded: trees of turns", align="left")
    _explain(console, TREES)
    for tree in trees:
        console.print(session_tree(tree), soft_wrap=True)
    console.print()


def _play(client: Client, task_id: str, agent: Agent, place: int) -> Played:
    """Run the session at `place` of its group: the agent runs, and its rewards are set."""
    from openai import OpenAI

    said: list[tuple[str, str]] = []
    name = f"{task_id}-{place}"
    with client.session(task_id, session_id=name, group_id=task_id, discount=DISCOUNT) as session:
        with OpenAI(base_url=session.base_url, api_key=session.api_key) as openai:
            rewards = agent(openai, FIRST_SEED + place, lambda who, text: said.append((who, text)))
        for turn, reward in rewards.items():
            session.set_reward(reward, interaction_id=turn)
        session.end(outcome="Finished")
    return Played(session.session_id, _without_secret(session), tuple(said))


def _without_secret(session: Session) -> str:
    """The agent's address without the secret in its path, which must not be in a terminal's history."""
    shown, _, secret = session.base_url.rpartition("~")
    return f"{shown}~.../v1" if shown else secret


def _transcript(console: Console, played: Played) -> None:
    _line(console, played.session_id, f"base_url={played.base_url}")
    for who, text in played.said:
        _line(console, who, text)


def _line(console: Console, who: str, text: str) -> None:
    """Print one line. Unprintable characters become dots, because sampled bytes can contain control characters."""
    shown = printable(text).replace("\n", "·")
    cut = shown[:SHOWN_CHARACTERS] + ("…" if len(shown) > SHOWN_CHARACTERS else "")
    console.print(Text.assemble((f"{who:>7} ", "dim"), cut), soft_wrap=True)


def _table(samples: Sequence[Sample]) -> Table:
    """The exported samples, one row each."""
    table = Table()
    for column in ("session", "turns", "tokens", "trained", "reward", "advantage", "mean logprob"):
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
        "-" if sample.advantage is None else f"{sample.advantage:.2f}",
        f"{float(sample.logprobs[trained].mean()):.3f}" if trained.any() else "-",
    )


def _count(samples: Sequence[Sample], trees: Sequence[SessionTree]) -> str:
    trained = sum(int(sample.loss_mask.sum()) for sample in samples)
    sampled = sum(node.output_tokens for tree in trees for node in tree.interactions)
    share = f"All {sampled}" if trained == sampled else f"{trained} of the {sampled}"
    return f"{share} tokens that the model sampled are trained, each once.\n{ADVANTAGES}\n"


def _links(url: str, trees: Sequence[SessionTree]) -> str:
    """Where to click in the page, and what is there."""
    chat, called = trees[0], trees[1]
    fork = next((node.id for node in chat.interactions if node.reason == "branched"), chat.interactions[-1].id)
    at, last = f"{url}/ui#/session", called.interactions[-1].id
    return f"""\
The same in a browser:

  the sessions with their rewards
    {url}/ui#/sessions
  the fork of {chat.session_id}: its two branches, and what differs between them
    {at}/{chat.session_id}?turn={fork}
  the tokens of {called.session_id}: sampled ones coloured by logprob, the others grey
    {at}/{called.session_id}?turn={last}&show=tokens
  the sample of {called.session_id}: a bar with the trained tokens in green
    {at}/{called.session_id}?show=samples
"""


def _explain(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


TREES = f"""\
A line for each turn: why it is there, its prompt+sampled tokens, its reward, and its return, in which
later rewards count {DISCOUNT} for each turn between. An aligned prompt begins with the tokens of the turn
before, exactly as they were sampled, so both turns are trained as one sample.
"""
ADVANTAGES = """\
Advantages compare the rewards of a group, as GRPO does; chat-0 has no group to be compared with."""
NEXT_STEPS = """\
Next:

  tokengrove demo --train   a trainer learns from samples like these; its curve rises in two to three minutes
  tokengrove serve          a server for your agent: its base_url is http://127.0.0.1:8080/ANY-NAME/v1
  docs/train.md             your agent and your GRPO loop in one file
"""
