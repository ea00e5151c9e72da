"""`st.bench` and `stree-jax bench`: tables of decoding, most of them with a clock that is given."""

import dataclasses
import io
import itertools
import json
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

import stree_jax as st
from stree_jax.cli import bench as cli
from stree_jax.cli.prompts import read_questions
from stree_jax.decoding.options import Options
from stree_jax.measuring import Question, methods, report
from stree_jax.measuring.advice import advice
from stree_jax.measuring.methods import LOOKUP, PLAIN, Method
from stree_jax.measuring.questions import turn_by_turn
from stree_jax.measuring.record import Record
from stree_jax.measuring.report import write_json
from stree_jax.testing import perturbed, tiny_model
from stree_jax.text import Texts
from tests.helpers import by_message, refusal

CHAIN = st.TreeTopology.chain(2)


@pytest.mark.thorough
def test_the_table_of_a_pair(tiny_pair, output, tmp_path):
    """Whole: heads and a draft; tau is that of `generate`, and memory that of the loop."""
    record, picture = tmp_path / "bench.json", tmp_path / "bench.svg"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once upon a time\n")
    models = ["--draft", tiny_pair / "draft", "--medusa", tiny_pair / "medusa"]
    options = ["--tree", "parents:-1,0", "--max-new-tokens", 6, "--rounds", 1, "--temperature", 1]
    target = tiny_pair / "target"
    pytest.importorskip("matplotlib")
    files = ["--json", record, "--plot", picture, "--prompts", prompts]
    text = output("bench", target, *models, *options, *files)
    found = json.loads(record.read_text())
    rows = {row["method"]: row for row in found["decoding"]}
    names = ["draft model, chain of 1", "Medusa, chain of 1"]
    assert list(rows) == [PLAIN, LOOKUP.name, *names]
    assert [row["nodes"] for row in rows.values()] == [1, 5, 2, 2]
    assert all(row["identical"] for row in rows.values())
    for name in (*rows, f"{target}: ", "runs at temperature 1", "identical"):
        assert name in text
    model = st.from_pretrained(target)
    drafter = st.ModelDrafter(st.load_draft(tiny_pair / "draft", model))
    prompt = st.load_tokenizer(target).encode("Once upon a time").ids
    given = dict(max_new_tokens=6, temperature=1.0, key=jax.random.key(0))
    out = st.generate(model, [prompt], drafter=drafter, topology=st.TreeTopology.chain(1), **given)
    assert rows[names[0]]["tau"] == out.stats.tau > 1
    memory = [row["memory_bytes"] for row in rows.values()]
    weights = found["weights"]["bytes"]
    assert weights < memory[0] < memory[1]
    assert memory[2] > memory[0] + weights / 2  # the draft, in bfloat16
    assert all(row["milliseconds_to_first_token"]["median"] > 0 for row in rows.values())
    assert all(name in picture.read_text() for name in rows)


@pytest.fixture
def clock(monkeypatch):
    """Texts of 12 tokens in 6 calls that take 11 s, 1 s of it to the first token; 0.5 s a draft."""
    seen = []

    def decode(method, target, batch):
        prompts, options, category = batch
        seen.append((method.name, prompts, options))
        calls = 12 if method.name == PLAIN else 4 if category == "math" else 6
        tokens = np.full((len(prompts), 12), 7 if "wrong" not in method.name else 8)
        depths = {12: [], 6: [6, 0], 4: [4, 3]}[calls]  # 4 calls end with a draft
        per_row = np.full(len(prompts), calls)
        stats = st.DecodeStatistics(
            tau=12 / calls,
            num_target_calls=per_row.sum().item(),
            num_tokens=12 * len(prompts),
            num_drafted=0,
            num_accepted=0,
            accepted_per_depth=len(prompts) * np.array(depths),
            tau_per_row=12 / per_row,
            target_calls_per_row=per_row,
            reached_per_depth=len(prompts) * np.array([calls, *depths])[: len(depths)],
        )
        ends = {"lengths": [12] * len(prompts), "finish_reasons": ["length"] * len(prompts)}
        return types.SimpleNamespace(tokens=tokens, stats=stats, **ends)

    def timed_rounds(ways, requests, rounds, advance):
        outputs = {name: [way(each) for each in requests] for name, way in ways.items()}
        for count in range(1, rounds + 1):
            size = count, len(requests)
            took = {n: {"first": 1.0, "draft": 16 * 0.5}.get(n[0], 11.0) for n in ways}
            yield outputs, {name: np.full(size, each) for name, each in took.items()}
            if count == clock.rounds_until_ctrl_c:
                raise KeyboardInterrupt

    clock = types.SimpleNamespace(seen=seen, rounds_until_ctrl_c=None)
    monkeypatch.setattr(Method, "decode", decode)
    monkeypatch.setattr(Method, "first_token", lambda *_, **__: None)
    monkeypatch.setattr(Method, "memory", lambda *_, **__: 5_000_000)
    monkeypatch.setattr(methods, "timed_rounds", timed_rounds)
    monkeypatch.setattr(methods, "drafting", lambda *_, **__: lambda count: None)
    return clock


def ways(name="chain"):
    return {name: st.Way(st.ModelDrafter(perturbed(tiny_model(), 0.1)), CHAIN)}


def cells(text, name):
    """Of the rows of tables in which a name is."""
    lines = (line for line in text.splitlines() if name in line)
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]


def test_a_call_and_the_share_of_its_draft(clock):
    """A call is what the calls after the first take; of it, 0.5 s go to drafts."""
    found = st.bench(tiny_model(), ways(), [[1, 2], [3]], max_new_tokens=12, rounds=2)
    plain, _, chain = found.rows
    assert plain["milliseconds_of_call"]["median"] == pytest.approx(1e4 / 11)
    assert chain["milliseconds_of_call"]["median"] == pytest.approx(2000)
    assert plain["draft_share"] is None
    assert chain["draft_share"]["median"] == pytest.approx(0.25)
    assert chain["tokens_per_second_by_round"] == pytest.approx([24 / 22] * 2)
    assert chain["milliseconds_to_first_token"]["median"] == 1000
    assert (chain.tau, chain.nodes, found.busy, found.different) == (2, 3, "", [])
    for row, written in zip(found.rows, found.content()["decoding"], strict=True):
        assert {*written} == {*vars(row)} - {"by_category", "mean_of_categories"}
        assert all(row[name] == value for name, value in written.items())
    expected = ["chain", "1", "1.00x", "2.00", "yes", "-", "3", "2000.00", "25%", "1000.0", "5"]
    assert cells(str(found), "│ chain ")[0] == expected
    said = "do not draft: prompt lookup, chain of 4 is 1.00 times as fast as without, within the"
    assert str(found).splitlines()[-2] == f"Temperature 0: {said} spread."
    assert str(found).splitlines()[-1] == "Fewer than 3 rounds: differences may be noise."
    row = dataclasses.replace(chain, tokens_per_second_by_round=[1.0, 3.0])
    busy = st.BenchReport(found.head, [row]).busy
    assert busy.startswith("This machine is busy: equal rounds took 3.0 times as long")


def test_a_terminal_of_80_columns(clock):
    """What matters comes first; no name is cut, and what has no room is named."""
    found = st.bench(tiny_model(), ways("wrong chain"), [[1]], max_new_tokens=12, rounds=3)
    file = io.StringIO()
    Console(file=file, width=80).print(*found.tables())
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    heads = cells(file.getvalue().replace("┃", "│"), " method ")
    assert heads[0][:5] == ["method", "tokens/s", "speed-up", "tau", "identical"]
    for name in (PLAIN, LOOKUP.name, "wrong chain"):
        assert sum(f"│ {name} " in line for line in lines) == 2
    text = " ".join(file.getvalue().split())
    assert "speed-up is the median of the rounds' own ratios" in text
    assert "no room for " in text
    assert "ms to first token, MB" in text
    assert "1 to 1" in repr(found)  # quartiles, where there is room


def test_what_the_options_ask_for(tiny_pair, command, clock, tmp_path):
    """Rows at a time, the last batch filled up; temperatures; tokens; a text that differs."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once\nupon\na time\n")
    target = tiny_pair / "target"
    options = ["--prompts", prompts, "--rows", 2, "--max-new-tokens", 12, "--rounds", 1]
    options += ["--temperature", 0, "--temperature", 0.5, "--tree", "chain:0"]
    code, text, error = command("bench", target, *options)
    assert code == 0, error
    assert {name for name, *_ in clock.seen} == {PLAIN, LOOKUP.name}  # no drafts are there anyway
    whole = [each for each in clock.seen if each[0] == PLAIN]
    tokenizer = st.load_tokenizer(target)
    one, two, three = (tokenizer.encode(text).ids for text in ("Once", "upon", "a time"))
    assert [texts for _, texts, _ in whole] == [[one, two], [three, one]] * 2
    assert [given["temperature"] for *_, given in whole] == [0, 0, 0.5, 0.5]
    assert all(given["max_new_tokens"] == 12 for *_, given in whole)
    assert "3 prompts, 2 at a time, up to 12 new tokens each, temperature 0.5" in text
    assert [line[:17] for line in text.splitlines()[-3:-1]] == [
        "Temperature 0: do",
        "Temperature 0.5: ",
    ]
    found = st.bench(tiny_model(), ways("wrong"), [[1]], max_new_tokens=12, rounds=1)
    assert found.different == ["wrong, temperature 0"]
    assert "NO" in str(found)


def record(name, speed, nodes=1, depth=0, tau=2.0, *, identical=True):
    """Of a way whose speed without drafts would be 10."""
    speed, tau = float(speed), float(tau)
    rates = {"median": speed, "low": speed - 1, "high": speed + 1}
    speed_up = {key: rate / 10 for key, rate in rates.items()}
    lists = {key: [] for key in ("tau_by_prompt", "seconds_by_prompt", "accepted_of_reached")}
    unmeasured = ["milliseconds_of_call", "milliseconds_to_first_token", "draft_share"]
    return Record(
        method=name,
        temperature=0.0,
        rows=1,
        nodes=nodes,
        tau=tau,
        accepted_per_call=tau - 1,
        accepted_per_depth=[0.0] * depth,
        identical=identical,
        tokens_per_second=rates,
        tokens_per_second_by_round=[speed],
        speed_up=speed_up,
        **lists,
        **dict.fromkeys([*unmeasured, "memory_bytes", "calls_by_tree"]),
    )


@pytest.mark.parametrize(
    ("speeds", "said"),
    [
        (dict(tree=20, chain=15), "Draft with tree: 2.00 times as fast as without (tau 2.00)."),
        (
            dict(tree=20, chain=19.5),
            "Draft with chain: 1.95 times as fast as without (tau 2.00). tree is no faster beyond"
            " the spread.",
        ),
        (dict(tree=9.8), "Do not draft: tree is 0.98 times as fast as without, within the spread."),
        (
            dict(tree=10.5, chain=10.2),
            "Do not draft: tree is 1.05 times as fast as without, within",
        ),
        (dict(tree=7, chain=8), "Do not draft: chain needs tau 2.5 here, and reaches 2.0."),
        (dict(tree=20, wrong=30), "Draft with tree: 2.00"),
        (dict(wrong=30), "Do not draft: no way with drafts gives the text."),
    ],
)
def test_the_simplest_way_within_the_spread(speeds, said):
    sizes = dict(tree=(7, 2), chain=(3, 2), wrong=(3, 2))
    ways = [
        record(name, speed, *sizes[name], identical=name != "wrong")
        for name, speed in speeds.items()
    ]
    assert advice([record("none", 10, tau=1.0), *ways]).startswith(said)


def test_texts_are_compared_where_the_rule_follows_the_target(clock):
    """Also where the rule is an object; not where it has its own random numbers."""
    draft = perturbed(tiny_model(), 0.1)
    rule, drawn = st.VERIFIERS["target_only"], st.ModelDrafter(draft, child_sampling="iid")
    of = {
        "wrong rule": {"drafter": st.ModelDrafter(draft), "topology": CHAIN, "verifier": rule},
        "wrong by chance": {"drafter": drawn, "topology": CHAIN},
    }
    found = st.bench(tiny_model(), of, [[1]], temperatures=[1.0], max_new_tokens=12, rounds=1)
    assert found.different == ["wrong rule, temperature 1"]
    assert found.rows[-1]["identical"] is None


def test_ctrl_c_keeps_the_rounds_before_it(clock, tmp_path):
    clock.rounds_until_ctrl_c = 2
    file, console = tmp_path / "bench.json", cli.console_of_tables()
    with pytest.raises(KeyboardInterrupt):
        cli.measure(console, tiny_model(), ways(), [[1]], file, max_new_tokens=12, rounds=5)
    rows = json.loads(file.read_text())["decoding"]
    assert [len(row["tokens_per_second_by_round"]) for row in rows] == [2] * 3
    assert [*tmp_path.iterdir()] == [file]


LONG = Question([1] * 9, name="line 7")


@by_message(
    ("arguments", "options", "message"),
    [
        (({PLAIN: {}}, [[1]]), {}, "'no drafts', which is always there"),
        (({"a": {"tree": CHAIN}}, [[1]]), {}, "give keywords of generate: drafter, topology"),
        (({}, None), {}, "needs prompts: give lists of token ids"),
        (({}, [[1]]), {"temperatures": [-0.5]}, "temperature must be a number from 0 on, got -0.5"),
        (({}, [[1]]), {"rounds": 0}, "rounds must be an integer"),
        (({}, [Question([1]), LONG]), {"max_length": 100}, "line 7 has 9 tokens and"),
        (({"a": {"topology": "auto"}}, [[1]]), {}, "topology = 'auto' needs a drafter: pass"),
    ],
)
def test_bad_arguments(arguments, options, message):
    refusal(message, st.bench, tiny_model(), *arguments, **options)


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "x.json").mkdir()
    with pytest.raises(OSError, match="x.json"):
        write_json(tmp_path / "x.json", {})
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_progress_where_there_is_no_terminal(monkeypatch):
    """A line for each task, and one now and then."""
    file, now = io.StringIO(), itertools.count(0, 7)
    monkeypatch.setattr(report, "time", types.SimpleNamespace(perf_counter=lambda: next(now)))
    with report.progress_bar(Console(file=file)) as show:
        for part in range(1, 8):
            show("decoding", part, 9)
        show("drawing", 1, 1)
    lines = [
        "   7 s  decoding",
        "  28 s  decoding, 4 of 9",
        "  49 s  decoding, 7 of 9",
        "  56 s  drawing",
    ]
    assert file.getvalue().strip("\n").split("\n") == lines


def test_the_default_tree(tiny_pair, output, clock):
    """The drafter's own: one for Python and the command."""
    models = ["--draft", tiny_pair / "draft", "--medusa", tiny_pair / "medusa"]
    output("bench", tiny_pair / "target", *models, "--max-new-tokens", 12, "--rounds", 1)
    names = {name for name, *_ in clock.seen} - {PLAIN, LOOKUP.name}
    assert names == {"draft model, tree of 5", "Medusa, tree of 5"}
    tree = st.ModelDrafter(tiny_model()).default_topology()
    assert tree == st.TreeTopology.default() == st.TreeTopology.from_parents([-1, 0, 0, 1, 3])


@pytest.fixture
def asked(chat_target, tmp_path):
    """Writes lines to a file, and returns it and a checkpoint with a chat template."""

    def asked(*lines):
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (tmp_path / "asked.jsonl").write_text("\n".join(texts))
        return str(chat_target), tmp_path / "asked.jsonl"

    return asked


def user(text):
    return {"role": "user", "content": text}


PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
# As in files of Spec-Bench and of SPEED-Bench, prepared in its two forms.
ASKED = [
    {"question_id": 81, "category": "writing", "turns": ["Once upon", "Shorter."]},
    {"question_id": 161, "category": "math", "turns": ["Add 1 and 2."], "reference": ["3"]},
    {"question_id": "9f", "category": "writing", "sub_category": "", "turns": ["Write it."]}
    | {"source": "x", "src_id": "7", "difficulty": "easy", "multiturn": False},
    {"question_id": "a0", "category": "math", "messages": [*map(user, ["The", "a", "time"])]},
    {"category": "math", "prompt": "def f(x):"},
]


def test_each_turn_follows_the_targets_own_answers(asked):
    """By category, then by turn, of which questions have unequal numbers."""
    target, file = asked(*ASKED)
    questions, texts = read_questions(target, file, ()), Texts.at(target)
    model = st.from_pretrained(target)
    options = Options(max_new_tokens=5, key=0, eos_token=texts.end_tokens(model.config))
    found = [*turn_by_turn(model, questions, 2, options)]
    talks = [["Once upon", "Shorter."], ["Write it."], ["Add 1 and 2."], ["The", "a", "time"]]
    prompts = []
    for turns in talks:
        said = []
        for turn in turns:
            said.append(user(turn))
            prompts.append(texts.tokens(said))
            answer = st.complete(target, said, max_new_tokens=5)
            said.append({"role": "assistant", "content": answer})
    first, shorter, write, add, the, a, time = prompts
    text = texts.tokens("def f(x):")
    expected = [("writing", [first, write]), ("writing", [shorter, shorter]), ("math", [add, the])]
    expected += [("math", [text, add]), ("math", [a, a]), ("math", [time, time])]
    assert [(each.category, [*each.prompts]) for each in found] == expected


def test_a_turn_that_is_too_long_is_named(asked):
    target, file = asked({"turns": ["x"]}, {"turns": ["x", "x " * 200]})
    model, questions = st.from_pretrained(target), read_questions(target, file, ())
    with pytest.raises(ValueError, match="asked.jsonl, line 2, turn 2, has 2"):
        [*turn_by_turn(model, questions, 2, Options(max_new_tokens=1, max_length=60))]


def test_turns_without_a_chat_template(asked, tiny_pair, output, clock, tmp_path):
    """They are joined, which the report's first line says; a template may be given."""
    with_template, file = asked(*ASKED)
    target = tiny_pair / "target"
    questions = read_questions(target, file, ())
    tokens = Texts.at(target).tokens
    assert [each.prompt for each in questions[:2]] == [*map(tokens, ["Once upon", "Add 1 and 2."])]
    assert questions[0].after([" a time"]) == tokens("Once upon\n\n a time\n\nShorter.")
    command = ["bench", target, "--prompts", file, "--rounds", 1]
    assert "\nturns are joined as plain text: the target has no chat" in output(*command)
    template = f"{with_template}/chat_template.jinja"
    assert "plain text" not in output(*command, "--chat-template", template)
    given = read_questions(target, file, (), Path(template))
    assert [each[:3] for each in given] == [e[:3] for e in read_questions(with_template, file, ())]


def test_a_row_for_each_category_and_way(clock):
    """Both definitions of acceptance, what is accepted of what is reached, and the mean."""
    questions = [Question([1], name) for name in ("math", "writing", "writing", "writing")]
    found = st.bench(tiny_model(), ways(), questions, max_new_tokens=12, rounds=1)
    chain = found.rows[-1]
    parts = chain["by_category"] | {"mean": chain["mean_of_categories"], "all": chain}
    assert [*parts] == ["math", "writing", "mean", "all"]
    assert [part["tau"] for part in parts.values()] == [3, 2, 2.5, 48 / 22]
    written = found.content()["decoding"][-1]
    assert written["mean_of_categories"]["tau"] == 2.5
    assert written["by_category"]["math"]["tau"] == 3
    assert [part["accepted_per_call"] for part in parts.values()] == [7 / 4, 1, 11 / 8, 25 / 22]
    assert chain["by_category"]["math"]["accepted_of_reached"] == [1, 0.75]
    assert chain["accepted_of_reached"] == [1, round(3 / 22, 4)]
    assert chain["by_category"]["math"]["seconds_by_prompt"] == [11]
    rows = cells(str(found), "│ chain ")
    assert rows[1] == ["math", "chain", "1", "1.00x", "3.00", "1.75", "100% 75%"]
    assert rows[3] == ["mean of categories", "chain", "1", "1.00x", "2.50", "1.38", ""]
    assert rows[4] == ["all", "chain", "1", "1.00x", "2.18", "1.14", "100% 14%"]


@by_message(
    ("line", "message"),
    [
        ({"turns": [], "category": "a"}, '"turns" must be texts, none of them empty, got []'),
        ({"turns": ["x", " "], "category": "a"}, "none of them empty, got ['x', ' ']"),
        ({"turns": "x", "category": "a"}, "none of them empty, got 'x'"),
        ({"turns": [PLACEHOLDER], "category": "a"}, "make it with SPEED-Bench's own script"),
        ({"turns": ["x"]}, 'some lines have a "category": give one to each line or to none'),
        ({"turns": ["x"], "category": 3}, "category must be a text, got 3"),
        ({"turns": ["x"], "prompt": "x"}, "it has a prompt and turns; give one of them"),
        ('{"turns": ["x', "not JSON"),
        ({"question_id": 4}, 'that is a text, or with "messages" or "turns"'),
    ],
)
def test_a_bad_question_is_named(line, message, asked, refused):
    target, file = asked(ASKED[0], line)
    error = refused("bench", target, "--prompts", file)
    assert f"--prompts {file}, line 2: " in error
    assert message in error
