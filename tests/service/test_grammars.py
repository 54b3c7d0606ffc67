"""Grammars and where Sequences stand in them, without an engine."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLParserLimits
from tiny_tokenizer import END, tiny_tokenizer

from service import grammars as module
from service.constraint import Constraint, ConstraintKind
from service.errors import Draining, QueueFull
from service.grammars import Grammar, GrammarRefused, Grammars, MaskWorker, Matcher

VOCABULARY = tiny_tokenizer().vocabulary
ENDS = [END, 0]


@pytest.fixture
async def grammars() -> AsyncIterator[Grammars]:
    made = Grammars(tiny_tokenizer(), VOCABULARY, ENDS)
    yield made
    made.close()


def allowed(matcher: Matcher) -> set[int]:
    """The tokens that may come next."""
    mask = np.empty(matcher.mask_words, np.int32)
    matcher.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def ids_of(text: str) -> list[int]:
    return tiny_tokenizer().encode(text, add_special_tokens=False)


def write(matcher: Matcher, text: str) -> bool:
    """Whether the text can come, token by token."""
    for token in ids_of(text):
        if matcher.is_over or token not in allowed(matcher):
            return False
        matcher.advance(token)
    return True


async def matcher_of(grammars: Grammars, kind: ConstraintKind, text: str = "", ends: list[int] = ENDS) -> Matcher:
    return (await grammars.compile(Constraint(kind, text))).start(ends)


# ---------------------------------------------------------------- compiling


async def test_a_constraint_is_compiled_once_and_off_the_event_loop(grammars: Grammars, monkeypatch: Any) -> None:
    threads, compile_ = [], Grammars._compile

    def noted(self: Grammars, constraint: Constraint) -> Grammar:
        threads.append(threading.current_thread())
        return compile_(self, constraint)

    monkeypatch.setattr(Grammars, "_compile", noted)
    asked = [Constraint("regex", "ab"), Constraint("regex", "ab"), Constraint("regex", "cd")]
    found = await asyncio.gather(*map(grammars.compile, asked))
    assert found[0] is found[1] is await grammars.compile(asked[0]) is grammars.cached(asked[0])
    assert found[2] is not found[0]
    assert len(threads) == 2
    assert threading.current_thread() not in threads


async def test_what_is_kept_is_bounded_by_number_and_bytes_and_the_oldest_goes(
    grammars: Grammars, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "CACHED_GRAMMARS", 2)
    a, b, c = (Constraint("regex", letter) for letter in "abc")
    for each in (a, b, a, c):
        await grammars.compile(each)
    assert [grammars.cached(each) is not None for each in (a, b, c)] == [True, False, True]
    monkeypatch.setattr(module, "CACHED_BYTES", 20)
    long = Constraint("regex", "x" * 19)
    await grammars.compile(long)
    assert [grammars.cached(each) is not None for each in (a, c, long)] == [False, True, True]
    grammars.forget(long)
    grammars.forget(long)
    await grammars.compile(Constraint("regex", "y" * 19))
    assert grammars.cached(c) is not None


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is compiled, nor refused, before it is set."""
    gate = threading.Event()
    monkeypatch.setattr(Grammars, "_compile", lambda self, constraint: gate.wait())
    yield gate
    gate.set()


async def test_a_client_waits_for_the_compiler_for_a_bounded_time_only(
    grammars: Grammars, gate: threading.Event, monkeypatch: Any
) -> None:
    """It hears whether its own constraint takes so long, or those of others, and it may come again."""
    monkeypatch.setattr(module, "COMPILE_S", 0.05)
    with pytest.raises(GrammarRefused, match=r"more than 0\.05 s"):
        await grammars.check(Constraint("regex", "a"))
    with pytest.raises(QueueFull, match="other grammars"):
        await grammars.check(Constraint("regex", "b"))
    monkeypatch.setattr(module, "MAX_COMPILING", 1)
    with pytest.raises(QueueFull, match="waiting to be compiled"):
        await grammars.check(Constraint("regex", "c"))


async def test_what_nobody_waits_for_any_more_is_not_compiled(grammars: Grammars, monkeypatch: Any) -> None:
    gate, compiled = threading.Event(), []

    def compile_(self: Grammars, constraint: Constraint) -> str:
        compiled.append(constraint.text)
        gate.wait()
        return constraint.text

    monkeypatch.setattr(Grammars, "_compile", compile_)
    first, left, stays = (asyncio.ensure_future(grammars.compile(Constraint("regex", each))) for each in "abc")
    other = asyncio.ensure_future(grammars.compile(Constraint("regex", "c")))
    await asyncio.sleep(0)
    for task in (left, stays):
        task.cancel()
        await asyncio.wait([task])
    gate.set()
    assert [await first, await other] == ["a", "c"]
    assert compiled == ["a", "c"]
    assert await grammars.compile(Constraint("regex", "b")) == "b"


async def test_whoever_waits_for_the_compiler_at_the_end_is_told_at_once(
    grammars: Grammars, gate: threading.Event
) -> None:
    """Whether it has begun or not; and whoever comes later."""
    wanted = [Constraint("regex", f"a{{{count}}}") for count in (1, 2)]
    waiting = [asyncio.ensure_future(grammars.check(each)) for each in wanted]
    while not grammars._begun:  # noqa: ASYNC110 - it begins in a thread
        await asyncio.sleep(0.001)
    grammars.close()
    for each in waiting:
        with pytest.raises(Draining):
            await each
    with pytest.raises(Draining):
        await grammars.check(Constraint("regex", "b"))


async def test_a_small_constraint_does_not_wait_for_a_large_one(grammars: Grammars, monkeypatch: Any) -> None:
    gate, compile_ = threading.Event(), Grammars._compile

    def held(self: Grammars, constraint: Constraint) -> Grammar:
        if len(constraint.text) > module.SMALL_BYTES:
            gate.wait()
        return compile_(self, constraint)

    monkeypatch.setattr(Grammars, "_compile", held)
    large = asyncio.ensure_future(grammars.compile(Constraint("regex", "a" * (module.SMALL_BYTES + 1))))
    await asyncio.sleep(0)
    await grammars.check(Constraint("regex", "ab"))
    assert not large.done()
    gate.set()
    await large


REFUSED: list[tuple[ConstraintKind, str, str]] = [
    ("regex", "([", "unclosed"),
    ("regex", "(?<=x)*", "look-around"),
    ("regex", r"(a)\1", "backreference"),
    ("regex", "", "empty"),
    ("regex", "(" * 60_000, "regex"),
    ("choice", "[]", "empty"),
    ("lark", "start: (", ""),
    ("lark", "start: nowhere", "nowhere"),
    ("lark", "start: a\na: a", "no text"),
    ("lark", 'start: ""', "empty"),
    ("lark", 'start: %json {"uniqueItems": true}', "uniqueItems"),
    ("lark", 'start: %json {"type": ', "JSON"),
    ("lark", 'start: %json {"x-guidance": {"lenient": true}}', "x-guidance"),
    ("lark", "start: " + '%json {"items":' * 60 + "1", ""),
    ("lark", "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(3000)) + 'r3000: "b"', "1000 rules"),
    ("lark", "root ::= (", "GBNF"),
    ("lark", "root ::= " + "(" * 50_000, "nested"),
    ("json_schema", "{", "read"),
    ("json_schema", '{"type": 3}', ""),
    ("json_schema", '{"enum": []}', "Unsatisfiable"),
    ("json_schema", '{"allOf": [{"type": "string"}, {"type": "number"}]}', "Unsatisfiable"),
    ("json_schema", "false", "nothing"),
    ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}', "no text"),
    ("json_schema", '{"format": "nonsense"}', "format"),
    ("json_schema", '{"pattern": "(a"}', "regex"),
    ("json_schema", '{"pattern": "%s"}' % ("(" * 60_000), "regex"),
    ("json_schema", '{"oneOf": [{"minimum": 1}, {"maximum": 3}]}', "oneOf"),
    ("json_schema", '{"items": ' * 50_000 + "1" + "}" * 50_000, "deep"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "words"), REFUSED, ids=range(len(REFUSED)))
async def test_what_cannot_be_kept_to_is_refused_with_the_reason(
    grammars: Grammars, kind: ConstraintKind, text: str, words: str
) -> None:
    with pytest.raises(GrammarRefused) as refused:
        await grammars.compile(Constraint(kind, text))
    message = str(refused.value)
    assert words in message
    assert 0 < len(message) <= 600
    assert "\n" not in message
    assert "<state>" not in message


HUGE: list[tuple[ConstraintKind, str]] = [
    ("regex", "((a{0,100000}){0,100000}){0,100000}b"),
    ("regex", "(a|b)*a(a|b){18}"),
    ("lark", "start: R0\n" + "".join(f'R{i}: "a" R{i + 1}\n' for i in range(990)) + 'R990: "b"'),
    ("lark", "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(990)) + 'r990: "b"'),
    ("lark", "start: r0\n" + "".join(f'r{i}: r{i + 1} | "a"\n' for i in range(990)) + 'r990: "b"'),
    ("lark", 'start: a\na: a a | "a" | a "b" a'),
    ("json_schema", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(1500)}})),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "text"), HUGE, ids=range(len(HUGE)))
async def test_what_is_large_is_compiled_and_goes_on_in_the_pool(
    grammars: Grammars, kind: ConstraintKind, text: str
) -> None:
    """Threads of the pool have small stacks: a grammar that overflowed one would end the process."""
    grammar, random, worker = await grammars.compile(Constraint(kind, text)), np.random.default_rng(0), MaskWorker()
    matchers = [grammar.start(ENDS) for _ in range(module.FEW_ROWS + 2)]
    masks = np.zeros((len(matchers), matchers[0].mask_words), np.int32)
    sampled: list[tuple[Matcher, int]] = []
    for _ in range(30):
        await worker.turn(sampled, matchers, masks)
        live = [(each, mask) for each, mask in zip(matchers, masks, strict=True) if not each.is_over]
        sampled = [
            (each, int(random.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")))))
            for each, mask in live
        ]
    assert not any(each.error for each in matchers)
    worker.close()


# ---------------------------------------------------------------- what may come next


async def test_only_what_the_grammar_admits_may_come_and_then_the_text_is_complete(grammars: Grammars) -> None:
    matcher = await matcher_of(grammars, "regex", "a[bc]d")
    assert allowed(matcher) >= set(ids_of("a"))
    assert not allowed(matcher) & set(ENDS)
    for letter in "acd":
        (token,) = ids_of(letter)
        assert not matcher.is_over
        matcher.advance(token)
    assert matcher.is_complete
    assert not matcher.error


async def test_end_tokens_may_come_where_the_text_may_end_and_nowhere_else(grammars: Grammars) -> None:
    matcher = await matcher_of(grammars, "regex", "a+")
    assert not allowed(matcher) & {*ENDS, 9}
    matcher.advance(*ids_of("a"))
    assert allowed(matcher) >= set(ENDS)
    matcher.advance(END)
    assert matcher.is_complete


async def test_a_clients_stop_ids_may_come_where_the_text_may_end_and_the_models_ends_only_if_they_end_it(
    grammars: Grammars,
) -> None:
    (stop,) = ids_of("z")
    for ends in ([stop], [END, stop], []):
        matcher = await matcher_of(grammars, "regex", "a+", ends)
        assert stop not in allowed(matcher)
        matcher.advance(*ids_of("a"))
        assert allowed(matcher) & {*ENDS, stop} == set(ends)


async def test_tokens_that_a_model_has_beyond_its_tokenizer_never_come() -> None:
    wide = Grammars(tiny_tokenizer(), VOCABULARY + 70, ENDS)
    matcher = await matcher_of(wide, "regex", r"(?s:.)*")
    assert max(allowed(matcher)) < VOCABULARY
    wide.close()


async def test_end_tokens_that_no_logit_stands_for_are_passed_over() -> None:
    odd = Grammars(tiny_tokenizer(), VOCABULARY, [END, 1_000_000])
    matcher = await matcher_of(odd, "regex", "a+", [END, 1_000_000])
    matcher.advance(*ids_of("a"))
    assert END in allowed(matcher)
    odd.close()


async def test_masks_fit_a_model_that_lacks_the_last_tokens_of_its_tokenizer(grammars: Grammars) -> None:
    """Its masks are narrower than the compiler's."""
    worker, matcher = MaskWorker(), await matcher_of(grammars, "regex", "[a-z]+")
    whole = np.zeros(matcher.mask_words, np.int32)
    matcher.fill(whole)
    for rows in (1, module.FEW_ROWS + 1):
        masks = np.full((rows + 1, matcher.mask_words - 2), -9, np.int32)
        await worker.turn([], [matcher.copy(ENDS) for _ in range(rows)], masks)
        assert np.array_equal(masks[:rows], np.tile(whole[:-2], (rows, 1)))
        assert (masks[rows] == -9).all()
    worker.close()


async def test_a_copy_stands_at_the_same_place_and_goes_its_own_way(grammars: Grammars) -> None:
    matcher = await matcher_of(grammars, "regex", "ab(c|d)e")
    assert write(matcher, "ab")
    twin = matcher.copy([7])
    assert write(matcher, "ce")
    assert matcher.is_complete
    assert not twin.is_over
    assert write(twin, "de")


async def test_many_are_filled_as_one_by_one(grammars: Grammars) -> None:
    worker, grammar = MaskWorker(), await grammars.compile(Constraint("json_object"))
    texts = ["", "{", '{"a', '{"a":', '{"a":[1,', '{"a":{}}', "{}", '{"x":tr']
    matchers = [grammar.start(ENDS) for _ in texts]
    for matcher, text in zip(matchers, texts, strict=True):
        assert write(matcher, text)
    alone = np.zeros((len(texts), matchers[0].mask_words), np.int32)
    for matcher, mask in zip(matchers, alone, strict=True):
        matcher.copy(ENDS).fill(mask)
    together = np.zeros_like(alone)
    await worker.turn([], matchers, together)
    assert np.array_equal(alone, together)
    assert (alone[5:7] == -1).all()  # complete: all may come, and nothing of it will be used
    worker.close()


async def test_white_space_between_two_parts_is_bounded(grammars: Grammars) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    for kind, text in (("json_schema", schema), ("lark", f"start: %json {schema}")):
        assert write(await matcher_of(grammars, kind, text), '{\n  "a" : ' + " " * 39)  # type: ignore[arg-type]
        assert not write(await matcher_of(grammars, kind, text), '{\n  "a" : ' + " " * 40)  # type: ignore[arg-type]
        assert not write(await matcher_of(grammars, kind, text), " {")  # type: ignore[arg-type]


async def test_a_grammar_that_outgrows_its_bounds_ends_its_matchers_with_a_reason_and_no_others(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await matcher_of(grammars, "regex", "(a|b)*")
    monkeypatch.setattr(module, "LIMITS", LLParserLimits(max_lexer_states=2000, verbose_errors=False))
    hungry, random = await matcher_of(grammars, "regex", r"(?s:.*)a(?s:.{40})b"), np.random.default_rng(0)
    for _ in range(400):
        if hungry.is_over:
            break
        hungry.advance(int(random.choice(sorted(allowed(hungry) - set(ENDS)))))
    assert "states" in hungry.error
    assert not hungry.is_complete
    assert len(allowed(hungry)) == 32 * hungry.mask_words  # of no use to anybody
    assert write(other, "abba")


def walk(matcher: Matcher, random: np.random.Generator) -> bytes:
    """The bytes of a text that the grammar admits, by tokens chosen at random."""
    said = b""
    while not matcher.is_over:
        token = int(random.choice(sorted(allowed(matcher))))
        said += b"" if token in ENDS else tiny_tokenizer().token_bytes.of(token)
        matcher.advance(token)
    assert not matcher.error
    return said


@pytest.mark.parametrize("text", ["yes", 'a "quoted" \\ one', "two\nlines", "ä€😀", "/slash/", "\u0001", "<|im_end|>"])
async def test_any_string_can_be_a_choice(grammars: Grammars, text: str) -> None:
    grammar, random = (
        await grammars.compile(Constraint("choice", json.dumps(["other", text]))),
        np.random.default_rng(0),
    )
    assert {walk(grammar.start(ENDS), random) for _ in range(20)} == {b"other", text.encode()}


async def test_grammars_of_either_spelling_are_the_same_language(grammars: Grammars) -> None:
    lark = 'start: "<" WORD ("," WORD)* ">"\nWORD: /[a-z]+/  // "%json" in a comment\n'
    gbnf = 'root ::= "<" word ("," word)* ">"\nword ::= [a-z]+ # %json {\n'
    for text in (lark, gbnf):
        for good in ("<a>", "<ab,c>"):
            assert write(await matcher_of(grammars, "lark", text), good)
        for bad in ("<>", "<A>", "<a,>"):
            assert not write(await matcher_of(grammars, "lark", text), bad)


async def test_random_walks_end_in_texts_that_the_judge_accepts(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, "x", None]}, "b": {"type": "boolean"}},
              "required": ["a"], "additionalProperties": False}  # fmt: skip
    grammar, random = await grammars.compile(Constraint("json_schema", json.dumps(schema))), np.random.default_rng(3)
    for _ in range(10):
        jsonschema.validate(json.loads(walk(grammar.start(ENDS), random)), schema)
