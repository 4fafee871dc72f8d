import json
from pathlib import Path

import numpy as np
import pytest

from proxy.engine.grammar import Grammar, GrammarPart
from proxy.engine.tiny.model import VOCAB_SIZE, build_tiny_model
from proxy.engine.transformers.grammar_compiler import GrammarCompiler
from proxy.engine.transformers.steering import Steering, skeleton
from proxy.rendering.renderer import load_renderer
from proxy.settings import Settings
from proxy.types import Tool
from tokengrove.errors import ConfigurationError, InvalidRequest

pytest.importorskip("llguidance")

OBJECT = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    build_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def compiler(folder: Path) -> GrammarCompiler:
    return GrammarCompiler(folder, VOCAB_SIZE)


@pytest.fixture(scope="module")
def end(tokenizer) -> int:
    return tokenizer.token_to_id("<|im_end|>")


def json_grammar(schema: object) -> Grammar:
    return Grammar(((GrammarPart(schema=schema),),))


def sample(state, end: int, seed: int, max_tokens: int) -> list[int]:
    """Sample uniformly from the allowed tokens: the worst possible weights."""
    random, ids = np.random.default_rng(seed), []
    while len(ids) < max_tokens and (not ids or ids[-1] != end):
        ids.append(int(random.choice(np.nonzero(state.allowed(max_tokens - len(ids)))[0])))
        state.accept(ids[-1])
    return ids


SCHEMAS = [
    OBJECT,
    {"type": "object"},
    {},
    {"type": "array", "items": {"anyOf": [{"type": "null"}, {"type": "number"}]}, "minItems": 3},
    {"type": "object", "properties": {"when": {"type": "string", "format": "date-time"}}, "required": ["when"]},
    {"type": "object", "properties": {"s": {"type": "string", "minLength": 9}}, "required": ["s"]},
    {"type": "string", "pattern": "^[a-c]{4,}$"},
    {"enum": ["one", 2, None, {"three": [3]}]},
    {
        "$defs": {
            "node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"const": 0}]}}}
        },
        "$ref": "#/$defs/node",
    },
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_random_tokens_make_json_that_closes_within_the_budget(compiler, tokenizer, end, schema):
    for seed in range(8):
        ids = sample(compiler.compile(json_grammar(schema), (end,)), end, seed, 120)
        assert ids[-1] == end
        json.loads(tokenizer.decode(ids[:-1], skip_special_tokens=False))


def test_markers_come_only_where_the_grammar_names_them(compiler, tokenizer, end):
    begin, close = tokenizer.token_to_id("<tool_call>"), tokenizer.token_to_id("</tool_call>")
    parts = (GrammarPart(token_id=begin), GrammarPart(schema=OBJECT), GrammarPart(token_id=close))
    for seed in range(10):
        ids = sample(compiler.compile(Grammar((parts,)), (end,)), end, seed, 100)
        assert ids[0] == begin and ids[-2:] == [close, end]
        assert not any(tokenizer.id_to_token(token).startswith("<|") or token in (begin, close) for token in ids[1:-2])


def test_repeat_gives_one_to_many_with_the_separator_between(compiler, tokenizer, end):
    grammar = Grammar(((GrammarPart(text="ab"),), (GrammarPart(text="cd"),)), repeat=True, separator="--")
    texts = {tokenizer.decode(sample(compiler.compile(grammar, (end,)), end, seed, 60)[:-1]) for seed in range(30)}
    assert all(set(text.split("--")) <= {"ab", "cd"} for text in texts)
    assert {text.count("--") for text in texts} >= {0, 1, 2}


def test_after_the_last_part_only_an_end_token_may_follow(compiler, tokenizer, end):
    other_end = tokenizer.token_to_id("<|endoftext|>")
    state = compiler.compile(Grammar(((GrammarPart(text="yes"),),)), (end, other_end))
    for token in tokenizer.encode("yes").ids:
        assert not state.allowed(100)[[end, other_end]].any()
        state.accept(token)
    assert sorted(np.nonzero(state.allowed(100))[0]) == sorted([end, other_end])
    state.accept(other_end)
    assert state.ended


def test_json_may_be_compact_or_with_one_space_but_not_more(compiler, tokenizer, end):
    for text, fits in (('{"a":"x","b":1}', True), ('{"a": "x", "b": 1}', True), ('{"a":  "x"}', False)):
        state = compiler.compile(json_grammar(OBJECT), (end,))
        if fits:
            for token in tokenizer.encode(text).ids:
                state.accept(token)
            assert state.allowed(100)[end]
        else:
            with pytest.raises(ValueError, match="does not allow"):
                for token in tokenizer.encode(text).ids:
                    state.accept(token)


def test_with_enough_budget_the_mask_is_not_narrowed(compiler, tokenizer, end):
    state = compiler.compile(json_grammar(OBJECT), (end,))
    for token in tokenizer.encode('{"a": "').ids:
        state.accept(token)
    assert state.allowed(10_000).sum() > 200 > 3 > state.allowed(10).sum() > 0


CIRCLE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}


@pytest.mark.parametrize(
    "schema",
    [{"type": "nonsense"}, {"$ref": "#/nowhere"}, {"not": {}}, {"pattern": "(?=a)b"}, {"prefixItems": 5}, CIRCLE],
)
def test_an_invalid_schema_is_an_invalid_request_about_tools(compiler, end, schema):
    with pytest.raises(InvalidRequest, match=r"^'tools' cannot be compiled") as refused:
        compiler.compile(json_grammar(schema), (end,))
    assert refused.value.param == "tools" and "\n" not in refused.value.message


def written(compiler: GrammarCompiler, part: GrammarPart, text: str, end: int, tokenizer) -> bool:
    """Return whether `text` is a whole output of `part`."""
    state = compiler.compile(Grammar(((part,),)), (end,))
    try:
        for token in [*tokenizer.encode(text, add_special_tokens=False).ids, end]:
            state.accept(token)
    except ValueError:
        return False
    return state.ended


REGEXES = [
    (r"\d{4}-\d{2}", "2024-05", "2024-5"),
    (r"^yes|no$", "no", "nope"),
    (r"a/b", "a/b", "ab"),
    (r'"[^"/\\]+\/"', '"x/"', '"x"'),
    ("a\nb", "a\nb", "a b"),
    ("a\\\nb", "a\nb", "a\\nb"),
    (r"é+|(?i)ja", "JA", "é!"),
]


@pytest.mark.parametrize(("pattern", "fits", "differs"), REGEXES)
def test_a_regular_expression_matches_the_whole_output(compiler, tokenizer, end, pattern, fits, differs):
    part = GrammarPart(regex=pattern)
    assert written(compiler, part, fits, end, tokenizer) and not written(compiler, part, differs, end, tokenizer)


ARITHMETIC = """
# sums of small numbers
    root ::= term (("+" | "-") term)*
    term ::= [0-9]{1,3}
        | "(" root ")"
        | "{" [ \\t]* "}"
"""
GRAMMARS = [
    (ARITHMETIC, "1+(23-{ })", "1+"),
    ('root ::= "\\"" [^"\\\\\\n]* "\\"" | "x/y"', '"a b"', "x"),
    ('root ::= "a" # one\nother ::= root', "a", "b"),
]


@pytest.mark.parametrize(("ebnf", "fits", "differs"), GRAMMARS)
def test_a_grammar_in_ebnf_matches_the_whole_output(compiler, tokenizer, end, ebnf, fits, differs):
    part = GrammarPart(ebnf=ebnf)
    assert written(compiler, part, fits, end, tokenizer) and not written(compiler, part, differs, end, tokenizer)


MALFORMED = [
    (GrammarPart(regex="a{2"), "unclosed counted repetition"),
    (GrammarPart(regex="(?=a)b"), "look-around"),
    (GrammarPart(ebnf="root ::= ("), "line 1"),
    (GrammarPart(ebnf="root ::= other"), "other"),
    (GrammarPart(ebnf='root ::= "a" # one\n | "b"'), "line 2"),
    (GrammarPart(ebnf='other ::= "a"'), "root|start"),
]


@pytest.mark.parametrize(("part", "reason"), MALFORMED)
def test_a_malformed_pattern_is_an_invalid_request_about_its_field(compiler, end, part, reason):
    grammar = Grammar(((part,),), param="structured_outputs.regex")
    with pytest.raises(InvalidRequest, match=rf"^'structured_outputs.regex' cannot be compiled.*({reason})") as refused:
        compiler.compile(grammar, (end,))
    assert refused.value.param == "structured_outputs.regex" and "\n" not in refused.value.message


def test_a_pattern_is_sampled_to_its_end(compiler, tokenizer, end):
    for seed in range(20):
        state = compiler.compile(Grammar(((GrammarPart(regex="[ab]{3,5}"),),)), (end,))
        ids = sample(state, end, seed, 10)
        assert ids[-1] == end and set(tokenizer.decode(ids[:-1])) <= {"a", "b"}


@pytest.mark.parametrize("depth", [120, 900, 5000])
@pytest.mark.parametrize("name", ["enum", "const", "items", "$ref", "anyOf", "properties"])
def test_a_schema_of_any_depth_is_compiled_or_refused(compiler, end, name, depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {name: [schema] if name in ("enum", "anyOf") else schema}
    try:
        compiler.compile(json_grammar(schema), (end,))
    except InvalidRequest as refused:
        assert refused.param == "tools" and len(refused.message) < 3000


@pytest.mark.parametrize("alternatives", [(), ((),)])
def test_an_empty_grammar_is_refused(compiler, end, alternatives):
    with pytest.raises(InvalidRequest):
        compiler.compile(Grammar(alternatives), (end,))


def test_a_grammar_without_an_end_token_is_refused(compiler):
    with pytest.raises(InvalidRequest, match="end"):
        compiler.compile(json_grammar(OBJECT), ())


def test_states_of_one_grammar_are_independent(compiler, tokenizer, end):
    first, second = (compiler.compile(json_grammar(OBJECT), (end,)) for _ in range(2))
    first.accept(tokenizer.token_to_id("{"))
    assert second.allowed(1000)[tokenizer.token_to_id("{")]


def test_a_folder_without_a_tokenizer_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigurationError, match="llguidance cannot use the tokenizer"):
        GrammarCompiler(tmp_path, 10)


SELF = {"type": "object", "properties": {f"p{number}": {"$ref": "#"} for number in range(200)}}
LISTS = {
    "type": "array",
    "minItems": 10**9,
    "items": {"type": "array", "minItems": 10**9, "items": {"minItems": 10**9}},
}


@pytest.mark.parametrize("schema", [SELF, LISTS, {"allOf": [SELF] * 20}, {"anyOf": [LISTS, SELF]}])
def test_the_estimate_of_a_schema_without_end_is_short(schema):
    assert 0 < len(skeleton(schema)) <= 20_000


def test_scanning_tracks_strings_and_escapes():
    steering = Steering([b'{"a', rb"\"", b"b", b'"}', b"\\", b""])
    state = (False, False)
    seen = [state := steering.scan(token, *state) for token in (0, 1, 2, 4, 3, 5, 3)]
    assert seen == [
        (True, False),
        (True, False),
        (True, False),
        (True, True),
        (True, False),
        (True, False),
        (False, False),
    ]


def test_a_skeleton_names_every_property_and_is_json():
    value = json.loads(skeleton({**OBJECT, "properties": {**OBJECT["properties"], "c": {"items": OBJECT}}}))
    assert list(value) == ["a", "b", "c"] and list(value["c"][0]) == ["a", "b"]


def test_the_skeleton_of_a_recursive_schema_is_finite():
    assert len(skeleton({"properties": {"next": {"$ref": "#"}, "other": {"$ref": "#"}}})) < 20_000


def test_calls_in_a_free_answer_obey_the_pattern_of_their_tool(folder, compiler, tokenizer, end):
    tool = Tool("edit", "", {"type": "object", "properties": {"input": {"type": "string"}}}, pattern=r"a\n[b-d]+")
    grammar = load_renderer(Settings(), folder).held_grammar([tool])

    def allows(text: str) -> bool:
        state = compiler.compile(grammar, (end,))
        for token in tokenizer.encode(text, add_special_tokens=False).ids:
            if not state.allowed(10_000)[token]:
                return False
            state.accept(token)
        return bool(state.allowed(10_000)[end])

    call = '<tool_call>\n{"name": "edit", "arguments": {"input": "%s"}}\n</tool_call>'
    for good in (
        "Only text.",
        "<think>\nhm\n</think>\n\nSo:\n" + call % r"a\nbcd",
        call % r"a\nb" + "\n" + call % r"a\nc",
    ):
        assert allows(good), good
    for bad in (call % "a", call % r"a\nx", call.replace("edit", "other") % r"a\nb"):
        assert not allows(f"So: {bad}"), bad
