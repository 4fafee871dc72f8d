"""The turn panel in a browser: every kind of turn, why a turn forked, what is copied, and what is saved."""

from __future__ import annotations

import io
import json
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import expect

from tests.browser import episodes, hostile, servers
from tests.browser.views import session, wait
from tests.support import default_url

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

    from tests.browser.conftest import Opened

CHAT, RESPONSES, MESSAGES = "v1/chat/completions", "v1/responses", "v1/messages"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
ADD = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}
READ = "curl: read, a command that shows this turn"
RESEND = "curl: resend, a command that sends this turn again"
ASK = "Please add 3 and 4."
LONG = 16_000


def turn(opened: Opened, url: str, name: str, number: int | str, **options: Any) -> tuple[Page, Locator]:
    """Open a turn; return the page and the panel."""
    page = opened(url + session(name, f"?turn={number}"), **options)
    panel = page.locator(".turn")
    expect(panel.locator(".turn-head")).to_be_visible()
    wait(page)
    return page, panel


def post(url: str, path: str, body: Any, **headers: str) -> Any:
    answer = httpx.post(f"{url}/{path}", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def turns(url: str, name: str) -> list[Any]:
    found: list[Any] = httpx.get(f"{url}/rl/sessions/{name}").json()["interactions"]
    return found


def clipboard(page: Page) -> str:
    text: str = page.evaluate("navigator.clipboard.readText()")
    return text


def copied(page: Page, panel: Locator, button: str) -> str:
    """Press a copy button; return what is in the clipboard once the page says that it has copied."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    found = panel.get_by_role("button", name=f"Copy {button}", exact=True)
    found.click()
    expect(found.get_by_text("copied", exact=True)).to_be_visible()
    return clipboard(page)


def test_a_rewritten_answer_is_shown_word_by_word_beside_the_reason(url: str, opened: Opened) -> None:
    page, panel = turn(opened, url, episodes.FORKED, 6)
    fork = panel.get_by_role("region", name="Why it forked")
    expect(fork).to_contain_text("An earlier answer of the model was replaced by another assistant message")
    expect(fork).to_contain_text("the text of the message differs")
    expect(fork.locator("ins")).to_have_text([", or not"])
    expect(fork.locator("del")).to_have_count(0)
    fork.get_by_role("link", name=re.compile(r"^turn \d+$")).first.click()
    expect(page.locator(".turn-head h2")).not_to_have_text("Turn 6")
    expect(page.locator(".turn-head")).to_be_visible()


def test_every_reason_of_a_fork_is_said_in_the_words_of_the_server(url: str, opened: Opened) -> None:
    meanings = httpx.get(f"{url}/rl/reasons").json()["reason"]
    forks = [found for found in turns(url, episodes.FORKED) if found["reason"] not in ("first", "continued")]
    assert len(forks) > 5
    page, panel = turn(opened, url, episodes.FORKED, forks[0]["turn"])
    for found in forks:
        page.goto(url + session(episodes.FORKED, "?turn=" + found["interaction_id"]))
        expect(panel.locator(".turn-head h2")).to_have_text(f"Turn {found['turn']}")
        expect(panel.locator(".turn-fork")).to_contain_text(meanings[found["reason"]])


def test_tools_options_and_tokens_that_differ_are_shown(url: str, opened: Opened) -> None:
    number = {found["reason"]: found["turn"] for found in turns(url, episodes.FORKED)}
    _, panel = turn(opened, url, episodes.FORKED, number["tools_changed"])
    expect(panel.locator(".turn-fork ins")).to_contain_text('"name": "fetch"')
    _, panel = turn(opened, url, episodes.FORKED, number["options_changed"])
    expect(panel.locator(".turn-fork ins")).to_contain_text("enable_thinking")
    _, panel = turn(opened, url, episodes.FORKED, number["system_changed"])
    expect(panel.locator(".turn-fork ins").first).to_be_visible()
    _, panel = turn(opened, url, "forks/template", 1)
    rows = panel.locator(".turn-tokens tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("<think>")
    expect(rows.first.locator("td").first).to_have_text(re.compile(r"^\d+( \d+){7}$"))


def test_what_the_turn_before_had_is_folded_and_counted(url: str, opened: Opened) -> None:
    _, panel = turn(opened, url, "chain/plain", 2)
    conversation = panel.get_by_role("region", name="Conversation")
    expect(conversation.locator(".turn-message")).to_have_count(2)
    earlier = conversation.locator(".turn-earlier")
    expect(earlier.locator("summary").first).to_contain_text("5 earlier messages")
    earlier.locator("summary").first.click()
    expect(earlier.locator("> ol > .turn-message")).to_have_count(5)


@pytest.mark.parametrize("api", [CHAT, RESPONSES, MESSAGES])
def test_calls_and_their_results_are_linked_in_each_api(url: str, opened: Opened, api: str) -> None:
    name = f"panel/calls-{api.replace('/', '-')}"
    _CALLS[api](url, name)
    _, panel = turn(opened, url, name, 0)
    call = panel.locator(".turn-answer .turn-call")
    expect(call.locator(".turn-call-name")).to_have_text("add")
    expect(call.locator("pre")).to_have_text('{\n  "a": 3,\n  "b": 4\n}')
    _, panel = turn(opened, url, name, 1)
    expect(panel.locator(".turn-tool")).to_contain_text("result of add in message 1")
    expect(panel.locator(".turn-tool pre")).to_have_text("7")
    expect(panel.locator(".turn-answer")).to_contain_text("Here is what came back: 7")
    panel.get_by_text("Tools (1)").click()
    expect(panel.locator(".turn-tools")).to_contain_text("add")


def _chat(url: str, name: str) -> None:
    history: list[Any] = [{"role": "user", "content": ASK}]
    answer = post(url, f"{name}/{CHAT}", {"model": "m", "messages": history, "tools": [ADD]})["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "7"}
    post(url, f"{name}/{CHAT}", {"model": "m", "messages": [*history, answer, result], "tools": [ADD]})


def _responses(url: str, name: str) -> None:
    body = {"model": "m", "tools": [{"type": "function", **ADD["function"]}]}  # type: ignore[dict-item]
    first = post(url, f"{name}/{RESPONSES}", {**body, "input": ASK})
    (call,) = [item for item in first["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "7"}
    post(url, f"{name}/{RESPONSES}", {**body, "input": [result], "previous_response_id": first["id"]})


def _messages(url: str, name: str) -> None:
    tool = {"name": "add", "description": "adds", "input_schema": SCHEMA}
    body = {"model": "m", "max_tokens": 100, "tools": [tool]}
    history: list[Any] = [{"role": "user", "content": ASK}]
    content = post(url, f"{name}/{MESSAGES}", {**body, "messages": history})["content"]
    (use,) = [block for block in content if block["type"] == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "7"}
    history += [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    post(url, f"{name}/{MESSAGES}", {**body, "messages": history})


_CALLS = {CHAT: _chat, RESPONSES: _responses, MESSAGES: _messages}


def test_reasoning_is_folded_and_the_bar_says_how_the_time_was_spent(url: str, opened: Opened) -> None:
    _, panel = turn(opened, url, "chain/plain", 0)
    reasoning = panel.locator(".turn-answer .turn-reasoning")
    expect(reasoning.locator("pre")).to_be_hidden()
    reasoning.locator("summary").click()
    expect(reasoning.locator("pre")).to_contain_text("Step 0: look at what fails first.")
    expect(panel.locator(".turn-times")).to_have_text(re.compile(r"to the first token.*sampling.*in all", re.S))
    expect(panel.locator(".turn-facts")).to_contain_text("reasoning")


def test_failed_turns_say_their_error_in_full_and_keep_what_was_sampled(url: str, opened: Opened) -> None:
    failed = {found["status"]: found for found in turns(url, "failures/all")}
    assert {"failed", "aborted", "superseded"} <= failed.keys()
    for status in ("failed", "aborted", "superseded"):
        _, panel = turn(opened, url, "failures/all", failed[status]["interaction_id"])
        error = panel.locator(".turn-error")
        expect(error).to_contain_text(failed[status]["error"])
        expect(error).to_contain_text(httpx.get(f"{url}/rl/reasons").json()["status"][status])
        expect(panel.locator(".turn-answer pre")).not_to_be_empty()


def test_notes_are_said_in_words_and_a_prefill_is_told_apart(url: str, opened: Opened) -> None:
    name = "panel/notes"
    history: list[Any] = [{"role": "user", "content": "Say more."}, {"role": "assistant", "content": "Begun: "}]
    fields = {"continue_final_message": True, "add_generation_prompt": False, "length_penalty": 1.2}
    post(url, f"{name}/{CHAT}", {"model": "m", "messages": history, **fields})
    _, panel = turn(opened, url, name, 0)
    notes = panel.locator(".turn-notes")
    expect(notes).to_contain_text("length_penalty fields of the request that had no effect")
    expect(notes).to_contain_text("how many characters of the answer's text the client wrote itself")
    expect(panel.locator(".turn-prefill")).to_have_text("Begun: ")
    expect(panel.locator(".turn-answer")).to_contain_text("the client wrote the first 7 characters of the text")


def test_an_echo_is_explained(url: str, opened: Opened) -> None:
    name = "panel/echo"
    properties = {**SCHEMA["properties"], "c": {"type": "integer"}}  # type: ignore[dict-item]
    function = {"name": "add", "description": "adds", "parameters": {**SCHEMA, "properties": properties}}
    tools = {"model": "m", "tools": [{"type": "function", "function": function}]}
    history: list[Any] = [{"role": "user", "content": ASK}]
    answer = post(url, f"{name}/{CHAT}", {**tools, "messages": history})["choices"][0]["message"]
    (call,) = answer["tool_calls"]
    given = {**json.loads(call["function"]["arguments"]), "c": None}
    twice = {**call, "function": {**call["function"], "arguments": json.dumps(given)}}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "7"}
    post(url, f"{name}/{CHAT}", {**tools, "messages": [*history, {**answer, "tool_calls": [twice]}, result]})
    (echo,) = turns(url, name)[1]["notes"]["echo"]
    _, panel = turn(opened, url, name, 1)
    meaning = httpx.get(f"{url}/rl/reasons").json()["echo"][echo]
    expect(panel.locator(".turn-notes")).to_contain_text(meaning)


@pytest.mark.parametrize("api", [CHAT, RESPONSES, MESSAGES])
def test_the_copied_command_sends_the_same_prompt_again(url: str, opened: Opened, api: str) -> None:
    name = f"panel/again-{api.replace('/', '-')}"
    _CALLS[api](url, name)
    page, panel = turn(opened, url, name, 1)
    command = copied(page, panel, RESEND)
    expect(panel.get_by_text("The prompt will have the same token ids.")).to_be_visible()
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
    assert "Here is what came back: 7" in ran.stdout, ran.stdout + ran.stderr
    before, after = (httpx.get(f"{url}/rl/sessions/{name}/interactions/{n}?include=ids").json() for n in (1, 2))
    assert after["prompt_ids"] == before["prompt_ids"] and after["reason"] == "resampled"


def test_a_turn_of_a_session_that_has_ended_is_sent_to_a_new_one_with_all_digits(url: str, opened: Opened) -> None:
    name, seed = "panel/over", 2**63 - 1
    body = {"model": "m", "messages": [{"role": "user", "content": "It's 1 of $HOME"}], "seed": seed}
    post(url, f"{name}/{CHAT}", body)
    post(url, f"{name}/rl/end_session", {"reward": 1.0})
    page, panel = turn(opened, url, name, 0)
    expect(panel.get_by_text(f"seed {seed}")).to_be_visible()
    command = copied(page, panel, RESEND)
    expect(panel.get_by_text(f"it becomes the first turn of a new one, {name}-again")).to_be_visible()
    subprocess.run(["bash", "-c", command], capture_output=True, check=True, timeout=30)
    shown = httpx.get(f"{url}/rl/sessions/{name}-again/interactions/0?include=messages").json()
    assert shown["messages"] == body["messages"] and shown["sampling"]["seed"] == seed


def test_the_copied_command_reads_the_turn(url: str, opened: Opened) -> None:
    page, panel = turn(opened, url, "javascript:alert+1", 0)
    command = copied(page, panel, READ)
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
    shown = json.loads(ran.stdout)
    assert shown["session_id"] == "javascript:alert+1" and {"messages", "reply", "compared"} <= shown.keys()
    assert copied(page, panel, "the answer as text") == shown["output"]["content"]
    assert copied(page, panel, "the id of the turn") == shown["interaction_id"]


def test_commands_never_hold_the_admin_key(tmp_path: Path, opened: Opened) -> None:
    key = {"authorization": f"Bearer {servers.ADMIN_KEY}"}
    with servers.serving(default_url(tmp_path), admin_key=servers.ADMIN_KEY) as url:
        post(url, "rl/start_session", {"session_id": "s"}, **key)
        post(url, f"s/{CHAT}", {"model": "m", "messages": [{"role": "user", "content": "hi"}]}, **key)
        page = opened(url)
        page.evaluate("key => sessionStorage.setItem('tokengrove-admin-key', key)", servers.ADMIN_KEY)
        page.goto(url + session("s", "?turn=0"))
        page.reload()
        opened.watched.allow("401")
        panel = page.locator(".turn")
        for label in (READ, RESEND):
            command = copied(page, panel, label)
            assert '-H "authorization: Bearer $TOKENGROVE_ADMIN_KEY"' in command and servers.ADMIN_KEY not in command
            environment = {"TOKENGROVE_ADMIN_KEY": servers.ADMIN_KEY, "PATH": "/usr/bin:/bin"}
            ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30, env=environment)
            assert "error" not in json.loads(ran.stdout) or json.loads(ran.stdout)["error"] is None
        assert len(httpx.get(f"{url}/rl/sessions/s", headers=key).json()["interactions"]) == 2
        page.context.close()


def test_a_session_and_its_samples_are_saved_whole(url: str, opened: Opened) -> None:
    page, panel = turn(opened, url, "chain/plain", 0)
    whole = json.loads(saved(page, panel, "session JSON", "chain_plain.json"))
    assert [found["added"]["output"]["role"] for found in whole["interactions"]] == ["assistant"] * 6
    panel.get_by_label("export").select_option("individual")
    samples = json.loads(saved(page, panel, "JSON", "chain_plain.individual.json"))["samples"]
    assert len(samples) == 6
    panel.get_by_label("export").select_option("concat")
    with np.load(io.BytesIO(saved(page, panel, "npz", "chain_plain.concat.npz"))) as arrays:
        assert sum(array.size for array in arrays.values()) > 0


def saved(page: Page, panel: Locator, button: str, name: str) -> bytes:
    with page.expect_download() as waiting:
        panel.get_by_role("button", name=button, exact=True).click()
    assert waiting.value.suggested_filename == name
    return Path(waiting.value.path()).read_bytes()


def test_names_of_files_hold_nothing_that_a_session_id_brings(url: str, opened: Opened) -> None:
    page, panel = turn(opened, url, "日本", 0)
    saved(page, panel, "session JSON", "_.json")


def test_a_megabyte_is_drawn_bit_by_bit(url: str, opened: Opened) -> None:
    _, panel = turn(opened, url, episodes.LONG_LINES, 0)
    message = panel.locator(".turn-user pre")
    drawn = "element => element.textContent.length"
    assert message.evaluate(drawn) < 5_000 < len(hostile.LONG_LINE)
    before = message.evaluate(drawn)
    panel.locator(".turn-user").get_by_role("button", name="Show the next 50,000").click()
    expect(panel.locator(".turn-user").get_by_role("button", name="Show the next")).to_contain_text("of 9")
    assert message.evaluate(drawn) == before + 50_000


def test_long_texts_that_differ_all_over_are_compared_by_lines_and_the_page_says_so(url: str, opened: Opened) -> None:
    name = "panel/long"
    for text in ("tree " * LONG + "x", "word " * LONG + "y"):
        post(url, f"{name}/{CHAT}", {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": text}]})
    _, panel = turn(opened, url, name, 1)
    fork = panel.locator(".turn-fork")
    expect(fork).to_contain_text("Compared line by line: the texts are long.")
    expect(fork.locator("del")).to_contain_text("more characters")
    assert fork.evaluate("element => element.textContent.length") < 60_000 < 5 * LONG


def test_hostile_texts_are_drawn_as_they_are(url: str, opened: Opened) -> None:
    for number in range(4):
        page, panel = turn(opened, url, episodes.HOSTILE, number)
        for summary in panel.locator(".turn-settings summary").all():
            summary.click()
        for button in panel.locator(".turn-more").all():
            button.click()
        expect(panel).to_contain_text(hostile.SCRIPT)
        expect(panel.locator(".mark").first).to_be_visible()
        page.context.close()


def test_a_turn_that_cannot_be_read_says_so_and_is_asked_for_again(url: str, opened: Opened) -> None:
    page = opened(url)
    opened.watched.allow("500")
    broken = {"status": 500, "json": {"error": {"message": "The disk is gone."}}}
    page.route("**/interactions/**", lambda route: route.fulfill(**broken))
    page.goto(url + session("chain/plain", "?turn=1"))
    expect(page.get_by_text("The disk is gone.")).to_be_visible()
    page.unroute("**/interactions/**")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".turn-head h2")).to_have_text("Turn 1")
