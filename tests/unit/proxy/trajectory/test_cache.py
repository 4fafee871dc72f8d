"""The parent of a request: every reason, and the order of preference among equal nodes."""

from __future__ import annotations

from proxy.prompt_ids import PromptIds
from proxy.trajectory.cache import InteractionCache, Node
from proxy.trajectory.matching import identify
from proxy.trajectory.tree import token_ids
from proxy.types import Api, Interaction, Message, Role, Tool, ToolCall, TurnRequest, ids_of
from tests.interactions import interaction
from tokengrove.reasons import Reason

ASK = Message(Role.USER, "ask")
MORE = Message(Role.USER, "more")
SYSTEM = Message(Role.SYSTEM, "be kind")


def answer(text: str = "answer", **more: object) -> Message:
    return Message(Role.ASSISTANT, text)._replace(**more)


def request(
    *messages: Message, tools: tuple[Tool, ...] = (), previous: str | None = None, **options: str
) -> TurnRequest:
    return TurnRequest(Api.CHAT, "m", messages, tools=tools, template_options=options, previous_id=previous)


class Tree:
    """A cache that is filled turn by turn, as the server fills it."""

    def __init__(self) -> None:
        self.cache = InteractionCache()

    def turn(self, name: str, asked: TurnRequest, output: Message | None = None) -> Node:
        identity = identify(asked.messages, asked.tools, asked.template_options)
        match = self.cache.find_parent(asked, identity)
        made: Interaction = interaction(name, seq=len(self.cache.nodes))
        made.parent_id = match.parent.interaction.id if match.parent else None
        made.aligned = match.parent is not None
        made.new_messages, made.output = match.new_messages(asked.messages), output or answer()
        made.reason = self.cache.reason_for(asked, identity, match)
        node = self.cache.node_for(made, identity, match, PromptIds())
        self.cache.add(node)
        return node

    def reason(self, name: str, asked: TurnRequest, output: Message | None = None) -> Reason:
        return self.turn(name, asked, output).interaction.reason


def test_the_first_root_is_first_and_its_child_continued() -> None:
    tree = Tree()
    assert tree.reason("a", request(ASK)) is Reason.FIRST
    node = tree.turn("b", request(ASK, answer(), MORE))
    assert node.interaction.reason is Reason.CONTINUED
    assert node.parent is tree.cache.nodes["a"]
    assert node.interaction.new_messages == (MORE,)


def test_the_same_conversation_again_is_resampled_and_another_message_branched() -> None:
    tree = Tree()
    tree.turn("a", request(ASK))
    assert tree.reason("b", request(ASK)) is Reason.RESAMPLED
    tree.turn("c", request(ASK, answer(), MORE))
    assert tree.reason("d", request(ASK, answer(), MORE)) is Reason.RESAMPLED
    assert tree.reason("e", request(ASK, answer(), ASK)) is Reason.BRANCHED


def test_a_changed_answer_is_rewritten_and_hangs_on_the_last_untouched_one() -> None:
    tree = Tree()
    tree.turn("a", request(ASK))
    tree.turn("b", request(ASK, answer(), MORE), answer("second"))
    node = tree.turn("c", request(ASK, answer(), MORE, answer("edited"), ASK))
    assert (node.interaction.reason, node.interaction.parent_id) == (Reason.REWRITTEN, "a")
    assert node.interaction.new_messages == (MORE, answer("edited"), ASK)
    root = tree.turn("d", request(ASK, answer("edited"), MORE))
    assert (root.interaction.reason, root.interaction.parent_id) == (Reason.REWRITTEN, None)


def test_a_changed_head_is_named_by_what_changed() -> None:
    tree = Tree()
    tree.turn("a", request(SYSTEM, ASK))
    later = (ASK, answer(), MORE)
    assert tree.reason("b", request(SYSTEM, *later, tools=(Tool("f"),))) is Reason.TOOLS_CHANGED
    assert tree.reason("c", request(Message(Role.SYSTEM, "be rude"), *later)) is Reason.SYSTEM_CHANGED
    assert tree.reason("d", request(*later)) is Reason.SYSTEM_CHANGED
    assert tree.reason("e", request(SYSTEM, *later, effort="low")) is Reason.OPTIONS_CHANGED


def test_anything_else_without_a_parent_is_a_new_root() -> None:
    tree = Tree()
    tree.turn("a", request(ASK))
    assert tree.reason("b", request(MORE)) is Reason.NEW_ROOT
    assert tree.reason("c", request(Message(Role.USER, "else"), answer("imported"), ASK)) is Reason.NEW_ROOT


def test_of_equal_nodes_the_one_named_by_previous_id_is_the_parent() -> None:
    tree = Tree()
    for name in ("a", "b", "c"):
        tree.turn(name, request(ASK))
    assert tree.turn("d", request(ASK, answer(), MORE, previous="a")).interaction.parent_id == "a"


def test_of_equal_nodes_the_one_whose_call_ids_were_echoed_comes_next() -> None:
    tree = Tree()
    calls = [answer("", tool_calls=(ToolCall(f"id{number}", "f", "{}"),)) for number in range(3)]
    for number, output in enumerate(calls):
        tree.turn(f"n{number}", request(ASK), output)
    result = Message(Role.TOOL, "r", tool_call_id="id1")
    assert tree.turn("d", request(ASK, calls[1], result)).interaction.parent_id == "n1"


def test_of_equal_nodes_an_echo_of_reasoning_comes_next_also_turns_ago() -> None:
    tree = Tree()
    for name in ("a", "b", "c"):
        tree.turn(name, request(ASK), answer(reasoning=name))
    for name in ("a", "b", "c"):
        tree.turn(f"{name}2", request(ASK, answer(reasoning=name), MORE))
    node = tree.turn("d", request(ASK, answer(reasoning="b"), MORE, answer(), ASK))
    assert node.interaction.parent_id == "b2"


def test_of_equal_nodes_the_newest_comes_last() -> None:
    tree = Tree()
    for name in ("a", "b"):
        tree.turn(name, request(ASK))
    assert tree.turn("c", request(ASK, answer(), MORE)).interaction.parent_id == "b"


def test_a_reserved_node_counts_as_a_sibling_but_cannot_be_continued() -> None:
    tree = Tree()
    asked = request(ASK)
    identity = identify(asked.messages, (), {})
    match = tree.cache.find_parent(asked, identity)
    waiting = tree.cache.node_for(interaction("w"), identity, match, PromptIds())
    tree.cache.reserve(waiting)
    assert tree.cache.reason_for(asked, identity, match) is Reason.RESAMPLED
    tree.cache.release(waiting)
    assert tree.cache.reason_for(asked, identity, match) is Reason.FIRST


def test_the_tokens_of_a_node_are_joined_from_what_each_ancestor_adds() -> None:
    nodes = [
        interaction("a", suffix=[1, 2], output=[3], seq=0),
        interaction("b", parent="a", prefix=3, suffix=[4], output=[5, 6], seq=1),
        interaction("c", parent="b", suffix=[9, 9], output=[7], seq=2),
    ]
    cache = InteractionCache(nodes)
    assert list(token_ids(cache.nodes["b"])) == [1, 2, 3, 4, 5, 6]
    assert list(token_ids(cache.nodes["c"])) == [9, 9, 7]
    for node in cache.nodes.values():
        assert node.ids.joined == token_ids(node)


def test_a_prompt_is_aligned_only_if_it_begins_with_the_ids_of_the_parent() -> None:
    nodes = [
        interaction("a", suffix=[1, 2], output=[3], seq=0),
        interaction("b", parent="a", prefix=3, suffix=[4], output=[5, 6], seq=1),
        interaction("c", parent="a", prefix=3, suffix=[4], output=[5, 7], seq=2),
    ]
    cache = InteractionCache(nodes)
    a, b, c = (cache.nodes[name] for name in "abc")
    prompt = b.ids.extended(ids_of([7]))
    assert list(prompt.joined) == [1, 2, 3, 4, 5, 6, 7]
    assert [cache.proves(node, prompt) for node in (a, b, c)] == [True, True, False]
    assert not cache.proves(b, a.ids.extended(ids_of([4]), ids_of([5, 8])))
    assert not cache.proves(b, PromptIds(prompt.joined))
    assert not cache.proves(b, PromptIds())
