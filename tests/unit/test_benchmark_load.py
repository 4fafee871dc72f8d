"""The load of the benchmark: its model folder, what the engine samples, its sessions, and the delays of streams."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.measures import delays_of
from benchmarks.model import CALL, Model, write_model
from benchmarks.sampling import SHORTEST, SHORTEST_CALL, Sampler
from benchmarks.sessions import Play, Session, shapes, workload


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return Model(folder)


def test_equal_seeds_write_equal_folders(model: Model, tmp_path: Path) -> None:
    write_model(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        path.name: path.read_bytes() for path in model.folder.iterdir()
    }


def test_another_tokenizer_gets_the_missing_special_tokens(model: Model, tmp_path: Path) -> None:
    write_model(tmp_path / "again", model.folder)
    assert (tmp_path / "again" / "tokenizer.json").read_text() == (model.folder / "tokenizer.json").read_text()


def test_no_answer_is_what_a_tokenizer_makes_of_its_text(model: Model) -> None:
    sampler = Sampler(model)
    for number in range(200):
        answer = sampler.answer(f"0.{number}.0", SHORTEST + number, None)
        assert len(answer.ids) == SHORTEST + number
        assert model.encode(answer.text) != answer.ids[:-1]
        assert model.decode(answer.ids[:-1]) == answer.text


def test_an_answer_with_a_call_has_the_asked_length(model: Model) -> None:
    answer = Sampler(model).answer("123456.78.9", SHORTEST_CALL, "search")
    assert len(answer.ids) == SHORTEST_CALL
    assert answer.text.startswith(answer.content + "\n" + CALL)
    assert answer.call is not None and answer.call[0] == "search"


def test_an_answer_that_is_too_short_for_its_call_is_refused_with_the_least_number(model: Model) -> None:
    with pytest.raises(ValueError, match=r"needs at least \d+ tokens, not 8"):
        Sampler(model).answer("0.0.0", 8, "search")


def test_a_prompt_is_the_template_encoded_as_one_text(model: Model) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "run", "arguments": '{"query":"x"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "found"},
    ]
    ids = model.render(messages, None)
    text = model.decode(ids)
    assert model.encode(text) == ids
    assert '{"name": "run", "arguments": {"query": "x"}}' in text


def test_every_shape_continues_only_earlier_turns_and_has_room_for_its_answers() -> None:
    kinds = {shape.kind for shape in shapes()}
    assert kinds == {"recorded", "compaction", "forks", "images"}
    for shape in shapes():
        for index, turn in enumerate(shape.turns):
            assert turn.parent is None or turn.parent < index
            assert turn.output >= (SHORTEST_CALL if turn.calls else SHORTEST)


def test_forks_and_compactions_are_in_the_shapes_of_these_names() -> None:
    by_kind = {shape.kind: [turn.parent for turn in shape.turns] for shape in shapes()}
    parents = [parent for parent in by_kind["forks"] if parent is not None]
    assert len(parents) > len(set(parents))
    assert by_kind["compaction"].count(None) == 2


def test_a_later_turn_echoes_the_answer_and_answers_its_call() -> None:
    shape = next(shape for shape in shapes() if shape.name.startswith("openai-agents"))
    play = Play(Session(5, shape, 0))
    first = play.body(0, False)
    assert first["messages"][-1]["content"].endswith("[turn 5.0 call search]")
    call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    play.take(first, {"role": "assistant", "content": "#5.0.0 so", "tool_calls": [call]})
    second = play.body(1, True)
    assert second["messages"][: len(first["messages"])] == first["messages"]
    assert second["messages"][len(first["messages"])]["tool_calls"] == [call]
    assert second["messages"][-1]["role"] == "tool" and second["messages"][-1]["tool_call_id"] == "c1"
    assert second["stream"] is True


def test_a_screenshot_follows_the_result_of_a_tool() -> None:
    shape = next(shape for shape in shapes() if shape.kind == "images")
    play = Play(Session(5, shape, 0))
    call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    play.take(play.body(0, False), {"role": "assistant", "content": "#5.0.0 so", "tool_calls": [call]})
    result, shown = play.body(1, False)["messages"][-2:]
    assert (result["role"], result["tool_call_id"], shown["role"]) == ("tool", "c1", "user")
    assert shown["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")


def test_sessions_of_a_group_share_their_system_prompt_and_nothing_else() -> None:
    bodies = [Play(session).body(0, False) for session in workload(2) if session.group == 1]
    systems, users = zip(*(body["messages"] for body in bodies), strict=True)
    assert systems[0] == systems[1] and users[0] != users[1]


def test_a_part_has_arrived_with_the_first_event_that_has_all_its_text() -> None:
    parts = [(100, 1, 2), (200, 2, 4), (300, 3, 6), (350, 4, 6)]
    arrivals = [(150, 2), (320, 6)]
    assert delays_of(parts, arrivals) == [50, 120, 20]


def test_a_part_that_never_arrived_has_no_delay() -> None:
    assert delays_of([(100, 1, 2), (200, 2, 4)], [(150, 2)]) == [50]
