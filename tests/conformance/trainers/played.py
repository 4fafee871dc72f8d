"""Sessions with rewards on a real server, for trainers to read: two tasks, each a group of four attempts."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from tokengrove.client import Client

GROUPS = ("g1", "g2")
TRIES = 4


def play(url: str, group: str, number: int, *, turns: int = 2) -> str:
    """One session of some turns; try number n is rewarded with n."""
    with Client(url) as client, client.session(group, group_id=group) as session:
        messages: list[dict[str, Any]] = []
        for turn in range(turns):
            messages.append({"role": "user", "content": f"question {turn} of try {number}"})
            messages.append(ask(session.base_url, messages))
        session.set_reward(float(number))
    return session.session_id


def ask(base_url: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that answers a conversation."""
    body = json.dumps({"model": "m", "messages": messages}).encode()
    request = urllib.request.Request(base_url + "/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        message: dict[str, Any] = json.loads(response.read())["choices"][0]["message"]
    return message
