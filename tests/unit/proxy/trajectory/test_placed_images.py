"""The images of a prompt are those of the turns that it continues and its own; messages say what theirs take."""

from __future__ import annotations

from dataclasses import replace

from proxy.trajectory.cache import InteractionCache
from proxy.trajectory.conversation import with_tokens
from proxy.trajectory.tree import build_tree, images_of
from proxy.types import ImagePart, Interaction, Message, PlacedImage, Role, ids_of
from tests.interactions import interaction


def placed(digest: str, start: int, length: int) -> PlacedImage:
    return PlacedImage(digest, start, length, 56, 28)


def message(*digests: str) -> Message:
    return Message(Role.USER, "look", images=tuple([ImagePart(digest, 2, 56, 28) for digest in digests]))


def turn(name: str, images: tuple[PlacedImage, ...], **more: object) -> Interaction:
    return replace(interaction(name, **more), images=images)  # type: ignore[arg-type]


def test_a_prompt_has_the_images_of_the_turns_that_it_continues_before_its_own() -> None:
    first = turn("a", (placed("one", 1, 2),), suffix=(1, 9, 9, 1))
    second = turn("b", (placed("two", 6, 3),), parent="a", prefix=5, suffix=(1, 9, 9, 9))
    nodes = build_tree([first, second])
    assert images_of(nodes["b"]) == (*first.images, *second.images)
    assert images_of(nodes["a"]) == first.images


def test_a_prompt_that_was_rendered_anew_has_all_of_its_images_itself() -> None:
    first = turn("a", (placed("one", 1, 2),))
    second = turn("b", (placed("one", 2, 2), placed("two", 6, 3)), parent="a")
    assert images_of(build_tree([first, second])["b"]) == second.images


def test_a_session_that_is_read_again_has_the_images_of_each_whole_prompt() -> None:
    first = turn("a", (placed("one", 1, 2),), suffix=(1, 9, 9, 1))
    second = turn("b", (placed("two", 6, 3),), parent="a", prefix=5, suffix=(1, 9, 9, 9))
    third = turn("c", (), parent="b", prefix=10, suffix=(1,))
    anew = turn("d", (placed("two", 1, 3),), parent="b")
    nodes = InteractionCache([first, second, third, anew]).nodes
    assert nodes["b"].images == nodes["c"].images == (*first.images, *second.images)
    assert nodes["d"].images == anew.images


def test_token_ids_with_other_images_continue_no_turn_with_equal_tokens() -> None:
    mine = turn("a", (placed("one", 1, 2),), suffix=(1, 9, 9, 1), output=(5,))
    other = turn("b", (placed("two", 1, 2),), suffix=(1, 9, 9, 1), output=(5,), seq=1)
    cache = InteractionCache([mine, other])
    ids = ids_of([1, 9, 9, 1, 5, 7])
    for digest, name in (("one", "a"), ("two", "b")):
        assert cache.find_prefix(ids, [placed(digest, 1, 2)]) is cache.nodes[name]
    assert cache.find_prefix(ids, [placed("three", 1, 2)]) is None


def test_each_image_of_a_message_has_the_number_of_its_tokens() -> None:
    shown = with_tokens(
        [message("one"), message(), message("two", "one")],
        [placed("one", 1, 4), placed("two", 9, 5), placed("one", 15, 4)],
    )
    assert [[image["tokens"] for image in each.get("images", ())] for each in shown] == [[4], [], [5, 4]]


def test_messages_at_the_end_of_a_prompt_take_its_last_images() -> None:
    (shown,) = with_tokens([message("two")], [placed("one", 1, 4), placed("two", 9, 5)])
    assert shown["images"] == [{"digest": "two", "at": 2, "width": 56, "height": 28, "tokens": 5}]


def test_no_number_is_given_where_the_prompt_has_other_images_than_the_messages() -> None:
    for images in ([], [placed("two", 9, 5)], [placed("two", 1, 5), placed("one", 9, 4)]):
        shown = with_tokens([message("one", "two")], images)
        assert [set(image) for image in shown[0]["images"]] == [{"digest", "at", "width", "height"}] * 2


def test_messages_without_images_are_as_they_were() -> None:
    plain = {"role": "user", "content": "look"}
    assert with_tokens([message()], []) == with_tokens([message()], [placed("one", 1, 4)]) == [plain]
