"""Refusals of decoding, as tables of calls and messages: before anything is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.plan import plan
from stree_jax.decoding.verifiers import LOSSY_VERIFIERS
from stree_jax.testing import apply, random_model, tiny_model
from tests.drafters import AcceptNothing, Answering, Echo, Holding, Nameless, Unhashable
from tests.helpers import python, refusal, rows
from tests.methods import CHAIN, KEY, PROMPTS, SAMPLED, TREE


def drafter_of(kind=st.ModelDrafter, model=tiny_model, **options):
    """A drafter that is made when its test runs."""
    return lambda: kind(model(), **options)


MODEL = drafter_of()
IID = drafter_of(child_sampling="iid")
BEAM = drafter_of(st.BeamDrafter)
DYNAMIC = drafter_of(st.DynamicDrafter, expand=2)
SMALL = drafter_of(model=lambda: random_model(st.ModelConfig.tiny(vocab_size=11, num_layers=1)))
TYPICAL = LOSSY_VERIFIERS["typical"]


def readable(value):
    """An id for a message; options have none."""
    return value if isinstance(value, str) else ""


# Refused when they are made, as `Options` or `Request`, and by `generate` and `stream`.
OPTIONS = [
    (dict(max_new_tokens=0), "max_new_tokens must be an integer, at least 1; got 0"),
    (dict(max_length=0), "max_length must be an integer, at least 1; got 0"),
    (dict(temperature=-0.1), "temperature must be a number from 0 on, got -0.1"),
    (dict(temperature=1e-40, key=KEY), "temperature = 1e-40 is 0 in float32; use 0"),
    (dict(temperature=True), "temperature must be a number from 0 on, got True"),
    (dict(top_k=-1), "top_k must be an integer, at least 0; got -1"),
    (dict(top_p=1.5), r"top_p must be in \(0, 1\], got 1.5"),
    (dict(top_p=True), r"top_p must be in \(0, 1\], got True"),
    (dict(min_p=-0.1), "min_p must be from 0 to 1, got -0.1"),
    (dict(filters=(st.TopK,)), "other objects that are a st.Rule, or functions"),
    (dict(filters=[st.RepetitionPenalty(1.2)]), "has a state: give it to processors"),
    (dict(processors="grammar"), "processors must be a list such as"),
    (dict(processors=[st.BannedTokens(None)]), "processor <BannedTokens> must be a pytree"),
    (dict(top_k=[1, 2]), r"top_k = \[1, 2\]: one value is for all .*options=\[st.Options\(top_k="),
    (dict(eos_token=[[1], [2]]), r"eos_token must be an integer, .* got \[\[1\], \[2\]\]"),
    (dict(stop=[[[1]], []]), r"a token of stop must be an integer, .* got \[1\]"),
    (dict(filters=[[st.TopK(2)], []]), "other objects that are a st.Rule, or functions"),
    (dict(min_new_tokens=9, max_new_tokens=8), "from 0 to 8; got 9"),
    (dict(key=jnp.zeros(7)), "key must be a random key"),
    (dict(stop=[""], tokenizer=1), r"stop has an empty entry: \[''\]; leave it out"),
    (dict(stop=[[-1]]), "a token of stop must be an integer, at least 0; got -1"),
    (dict(stop=[3]), r"stop must be a list of texts and of lists of token ids, .* got \[3\]"),
]
# Refused by `generate` and by `stream`, which know the model, the rows and the drafter.
REQUESTS = [
    (dict(prompts=[]), "prompts is empty"),
    (dict(prompts=[[1], []]), r"prompts\[1\] is empty"),
    (dict(prompts=[[1], [2, 37]]), r"prompts\[1\] has token id 37, outside .* of 37"),
    (dict(eos_token=37), "eos_token must be an integer, from 0 to 36; got 37"),
    (dict(stop=[[37]]), "a token of stop must be an integer, from 0 to 36; got 37"),
    (dict(stop="a"), "stop = 'a' is a text, and needs the tokenizer: pass tokenizer="),
    (dict(stop="a", tokenizer="path"), "tokenizer must be that of st.load_tokenizer"),
    (dict(temperature=1.0), "needs a random key"),
    (dict(temperature=1.0, key=jax.random.split(KEY)), "a single random key or one for each of"),
    (
        dict(temperature=1.0, key=jax.random.key(0, impl="unsafe_rbg")),
        "'rbg' draw other numbers in",
    ),
    (dict(processors=[st.LogitBias({37: 1.0})]), "has token id 37, outside the vocabulary of 37"),
    # Options of each row.
    (dict(options=5), "options must be st.Options, or a list of them, got 5"),
    (dict(options=[st.Options(), {}, 5]), "options must be st.Options, or a list of them, got "),
    (dict(options=[st.Options()] * 2), "options has 2 entries for 3 rows; give one, or one for"),
    (dict(options=st.Options(), top_k=3), "top_k and options are given; put top_k into the Opt"),
    (dict(options=rows(tokenizer=[None, None, 5])), "tokenizer is one for all rows, and options"),
    (dict(options=rows(temperature=[0.0, 1.0, 0.0])), "temperature > 0 needs a random key"),
    (
        dict(options=rows(max_length=[20] * 3, max_new_tokens=[3, 3, 11])),
        r"prompts\[2\] has 10 .* limit is 20",
    ),
    (
        dict(options=rows(temperature=[0, 1, 0], key=[0] * 3), verifier="multi_step", drafter=IID),
        "'multi_step' cannot decode temperature 0 and others together; use 'target_only', or",
    ),
    # Drafters, trees and verifiers.
    (dict(topology=TREE), "a tree of 7 nodes needs a drafter"),
    (dict(drafter=MODEL, topology=st.TreeTopology.from_branching((38,))), "38 children"),
    (dict(drafter=DYNAMIC, topology=st.TreeTopology.budget(12, 3)), "expand = 2 scores at most 10"),
    (dict(drafter=MODEL, topology=st.TreeTopology.budget(8, 3)), r"TreeTopology.budget\(8, 3\)"),
    (dict(drafter=DYNAMIC, topology=CHAIN), "a chain of 3 drafts: DynamicDrafter chooses the"),
    (dict(drafter=Holding), "must be a pytree of arrays, and has a leaf 'one'"),
    (dict(drafter=IID), "child_sampling = 'iid' needs temperature > 0"),
    (dict(drafter=SMALL), "different vocabularies: 11 and 37 tokens"),
    (dict(drafter=drafter_of(Answering, limit=8)), "for targets of a width up to 8"),
    (dict(drafter=drafter_of(Answering), **SAMPLED), "this drafter is for .* at temperature 0"),
    (dict(verifier="medusa"), "unknown verifier 'medusa'; known: .*'multi_step'"),
    (dict(verifier=Unhashable), "Unhashable: unhashable type.*frozen dataclass"),
    (dict(verifier=Nameless), "Nameless: .* has no attribute 'name'.*frozen dataclass"),
    (dict(verifier="multi_step", drafter=MODEL), "needs temperature > 0; use 'greedy'"),
    (dict(verifier="greedy", **SAMPLED), "use 'target_only'"),
    (dict(verifier="typical", drafter=MODEL, **SAMPLED), "'typical' is lossy: .*lossy=True"),
    (dict(to_the_bit=True), "to_the_bit = True is refused: its matrices are not packed"),
    (dict(verifier=TYPICAL, drafter=MODEL, **SAMPLED), "'typical' is lossy: .*lossy=True"),
    (dict(verifier="typical", drafter=MODEL, lossy=True), "needs temperature > 0; use 'greedy'"),
    (dict(verifier="multi_step", drafter=MODEL, **SAMPLED), "not exact for child_sampling ="),
    *(
        (dict(drafter=drafter, verifier=rule, **SAMPLED), f"child_sampling = '{children}'")
        for drafter, children, rule in (
            (MODEL, "shared", "traversal"),
            (BEAM, "top_k", "multi_step"),
            (DYNAMIC, "shared", "without_replacement"),
            (st.NgramDrafter, "top_k", "traversal"),
        )
    ),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS + REQUESTS, ids=readable)
def test_requests_are_refused(options, message, monkeypatch):
    def never(*_, **__):
        raise AssertionError("compiled")

    monkeypatch.setattr(SpeculativeDecoder, "start", never)
    made = {
        name: value() if name in ("drafter", "verifier") and callable(value) else value
        for name, value in options.items()
    }
    request = dict(model=tiny_model(), prompts=PROMPTS)
    calls = [(st.generate, request), (st.stream, request)]
    if any(options is alone for alone, _ in OPTIONS):
        calls += [(st.Options, {}), (st.Request, dict(prompt=[1]))]
    for call, needed in calls:
        with pytest.raises(ValueError, match=message) as error:
            call(**needed | made)
        assert "\n" not in str(error.value)


def checked(verifier, children, topology, *, zero):
    drawn = st.Drawn(children)
    return lambda: st.VERIFIERS[verifier].check(drawn, topology, temperature_is_zero=zero)


# Pairs of a rule and a way to choose children.
PAIRS = [
    ("multi_step", "without_replacement", TREE, False, "not exact .*only for 'iid'"),
    ("without_replacement", "iid", TREE, False, "not exact for child_sampling = 'iid'"),
    ("multi_step", "shared", CHAIN, False, "child_sampling = 'shared', only for 'iid'; use 't"),
]
ALLOWED = [
    *(("greedy", children, TREE, True) for children in ("top_k", "iid")),
    ("target_only", "top_k", TREE, False),
    ("target_only", "without_replacement", TREE, False),
    ("multi_step", "iid", TREE, False),
    ("multi_step", "without_replacement", CHAIN, False),
    ("without_replacement", "without_replacement", TREE, False),
    ("without_replacement", "iid", CHAIN, False),
    *(
        ("traversal", children, tree, False)
        for children in ("iid", "without_replacement")
        for tree in (CHAIN, TREE)
    ),
]
TRACED = "run in Python, not under jit, vmap or grad: .* put a SpeculativeDecoder inside"


def traced(transform, *keys):
    """`generate` inside a transformation."""

    def call():
        model = tiny_model()
        transform(lambda *key: st.generate(model, PROMPTS, key=key[0] if key else None))(*keys)

    return call


def decoder_of(max_length=64, topology=None, verifier=st.VERIFIERS["greedy"], **sizes):
    topology = st.TreeTopology.chain(0) if topology is None else topology
    return SpeculativeDecoder(topology, verifier, max_length=max_length, **sizes)


def too_long_a_buffer():
    context = st.Context(jnp.zeros((1, 64), jnp.int32), jnp.ones(1, jnp.int32))
    model = tiny_model("mamba2attn hybrid")
    decoder_of(max_length=20).start(model, None, context, jax.random.split(KEY, 1))


def generated(**options):
    return lambda: st.generate(tiny_model(), PROMPTS, **options)


def scored(texts):
    return lambda: st.score(tiny_model(), texts)


TWO = jnp.full(2, 5)
NO_ENDS = jnp.full((2, 1), -1)
IDS = jnp.ones((2, 4), jnp.int32)


def functional(keys=2, **more):
    """The decode loop without `generate`."""

    def call():
        prompts = more.get("prompts", st.Context(IDS, TWO // 2))
        limits = more.get("limits", st.Limits(TWO, NO_ENDS))
        model, decoder = tiny_model(), decoder_of(**more.get("decoder", {}))
        rows = jax.random.split(KEY, keys) if isinstance(keys, int) else keys
        state = decoder.start(model, None, prompts, rows)
        sampling = more.get("sampling", st.Sampling(jnp.ones(2)))
        for _ in range(more.get("times", 1)):
            decoder.run(model, None, state, limits, sampling)

    return call


FUNCTIONAL = [
    (dict(prompts=[[1], [2]]), r"prompts must be Context\(tokens: .*\), got \[\[1\], \[2\]\]"),
    (dict(prompts=st.Context(IDS, TWO[:1])), r"tokens must be int32\[1, any\], got int32\[2, 4\]"),
    (dict(prompts=st.Context(IDS, 4)), r"prompts.length must be int32\[any\], got int32\[\]"),
    (dict(keys=KEY), r"keys, .*split\(key, 2\), must be key<fry>\[2\], got key<fry>\[\]"),
    (dict(keys=jnp.zeros(2)), r"must be uint32\[2, any\], got float32\[2\]"),
    (dict(limits=5), r"limits must be a Limits, got int32\[\]"),
    (dict(limits=st.Limits(TWO, TWO)), r"limits.eos_tokens must be int32\[2, any\]"),
    (dict(sampling=0.8), r"sampling must be a Sampling, got float32\[\]"),
    (dict(sampling=st.Sampling(TWO)), r"temperature must be float32\[2\], got int32\[2\]"),
    (dict(decoder=dict(verifier="best")), "unknown verifier 'best'; known: .*'greedy'"),
    (dict(decoder=dict(verifier="target_only"), times=2), "was donated: use the state that run"),
]


CALLS = [
    *((functional(**change), message) for change, message in FUNCTIONAL),  # while it is traced
    (traced(jax.jit, KEY), TRACED),
    (traced(jax.jit), TRACED),
    (lambda: nnx.jit(lambda model: st.generate(model, PROMPTS))(tiny_model()), TRACED),
    (lambda: jax.jit(lambda n: st.generate(tiny_model(), PROMPTS, max_new_tokens=n))(3), TRACED),
    *((checked(*pair, zero=zero), message) for *pair, zero, message in PAIRS),
    (generated(n=10**9), "n = 1000000000: a batch has at most"),
    (generated(log_probs="raw"), "log_probs must be False, True or 'sampled', got 'raw'"),
    (generated(top_log_probs=-1), "top_log_probs must be an integer, at least 0; got -1"),
    (generated(top_log_probs=38), "top_log_probs must be an integer, from 0 to 37; got 38"),
    (lambda: st.stream(tiny_model(), PROMPTS, log_probs=True), "log_probs = True.*: stream yields"),
    (scored([]), "texts is empty"),
    (lambda: st.text_log_probs(tiny_model(), [[1, 2]]), r"ids \[B, T\], .* got \[\[1, 2\]\];"),
    (lambda: st.text_log_probs(tiny_model(), jnp.ones((1, 3))), r"got float32\[1, 3\];"),
    (scored([[1], []]), r"texts\[1\] is empty"),
    (scored(np.array(3)), r"texts must be a list .* got array\(3\)"),
    (
        lambda: decoder_of(topology=st.TreeTopology.from_parents([-1, 0, 1, 0])),
        "the nodes of topology are not in level order; use its level_order",
    ),
    (lambda: decoder_of(max_length=0), "max_length must be an integer, from 1 to .*; got 0"),
    (lambda: decoder_of(steps_per_sync=0), "steps_per_sync must be an integer, from 1 to"),
    (lambda: decoder_of(num_best=True), "num_best must be an integer, at least 0; got True"),
    (too_long_a_buffer, "prompts are a buffer of 64 tokens, and with max_length = 20 a row has 21"),
    # Drafters.
    (drafter_of(child_sampling="best"), "child_sampling must be 'auto' or one of .*best"),
    (lambda: st.NgramDrafter(min_match=3, max_match=2), "min_match, with max_match = 2, must be"),
    (drafter_of(st.DynamicDrafter, expand=0), "expand must be an integer, at least 1; got 0"),
    (drafter_of(st.DynamicDrafter, sharpness=1e39), r"sharpness must be .* got 1e\+39"),
    # Filters and processors.
    (lambda: st.RepetitionPenalty(0), "RepetitionPenalty takes a number above 0, got 0"),
    (lambda: st.PresencePenalty(np.nan), "PresencePenalty takes a number, got nan"),
    (lambda: st.LogitBias({-1: 2.0}), "a token id of LogitBias must be an integer, from 0"),
    (lambda: st.LogitBias({3: 1e39}), r"has the bias 1e\+39 for token 3; give a finite"),
    (lambda: st.LogitBias(None), r"LogitBias takes a dict such as \{7: -2.0\}, got None"),
    (lambda: st.RepetitionPenalty(10**400), "RepetitionPenalty takes a number above 0, got 1"),
    (lambda: st.BannedTokens(jnp.array([-1])).check(37), "has token id -1, outside the voc"),
    (lambda: st.MinP([0.1]), r"min_p must be from 0 to 1, got \[0.1\]"),
    (lambda: st.Options(log_probs=1), "log_probs must be False, True or 'sampled', got 1"),
    (lambda: st.BannedTokens([]), "BannedTokens has no token ids; leave the processor out"),
    (lambda: st.BannedTokens(3), "BannedTokens takes a list of token ids, got 3"),
    (lambda: st.AllowedTokens(["a"]), "a token id of AllowedTokens must be an integer"),
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=readable)
def test_calls_are_refused(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def on_rows(call):
    """A method of the functional form; what lies behind a text is no id of it."""

    def started(model, text):
        buffer = jnp.pad(text, ((0, 0), (0, 1)), constant_values=10**6)
        return call(decoder_of(), model, None, st.Context(buffer, jnp.array([4])))

    return started


def scheduler_of(model):
    return st.Scheduler(model, rows=1, max_length=16)


# The public functions that take token ids; `generate` and `stream` are in REQUESTS.
TAKE_IDS = [
    st.score,
    st.text_log_probs,
    lambda model, text: st.tune(model, st.NgramDrafter(), text),
    lambda model, text: st.bench(model, prompts=[*text]),
    lambda model, text: scheduler_of(model).read(text[0].tolist()),
    lambda model, text: scheduler_of(model).submit(st.Request(text[0].tolist())),
    on_rows(SpeculativeDecoder.read),
    on_rows(lambda *inputs: SpeculativeDecoder.start(*inputs, KEY[None])),
    st.HybridLM.__call__,
    st.HybridLM.hidden,
    lambda model, text: model.prefill(text, TWO[:1]),
    lambda model, text: model.prefill_hidden(text, TWO[:1], model.init_cache(1, 4)),
    lambda model, text: model.tree(text, CHAIN.tree(text > 0), model.init_cache(1, 4)),
    apply,
    lambda model, text: st.training.ahead_loss(model, text, iter),
]


@pytest.mark.parametrize("call", TAKE_IDS)
def test_what_is_no_token_id_is_refused(call):
    for wrong in (37, 10**6, -100):
        refusal(
            f"token id {wrong}, outside the vocabulary of 37",
            call,
            tiny_model(),
            jnp.array([[5, wrong, 2, 4]]),
        )
    for wrong in (1.0, True):
        text = jnp.full((1, 4), wrong)
        # A TypeError where the types of signatures are checked, as in `make check`.
        with pytest.raises((ValueError, TypeError), match="float|bool|Type-check error"):
            call(tiny_model(), text)


def test_prefixes_of_others_are_refused():
    model = tiny_model()
    prefix = st.generate(model, PROMPTS, max_new_tokens=2, return_prefix=True).prefix
    failed = prefix._replace(
        context=prefix.context._replace(length=prefix.context.length.at[1].set(0))
    )
    for prompts, options, message in (
        ([[1], [2]], {}, "after has 3 rows, and prompts 2; give a prompt for each row"),
        ([[1]] * 3, dict(n=0), "n must be an integer, at least 1; got 0"),
        ([[1]] * 3, dict(max_length=4), r"prompts\[2\] has 13 tokens .*, and the limit is 4"),
        ([[1]] * 3, dict(after=failed), "row 1 of after failed: its logits were not finite"),
    ):
        refusal(message, st.generate, **dict(model=model, prompts=prompts, after=prefix) | options)


def changed(base, method, change):
    """An object of a class with another result of one method."""

    def wrong(*arguments):
        return change(getattr(base, method)(*arguments))

    return type(f"Wrong{base.__name__}", (base,), {method: wrong})()


def draft(**changes):
    """A change of the draft that `propose` returns; values are functions of the old ones."""

    def change(returned):
        old, state = returned
        return old._replace(**{name: f(getattr(old, name)) for name, f in changes.items()}), state

    return change


def floats(state):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), state)


RETURNED = [
    ("verify", lambda v: v.last, r"verify must be Verdict\(last: int32\[3\], .*\), got int32\[3\]"),
    ("verify", lambda v: v._replace(last=v.last[:, None]), r"verify.last must be int32\[3\]"),
    ("propose", lambda r: r[0], "WrongEcho.propose must return a DraftTree and the state, got D"),
    ("propose", draft(tokens=lambda t: t[:, :1]), r"draft.tokens must be int32\[3, 2\]"),
    ("propose", draft(log_probs=lambda _: jnp.zeros((3, 1, 36))), r"log_probs must be float32\[3"),
    (
        "propose",
        draft(tree=lambda t: t._replace(valid=t.depth)),
        r"WrongEcho.propose: draft.tree.valid must be bool\[3, 2\], got int32\[3, 2\]",
    ),
    ("propose", lambda r: (r[0], None), r"propose: state must be \{'seen'.*got NoneType"),
    ("commit", lambda s: None, r"WrongEcho.commit: state must be .*'seen'.*, got NoneType"),
    ("commit", floats, r"commit: state\['seen'\] must be int32\[3\], got float32\[3\]"),
    ("init", lambda s: s | {"name": "x"}, r"init: state\['name'\] must be an array, got 'x'"),
]


@pytest.mark.parametrize(("method", "change", "message"), RETURNED, ids=readable)
def test_what_a_method_returns_is_checked(method, change, message):
    """While the loop is traced: nothing of it is compiled."""
    made = dict(drafter=Echo(), verifier=AcceptNothing())
    name = "verifier" if method == "verify" else "drafter"
    made[name] = changed(type(made[name]), method, change)
    refusal(message, st.generate, tiny_model(), PROMPTS, max_new_tokens=3, **made)


def test_what_is_next_to_a_refusal_is_allowed():
    for *pair, zero in ALLOWED:
        checked(*pair, zero=zero)()
    plan(tiny_model(), PROMPTS, key=jax.random.key(0, impl="rbg"))  # temperature 0 draws nothing
    plan(tiny_model(), PROMPTS, drafter=DYNAMIC(), topology=st.TreeTopology.budget(11, 3))
    plan(tiny_model(), PROMPTS, drafter=Answering(tiny_model(), limit=16))
    unlike = drafter_of(child_sampling="without_replacement")
    for drafter, topology, verifier in (
        (BEAM, None, "target_only"),
        (DYNAMIC, None, "target_only"),
        (IID, CHAIN, "traversal"),
        (unlike, CHAIN, "traversal"),
    ):
        chosen = plan(tiny_model(), PROMPTS, drafter=drafter(), topology=topology, **SAMPLED)
        assert chosen.decoder.verifier.name == verifier


WRONG_TYPES = r"""
import pytest
from flax import nnx
import stree_jax as st
from stree_jax.training.recipe import Training

class Half(st.Drafter):
    def default_topology(self): ...
    def init(self, *_): ...
    def read(self, *_): ...

class HalfRule(st.Verifier):
    name = "half"

class Alike(nnx.Module):
    default_topology = init = read = propose = commit = check = verify = Half.init
    inner_layers, name = None, "alike"

encoding = st.load_tokenizer(st.demo_path("target")).encode("a text")
model = st.HybridLM(st.ModelConfig.tiny(), rngs=nnx.Rngs(0))
for change, message in [
    (dict(prompts=None), "prompts must be a list with a list .*, got None"),
    (dict(after=5), "after must be a Prefix: Generation.prefix, Completion.prefix or .*; got 5"),
    (dict(temperature=10**400), r"temperature must be a number from 0 on, got 10{76}\.\.\.$"),
    (dict(max_new_tokens=10**12), "max_new_tokens = 10{12}: in all .* the limit is 16777216$"),
    (dict(eos_token=[[2, [3]]]), r"eos_token must be an integer, .* got \[\[2, \[3\]\]\]"),
    (dict(temperature=1.0, key=10**30), "key must be a random key such as .*, got 10{30}$"),
    (dict(verifier="z" * 999), r"unknown verifier 'z{76}\.\.\.; known"),
    (dict(topology="z" * 999), r"^'z{76}\.\.\. is not a tree"),
    (dict(prompts=["text"]), r"prompts\[0\] is not a list of token ids: .*; st.complete takes"),
    (dict(prompts="text"), r"st.complete takes texts and messages, tokenizer.encode\(text\).ids"),
    (dict(prompts=[1, 2, 3]), r"prompts is a list of lists, one a row, such as \[\[1, 2, 3\]\]$"),
    (dict(prompts=encoding), "prompts must be a list .*; an encoding has them as .ids"),
    (dict(prompts=dict(input_ids=[[1]])), r"prompts must be a list .* has them as \['input_ids'\]"),
    (dict(drafter=Alike()), "drafter must be .* derived from stree_jax.Drafter, got Alike"),
    (dict(verifier=Alike()), "verifier must be one of .* from stree_jax.Verifier, got Alike"),
    (dict(processors=[Alike()]), "processors must be .* a st.Rule, got Alike"),
    (dict(prompts=[[0.5]]), r"prompts\[0\] has float64 values"),
    (dict(drafter=model), r"drafter must be a ModelDrafter\(\.\.\.\), .*, got HybridLM"),
    (dict(key="seed"), "key must be a random key such as"),
    (dict(key=-1), "key must be a random key such as .*, or a seed from 0 to .*, got -1"),
    (dict(verifier=["greedy"]), r"verifier must be one of .*, got \['greedy'\]"),
]:
    with pytest.raises(ValueError, match=message):
        st.generate(model, **({"prompts": [[1]]} | change))
    if {*change} <= {*st.Options().keys()} and "in all" not in message:
        with pytest.raises(ValueError, match=message):
            st.Options(**change)
for half, message in [
    (Half, "Half with abstract methods commit, propose$"),
    (HalfRule, "HalfRule with abstract methods check, verify$"),
]:
    with pytest.raises(TypeError, match=message):
        half()
for make, message in [
    (lambda: st.generate("path", [[1]]), "must be a HybridLM, got str; load one with"),
    (lambda: st.ModelDrafter("path"), "must be a HybridLM, got str; load one with"),
    (lambda: st.ModelConfig.tiny(dt_limit=(0.0,)), "dt_limit must be"),
    (lambda: Training(steps=6.5), "steps must be an integer, from 1 to 2147483647; got 6.5"),
    (lambda: st.TreeTopology.paper(["A"]), "the paper's trees are"),
    (lambda: st.SpeculativeDecoder([-1, 0], "greedy", max_length=8), r"Topology, got \[-1, 0\]"),
    (lambda: st.TreeTopology.from_parents([-1, 0.7]), "a parent must be an integer; got 0.7"),
    (lambda: st.TreeTopology.chain(2.5), "num_drafts must be an integer, at least 0; got 2.5"),
    (lambda: st.TreeTopology.from_branching(3), r"a sequence such as \(3, 2, 1\), got 3"),
    (lambda: st.TreeTopology.from_branching({2, 1}), r"a sequence such as .*, got \{1, 2\}"),
    (lambda: st.make_mesh(data=10**400), r"data = 10+\.\.\. times model = 1 is 10+\.\.\. devices"),
    (lambda: st.TreeTopology.from_parents(5), r"parents is a sequence such as .*, got 5"),
    (lambda: st.TreeTopology.chain(10**5000), "a tree of <int> nodes or more; at most 4096"),
    (lambda: st.ModelConfig.preset([]), r"unknown preset \[\]; known: Falcon-H1-0.5B, "),
    (lambda: st.from_pretrained(None), "path must be a directory or .*, got None"),
    (lambda: st.load_tokenizer(None), "path must be a directory or .*, got None"),
    (lambda: st.from_pretrained("a" * 5000), r"no checkpoint at a{297}\.{3}: File name too"),
    (lambda: st.load_tokenizer("a" * 5000), r"no tokenizer at a{297}\.\.\.: only a"),
    (lambda: st.HybridLM(None, rngs=nnx.Rngs(0)), "config must be a ModelConfig, .* got None"),
    (lambda: st.load_medusa(None, model), "path must be the directory of .*, got None"),
    (lambda: st.save_pretrained(model, "a" * 5000), r"the name of /.*a\.{3} is too long; choose"),
    (lambda: st.save_pretrained(model, 5), "path must be the directory to create, got 5"),
    (lambda: st.save_pretrained("model", "x"), "model must be a HybridLM, got str; load one with"),
    (lambda: st.TreeTopology.chain(2).draw(5), "path is a sequence of nodes, got 5 and "),
    (lambda: st.NgramDrafter(max_match=10**12), "max_match must be .* from 1 to 64; got 10{12}$"),
]:
    with pytest.raises(ValueError, match=message):
        make()
"""


@pytest.mark.thorough
def test_wrong_types_are_refused():
    """In a process without the shape checker, which would raise first."""
    python("-c", WRONG_TYPES)
