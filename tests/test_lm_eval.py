"""lm-evaluation-harness on our models: its own model's answers, and texts as without drafts."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import stree_jax as st
from tests.convert.checkpoints import hf_checkpoint, hf_logits, torch, transformers
from tests.helpers import python, refusal, saved_pair

pytest.importorskip("lm_eval", reason="lm-eval, of the extra `eval`, is not installed")
from lm_eval.api.model import CachingLM

from stree_jax.lm_eval import StreeJax

TEXTS = ["Ann has 3 pens.", " She buys", " 12 more, and", " gives away", " 4. How many has she?"]
ENDS = '{"eos_token": "<|endoftext|>"}'
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ style }}{% endif %}"
)


def asked(*args):
    return SimpleNamespace(args=args)


def until(context, *stops, **more):
    return asked(context, {"until": [*stops], "max_gen_toks": 24, **more})


PAIRS = [asked(*pair) for pair in itertools.pairwise(TEXTS)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = saved_pair(tmp_path_factory.mktemp("pair"))
    (folder / "target/chat_template.jinja").write_text(TEMPLATE)
    (folder / "target/tokenizer_config.json").write_text(ENDS)
    return {"pretrained": str(folder / "target"), "draft": str(folder / "draft")}


@pytest.mark.parametrize("family", ["mamba2", "nemotron_h"])
def test_the_answers_of_the_harness_own_model(family, tmp_path):
    """Whole texts, and those that are cut to 9 tokens, or read in windows of 9."""
    hf = pytest.importorskip("lm_eval.models.huggingface", reason="accelerate is not installed")

    class Theirs(hf.HFLM):
        def _model_call(self, inps, **_):
            return torch().from_numpy(hf_logits(self.model, inps))

    tokenizer = st.load_tokenizer(st.demo_path("target"))
    model = hf_checkpoint(tmp_path, family, vocab_size=tokenizer.get_vocab_size())
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(ENDS)
    fast = transformers().PreTrainedTokenizerFast(tokenizer_object=tokenizer, **json.loads(ENDS))
    pairs = [*PAIRS, asked("", TEXTS[0]), asked("".join(TEXTS[:4]), TEXTS[4]), asked("Ann ", "has")]
    best = tokenizer.encode(TEXTS[0]).ids[:5]
    for _ in range(3):
        best.append(int(hf_logits(model, [best])[0, -1].argmax()))
    texts = [asked(text) for text in (*TEXTS, "".join(TEXTS), "")]
    for max_length in (None, 9):
        ours = StreeJax(str(tmp_path), batch_size=2, max_length=max_length)
        theirs = Theirs(model, tokenizer=fast, max_length=max_length or 512, batch_size=2)
        got, want = (
            each.loglikelihood(pairs) + each._loglikelihood_tokens([(("", ""), best[:5], best[5:])])
            for each in (ours, theirs)
        )
        for (total, is_best), (their_total, theirs_is) in zip(got, want, strict=True):
            assert total == pytest.approx(their_total, abs=1e-4)
            assert is_best == theirs_is
        assert is_best
        got, want = (each.loglikelihood_rolling(texts) for each in (ours, theirs))
        assert got == pytest.approx(want, abs=1e-4)


def test_stops_and_limits(pair, caplog):
    """A stop inside of a token, a long one, none; and contexts without a place, or empty ones."""
    plain, drafts = StreeJax(pair["pretrained"]), StreeJax(**pair, tree="chain:3", batch_size=2)
    (free,) = plain.generate_until([until(TEXTS[0])])
    token = max(plain._texts.tokenizer("").encode(free).tokens, key=len)
    inside = free[free.rindex(token[1:]) :][: len(token) - 1]
    assert len(inside) > 1
    requests = [until(TEXTS[0]), until(TEXTS[0], inside), until(TEXTS[0], "no such", free[9:])]
    requests += [until("", max_gen_toks=3), until(TEXTS[0], temperature=1.0, do_sample=True)]
    requests += [requests[-1], until(TEXTS[1], "a", temperature=0.7, top_k=5, do_sample=True)]
    texts = drafts.generate_until(requests)
    assert texts[:3] == [free, free.partition(inside)[0], free[:9]]
    assert texts[4] != texts[5]  # repeats
    assert texts == plain.generate_until(requests)
    short, whole = StreeJax(**pair, max_length=30), TEXTS[0] * 9
    (got,) = short.generate_until([until(whole)])
    tokens = plain.tok_encode(whole)
    assert f"a context of {len(tokens)} tokens was cut to the last 6" in caplog.text
    how = dict(max_new_tokens=24, tokenizer=plain._texts.tokenizer(""))
    assert [got] == st.generate(plain._model, [tokens[-6:]], **how).texts
    refusal(
        "request that ends in 'Ann': max_gen_toks must be .*29",
        short.generate_until,
        [until("Ann", max_gen_toks=30)],
    )
    assert short.loglikelihood([asked("Ann ", ""), asked("", ""), PAIRS[0]])[:2] == [(0, True)] * 2
    for given in ([(("a", "b"), [1], [])], [(("a", "b"), [1], [2] * 31)]):
        message = "request that ends in 'a': tokens of a continuation .* from 1 to 30; got [03]"
        refusal(message, short._loglikelihood_tokens, given)


def test_chats_and_what_is_refused(pair, tiny_pair):
    ours = StreeJax(**pair, chat_template_args={"style": "In verse:"})
    history = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because "}]
    assert ours.chat_template(True) == TEMPLATE
    assert ours.apply_chat_template(history[:1]) == "<user>Why?\n<assistant>In verse:"
    for source in (TEMPLATE.replace(" | trim", ""), TEMPLATE.replace("}\n", "} </s>"), TEMPLATE):
        (Path(pair["pretrained"]) / "chat_template.jinja").write_text(source)
        for content in ("Because ", "Because", " \n"):
            history[1]["content"] = content
            goes_on = ours.apply_chat_template(history, add_generation_prompt=False)
            (theirs,), _ = transformers().utils.chat_template_utils.render_jinja_template(
                [history], chat_template=source, continue_final_message=True
            )
            assert goes_on == theirs
    refusal("'tools'", ours.chat_template, "tools")
    refusal(
        r"gen_kwargs has \['num_beams'\] .*, of \['eos",
        ours.generate_until,
        [until("Ann", num_beams=4)],
    )
    refusal(
        "request that ends in 'Ann': until has an empty text",
        ours.generate_until,
        [until("Ann", "")],
    )
    refusal(r"model_args has \['2', 'rows'\] .*, of \['ada", StreeJax, **pair, rows=8, **{"2": ""})
    refusal("batch_size must be", StreeJax, **pair, batch_size=0)
    with pytest.raises(ValueError, match="names no token to put before"):
        StreeJax(str(tiny_pair / "target")).generate_until([until("")])


def test_what_was_answered_is_kept(pair, tmp_path):
    """By the harness's cache, request by request: an interrupted run goes on."""
    texts = {"loglikelihood_rolling": [*map(asked, TEXTS)], "generate_until": [*map(until, TEXTS)]}
    for kind, requests in ({"loglikelihood": PAIRS} | texts).items():
        ours = StreeJax(**pair, batch_size=1)
        want = getattr(ours, kind)(requests)
        cached = CachingLM(ours, str(tmp_path / f"{kind}.db"))
        keep, kept = ours.cache_hook.add_partial, []

        def some(*answer, keep=keep, kept=kept):
            keep(*answer)
            kept.append(answer)
            if len(kept) == 2:
                raise KeyboardInterrupt

        ours.cache_hook.add_partial = some
        with pytest.raises(KeyboardInterrupt):
            getattr(cached, kind)(requests)
        assert getattr(cached, kind)(requests) == want
        assert len(kept) == len(requests)


COMMAND = """
import runpy, socket
def refuse(*_): raise AssertionError("it reached for the network")
socket.socket.connect = socket.getaddrinfo = refuse
runpy.run_module("stree_jax.lm_eval", run_name="__main__", alter_sys=True)
"""
TASK = """
task: pens
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["."], max_gen_toks: 12}
metric_list: [{metric: exact_match}, {metric: bleu}]
"""


def test_the_command(pair, tmp_path):
    """A task of our own, without a network: scores are those without drafts, to the last digit."""
    questions = [{"question": text, "answer": "one two three"} for text in TEXTS]
    (tmp_path / "pens.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "pens.yaml").write_text(TASK % (tmp_path / "pens.jsonl"))
    results = []
    for number, more in enumerate(("", f",draft={pair['draft']},tree=chain:3")):
        output = tmp_path / f"out{number}"
        arguments = ["--model", "stree-jax", "--tasks", "pens", "--include_path", tmp_path]
        arguments += ["--model_args", f"pretrained={pair['pretrained']}{more}"]
        arguments += ["--output_path", output, "--log_samples", "--batch_size", 4]
        python("-c", COMMAND, *arguments, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hub"))
        (file,), (samples,) = (output.rglob(f"{name}_*.json*") for name in ("results", "samples"))
        answers = [json.loads(line)["resps"] for line in samples.read_text().splitlines()]
        results.append((json.loads(file.read_text())["results"], answers))
    assert results[0] == results[1]
    assert len(results[0][1]) == len(TEXTS)
