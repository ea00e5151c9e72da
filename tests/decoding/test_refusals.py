"""Refusals of decoding, as one table of calls and messages: before anything is compiled."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.options import plan
from stree_jax.testing import PROMPTS, tiny_model

TREE = st.TreeTopology.from_branching((2, 2))
CHAIN = st.TreeTopology.chain(3)
WIDE = st.TreeTopology.from_branching((38,))
KEY = jax.random.key(11)
SAMPLED = dict(temperature=1.0, key=KEY)


def drafter_of(kind=st.ModelDrafter, model=tiny_model, **options):
    """A drafter that is made when its test runs."""
    return lambda: kind(model(), **options)


def model_of(vocab_size):
    config = st.ModelConfig.tiny(vocab_size=vocab_size, num_layers=1)
    return lambda: st.HybridLM(config, rngs=nnx.Rngs(0))


MODEL = drafter_of()
IID = drafter_of(child_sampling="iid")
SMALL = drafter_of(model=model_of(11))
BEAM = drafter_of(st.BeamDrafter)
DYNAMIC = drafter_of(st.DynamicDrafter, expand=2)


class Unhashable:
    """A verifier."""

    name = "unhashable"
    __hash__ = None
    check = verify = type(st.VERIFIERS["greedy"]).check


class NoPytree:
    """A drafter with a leaf that is no array: itself."""

    default_topology = init = read = propose = commit = st.NgramDrafter.init


def readable(value):
    """An id for a message; options have none."""
    return value if isinstance(value, str) else ""


# Options of `generate` and of `stream`.
OPTIONS = [
    (dict(prompts=[]), "prompts is empty"),
    (dict(prompts=[[1], []]), r"prompts\[1\] is empty"),
    (dict(prompts=[[1], [2, 37]]), r"prompts\[1\] has token id 37, outside .* of 37"),
    (dict(prompts=[[-1]]), "token id -1, outside the vocabulary"),
    (dict(max_new_tokens=0), "max_new_tokens must be an integer, at least 1; got 0"),
    (dict(max_new_tokens=True), "max_new_tokens must be an integer"),
    (dict(temperature=-0.1), "temperature must be a number from 0 on, got -0.1"),
    (dict(temperature=float("nan")), "temperature .* got nan"),
    (dict(temperature=1e39), "temperature .* got 1e\\+39"),
    (dict(temperature=1.0), "needs a random key"),
    (dict(top_k=-1), "top_k must be an integer, at least 0; got -1"),
    (dict(top_p=0.0), r"top_p must be in \(0, 1\], got 0.0"),
    (dict(top_p=1.5), r"top_p must be in \(0, 1\], got 1.5"),
    (dict(eos_token=37), "eos_token must be an integer, from 0 to 36; got 37"),
    (dict(topology=TREE), "a tree of 7 nodes needs a drafter"),
    (dict(drafter=MODEL, topology=WIDE), "38 children"),
    (dict(verifier="medusa"), "unknown verifier 'medusa'; known: .*'multi_step'"),
    (dict(verifier="multi_step", drafter=MODEL), "needs temperature > 0; use 'greedy'"),
    (dict(verifier="greedy", temperature=1.0, key=KEY), "use 'target_only'"),
    (
        dict(verifier="multi_step", drafter=MODEL, temperature=1.0, key=KEY),
        "not exact for child_sampling = 'shared'.*; use 'target_only'.*child_sampling='iid'",
    ),
    (
        dict(verifier="multi_step", drafter=st.NgramDrafter, temperature=1.0, key=KEY),
        "not exact for child_sampling = 'top_k'",
    ),
    (
        dict(verifier="traversal", drafter=MODEL, temperature=1.0, key=KEY, topology=TREE),
        "'traversal' is not exact for child_sampling = 'shared'",
    ),
    (dict(drafter=IID), "child_sampling = 'iid' needs temperature > 0"),
    (dict(drafter=SMALL), "different vocabularies: 11 and 37 tokens"),
    (
        dict(temperature=1.0, key=jax.random.split(KEY)),
        "a single random key or one for each of",
    ),
    (dict(temperature=1e-40, key=KEY), "temperature = 1e-40 is 0 in float32; use 0"),
    (
        dict(drafter=st.NgramDrafter, topology=st.TreeTopology.from_branching((38,))),
        "only 37 tokens",
    ),
    (dict(drafter=BEAM, topology=st.TreeTopology.beam(38, 1)), "nodes with 38 children"),
    (dict(drafter=drafter_of(st.BeamDrafter, model_of(36))), "vocabularies: 36 and 37"),
    (
        dict(drafter=DYNAMIC, topology=st.TreeTopology.budget(12, 3)),
        "expand = 2 scores at most 10 drafts in 3 levels, fewer",
    ),
    *(
        (
            dict(drafter=drafter, verifier=verifier, **SAMPLED),
            f"not exact for child_sampling = '{children}'",
        )
        for drafter, children in ((BEAM, "top_k"), (DYNAMIC, "shared"))
        for verifier in ("multi_step", "without_replacement", "traversal")
    ),
    (
        dict(temperature=1.0, key=jax.random.key(0, impl="rbg")),
        "'rbg' draw other numbers in another batch; use",
    ),
    (
        dict(temperature=1.0, key=jax.random.key(0, impl="unsafe_rbg")),
        "'rbg' draw other numbers in another batch; use",
    ),
    (dict(local_rows=True), "local_rows = True is for a model on a mesh"),
    (dict(verifier=Unhashable), "'unhashable' is not hashable.*frozen dataclass"),
    (dict(drafter=NoPytree), r"pytree of arrays.*flax\.nnx\.Module"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=readable)
def test_options_are_refused(options, message, monkeypatch):
    def never(*_, **__):
        raise AssertionError("compiled")

    monkeypatch.setattr(SpeculativeDecoder, "start", never)
    made = {
        name: value() if name in ("drafter", "verifier") and callable(value) else value
        for name, value in options.items()
    }
    for run in (st.generate, st.stream):
        with pytest.raises(ValueError, match=message) as error:
            run(tiny_model(), **{"prompts": PROMPTS} | made)
        assert "\n" not in str(error.value)


def checked(verifier, children, topology, *, zero):
    drawn = st.Drawn(children)
    return lambda: st.VERIFIERS[verifier].check(drawn, topology, temperature_is_zero=zero)


# Pairs of a rule and a way to choose children.
PAIRS = [
    ("greedy", "top_k", TREE, False, "exact at temperature 0 only; use 'target_only'"),
    ("multi_step", "iid", TREE, True, "needs temperature > 0; use 'greedy'"),
    ("multi_step", "top_k", TREE, False, "not exact for child_sampling = 'top_k'"),
    ("multi_step", "top_k", CHAIN, False, "not exact for child_sampling = 'top_k'"),
    ("multi_step", "without_replacement", TREE, False, "not exact .*only for 'iid'"),
    ("without_replacement", "iid", TREE, False, "not exact for child_sampling = 'iid'"),
    ("multi_step", "shared", CHAIN, False, "child_sampling = 'shared', only for 'iid'; use 't"),
    ("without_replacement", "shared", TREE, False, "not exact for child_sampling = 'shared'"),
    ("traversal", "shared", CHAIN, False, "not exact for child_sampling = 'shared'"),
    ("traversal", "top_k", CHAIN, False, "not exact for child_sampling = 'top_k'"),
    ("traversal", "beam", CHAIN, False, "not exact for child_sampling = 'beam'"),
    ("traversal", "iid", TREE, True, "needs temperature > 0; use 'greedy'"),
]
TRACED = "run in Python, not under jit, vmap or grad: .* put SpeculativeDecoder inside"


def traced(transform, *keys):
    """`generate` inside a transformation."""

    def call():
        model = tiny_model()
        transform(lambda *key: st.generate(model, PROMPTS, key=key[0] if key else None))(*keys)

    return call


def decoder_of(max_length=64, **sizes):
    return SpeculativeDecoder(
        st.TreeTopology.chain(0), st.VERIFIERS["greedy"], max_length=max_length, **sizes
    )


CALLS = [
    (traced(jax.jit, KEY), TRACED),
    (traced(jax.vmap, jax.random.split(KEY)), TRACED),
    (traced(jax.jit), TRACED),
    (lambda: nnx.jit(lambda model: st.generate(model, PROMPTS))(tiny_model()), TRACED),
    (lambda: jax.jit(lambda n: st.generate(tiny_model(), PROMPTS, max_new_tokens=n))(3), TRACED),
    *((checked(*pair, zero=zero), message) for *pair, zero, message in PAIRS),
    (drafter_of(child_sampling="best"), "child_sampling must be 'auto' or one of .*best"),
    (drafter_of(child_sampling="sorted"), "child_sampling must be 'auto' or one of .*sorted"),
    (
        lambda: SpeculativeDecoder(
            st.TreeTopology.from_parents([-1, 0, 1, 0]), st.VERIFIERS["greedy"], 64
        ),
        "the nodes of topology are not in level order; use its level_order",
    ),
    (lambda: st.score(tiny_model(), np.array(3)), r"texts must be a list .* got array\(3\)"),
    (lambda: decoder_of(max_length=0), "max_length must be an integer, from 1 to .*; got 0"),
    (lambda: decoder_of(max_length=2**31), "max_length must be an integer, from 1 to"),
    (lambda: decoder_of(steps_per_sync=0), "steps_per_sync must be an integer, from 1 to"),
    (lambda: decoder_of(num_best=True), "num_best must be an integer, at least 0; got True"),
    (
        lambda: decoder_of(max_length=20).start(
            *(tiny_model("mamba2attn hybrid"), None),
            st.Context(jnp.zeros((1, 64), jnp.int32), jnp.ones(1, jnp.int32)),
            jax.random.split(KEY, 1),
        ),
        "prompts are a buffer of 64 tokens, and with max_length = 20 a row has 21 places",
    ),
    (lambda: st.generate(tiny_model(), PROMPTS, n=10**9), "n = 1000000000: a batch has at most"),
    (
        lambda: st.NgramDrafter(min_match=3, max_match=2),
        "min_match, with max_match = 2, must be .*; got 3",
    ),
    (
        drafter_of(st.DynamicDrafter, expand=0),
        "expand must be an integer, at least 1; got 0",
    ),
    (drafter_of(st.DynamicDrafter, sharpness=0.0), "sharpness must be a number above 0, got 0.0"),
    (drafter_of(st.DynamicDrafter, sharpness=10**400), "sharpness must be a number above 0, got 1"),
    (drafter_of(st.DynamicDrafter, sharpness=1e39), r"sharpness must be .* got 1e\+39"),
    (drafter_of(st.DynamicDrafter, sharpness=True), "sharpness must be .* got True"),
    (drafter_of(st.DynamicDrafter, sharpness=np.nan), "sharpness must be a .* above 0, got nan"),
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=readable)
def test_calls_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


class Echo(nnx.Module):
    """Drafts the last token again; its state is a number per row."""

    def default_topology(self):
        return st.TreeTopology.chain(1)

    def init(self, batch, topology, max_length):
        return {"seen": jnp.zeros(batch, jnp.int32)}

    def read(self, state, tokens, hidden, lengths):
        return state

    def propose(self, state, step, topology):
        root = st.root_only(step.context).tokens
        tokens = jnp.concatenate([root, root], axis=1)
        tree = topology.tree(jnp.ones_like(tokens, bool))
        finite = jnp.ones(len(root), bool)
        return st.DraftTree(tokens, tree, None, jnp.full(2, -1, jnp.int32), finite), state

    def commit(self, state, draft, verdict, hidden, topology):
        return {"seen": state["seen"] + 1}


@dataclasses.dataclass(frozen=True)
class Follow:
    """Accepts no draft."""

    name: str = "follow"

    def check(self, drawn, topology, *, temperature_is_zero):
        pass

    def verify(self, draft, logits, step, topology):
        tokens = jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)
        return st.Verdict(jnp.zeros_like(tokens), jnp.zeros_like(tokens), tokens)


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
    (
        Follow,
        "verify",
        lambda v: v.last,
        r"WrongFollow.verify must return a Verdict, got int32\[3\]",
    ),
    (Follow, "verify", lambda v: None, "WrongFollow.verify must return a Verdict, got NoneType"),
    (
        Follow,
        "verify",
        lambda v: v._replace(last=v.last[:, None]),
        r"verify must return last as int32\[3\], got int32\[3, 1\]",
    ),
    (
        Follow,
        "verify",
        lambda v: v._replace(next_token=v.next_token.astype(jnp.float32)),
        r"verify must return next_token as int32\[3\], got float32\[3\]",
    ),
    (
        Echo,
        "propose",
        lambda r: r[0],
        "WrongEcho.propose must return a DraftTree and the state, got D",
    ),
    (Echo, "propose", lambda r: (r[0].tokens, r[1]), r"must return a DraftTree, got int32\[3, 2\]"),
    (Echo, "propose", draft(tree=lambda t: t.parents), r"with a Tree as tree, got int32\[3, 2\]"),
    (
        Echo,
        "propose",
        draft(tokens=lambda t: t[:, :1]),
        r"tokens as int32\[3, 2\], got int32\[3, 1\]",
    ),
    (Echo, "propose", draft(finite=lambda f: f[0]), r"finite as bool\[3\], got bool\[\]"),
    (Echo, "propose", draft(finite=lambda f: None), r"finite as bool\[3\], got NoneType"),
    (
        Echo,
        "propose",
        draft(log_probs=lambda _: jnp.zeros((3, 1, 36))),
        r"log_probs as float32\[3, any, 37\], got float32\[3, 1, 36\]",
    ),
    (
        Echo,
        "propose",
        draft(tree=lambda t: t._replace(valid=t.depth)),
        r"WrongEcho.propose must return tree.valid as bool\[3, 2\], got int32\[3, 2\]",
    ),
    (Echo, "propose", lambda r: (r[0], None), "propose must return a state of the structure that"),
    (Echo, "commit", lambda s: None, r"WrongEcho.commit must return a state of .*'seen'.*, got"),
    (Echo, "commit", floats, r"commit must keep state\['seen'\] = int32\[3\], got float32\[3\]"),
    (Echo, "read", floats, r"WrongEcho.read must keep state\['seen'\] = int32\[3\], got float32"),
    (
        Echo,
        "init",
        lambda s: s | {"name": "x"},
        r"init returned .*\['name'\] = 'x'; a state is",
    ),
]


@pytest.mark.parametrize(("base", "method", "change", "message"), RETURNED, ids=readable)
def test_what_a_method_returns_is_checked(base, method, change, message):
    """While the loop is traced: nothing of it is compiled."""
    wrong = changed(base, method, change)
    made = dict(drafter=Echo(), verifier=Follow()) | {
        "drafter" if base is Echo else "verifier": wrong
    }
    with pytest.raises(ValueError, match=message):
        st.generate(tiny_model(), PROMPTS, max_new_tokens=3, **made)


@pytest.mark.parametrize(
    ("verifier", "children", "topology", "zero"),
    [
        ("greedy", "top_k", TREE, True),
        ("greedy", "iid", TREE, True),
        ("target_only", "top_k", TREE, False),
        ("target_only", "without_replacement", TREE, False),
        ("multi_step", "iid", TREE, False),
        ("multi_step", "without_replacement", CHAIN, False),
        ("without_replacement", "without_replacement", TREE, False),
        ("without_replacement", "iid", CHAIN, False),
        ("traversal", "iid", CHAIN, False),
        ("traversal", "without_replacement", CHAIN, False),
        ("traversal", "without_replacement", TREE, False),
        ("traversal", "iid", TREE, False),
    ],
)
def test_exact_pairs_are_allowed(verifier, children, topology, zero):
    checked(verifier, children, topology, zero=zero)()


def test_what_is_next_to_a_refusal_is_allowed():
    plan(tiny_model(), PROMPTS, key=jax.random.key(0, impl="rbg"))  # temperature 0 draws nothing
    plan(tiny_model(), PROMPTS, drafter=DYNAMIC(), topology=st.TreeTopology.budget(11, 3))
    for drafter in (BEAM, DYNAMIC):
        chosen = plan(tiny_model(), PROMPTS, drafter=drafter(), **SAMPLED)
        assert chosen.decoder.verifier.name == "target_only"


WRONG_TYPES = r"""
import pytest
from flax import nnx
import stree_jax as st
from stree_jax.training.recipe import Training

model = st.HybridLM(st.ModelConfig.tiny(), rngs=nnx.Rngs(0))
for change, message in [
    (dict(prompts=None), "prompts must be a list with a list .*, got None"),
    (dict(after=5), "after must be a Prefix: Generation.prefix, Completion.prefix or .*; got 5"),
    (dict(prompts=5), "prompts must be a list with a list .*, got 5"),
    (dict(temperature=10**400), r"temperature must be a number from 0 on, got 10{76}\.\.\.$"),
    (dict(temperature=10**5000), "temperature must be a number from 0 on, got <int>"),
    (dict(top_p=10**400), r"top_p must be in .*\.\.\.$"),
    (dict(max_new_tokens=10**12), "max_new_tokens = 10{12}: in all .* the limit is 16777216$"),
    (dict(eos_token=[[2, [3]]]), r"eos_token must be an integer, .* got \[2, \[3\]\]"),
    (dict(temperature=1.0, key=10**30), "key must be a random key such as .*, got 10{30}$"),
    (dict(temperature=1.0, key=[10**30, 1]), "key must be a random key such as .*, got"),
    (dict(verifier="z" * 999), r"unknown verifier 'z{76}\.\.\.; known"),
    (dict(topology="z" * 999), r"topology must be a TreeTopology, got 'z{76}\.\.\.$"),
    (dict(prompts=[1, 2]), r"prompts\[0\] is not a list of token ids"),
    (dict(prompts=["text"]), r"prompts\[0\] is not a list of token ids"),
    (dict(prompts=[[0.5]]), r"prompts\[0\] has float64 values"),
    (dict(max_new_tokens=2.5), "max_new_tokens must be an integer"),
    (dict(temperature="hot"), "temperature must be a number"),
    (dict(topology=(2, 2)), "topology must be a TreeTopology"),
    (dict(drafter=model), r"drafter must be a ModelDrafter\(\.\.\.\), .*, got HybridLM"),
    (dict(drafter=st.NgramDrafter), "drafter must be .*, got <class"),
    (dict(prompts=[[[1], [2, 3]]]), r"prompts\[0\] is not a list of token ids"),
    (dict(key="seed"), "key must be a random key such as"),
    (dict(stop=3), r"stop must be a list of texts and of lists of token ids, .*, got 3"),
    (dict(key=-1), "key must be a random key such as .*, or a seed from 0 to .*, got -1"),
    (dict(key=True), "key must be a random key such as .*, or a seed from 0 to .*, got True"),
    (dict(verifier=["greedy"]), r"verifier must be one of .*, got \['greedy'\]"),
    (dict(verifier=object()), "verifier must be one of .*, or an object with the name and the"),
    (dict(verifier=type(st.VERIFIERS["greedy"])), "verifier must be one of .*, got <class"),
]:
    with pytest.raises(ValueError, match=message):
        st.generate(model, **({"prompts": [[1]]} | change))
    if {*change} <= {*st.Options().keys()} and "in all" not in message:
        with pytest.raises(ValueError, match=message):
            st.Options(**change)
for call in (lambda: st.generate("path", [[1]]), lambda: st.ModelDrafter("path")):
    with pytest.raises(ValueError, match="must be a HybridLM, got str; load one with"):
        call()
with pytest.raises(ValueError, match="state_size must be an integer, at least 1; got 8.0"):
    st.ModelConfig.tiny(state_size=8.0)
with pytest.raises(ValueError, match="dt_limit must be"):
    st.ModelConfig.tiny(dt_limit=(0.0,))
with pytest.raises(ValueError, match="steps must be an integer, from 1 to 2147483647; got 6.5"):
    Training(steps=6.5)
for make, message in [
    (lambda: st.TreeTopology.paper(["A"]), "the paper's trees are"),
    (lambda: st.TreeTopology.from_parents([-1, 0.7]), "a parent must be an integer; got 0.7"),
    (lambda: st.TreeTopology.chain(2.5), "num_drafts must be an integer, at least 0; got 2.5"),
    (lambda: st.TreeTopology.from_branching(3), r"a sequence such as \(3, 2, 1\), got 3"),
    (lambda: st.TreeTopology.from_branching({2: 1}), r"a sequence such as .*, got \{2: 1\}"),
    (lambda: st.TreeTopology.from_branching({2, 1}), r"a sequence such as .*, got \{1, 2\}"),
    (lambda: st.TreeTopology.from_branching(""), r"a sequence such as \(3, 2, 1\), got ''"),
    (lambda: st.make_mesh(data=10**400), r"data = 10+\.\.\. times model = 1 is 10+\.\.\. devices"),
    (lambda: st.TreeTopology.from_parents(5), r"parents is a sequence such as .*, got 5"),
    (lambda: st.TreeTopology(None), r"parents is a sequence such as .*, got None"),
    (lambda: st.TreeTopology.chain(10**5000), "a tree of <int> nodes or more; at most 4096"),
    (lambda: st.ModelConfig.preset([]), r"unknown preset \[\]; known: Falcon-H1-0.5B, "),
    (lambda: st.from_pretrained(None), "path must be a directory or .*, got None"),
    (lambda: st.load_tokenizer(None), "path must be a directory or .*, got None"),
    (lambda: st.from_pretrained("x", dtype="zz"), "dtype must be float32 or .*, got 'zz'"),
    (lambda: st.from_pretrained("x", implementation="zz"), "implementation .*, got 'zz'"),
    (lambda: st.HybridLM(model.config, dtype="zz", rngs=nnx.Rngs(0)), "dtype must .*, got 'zz'"),
    (lambda: st.HybridLM.abstract(model.config, implementation="zz"), "implementation .* got 'zz'"),
    (lambda: st.from_pretrained("a" * 5000), r"no checkpoint at a{297}\.{3}: File name too"),
    (lambda: st.load_tokenizer("a" * 5000), r"no tokenizer at a{297}\.\.\.$"),
    (lambda: st.HybridLM(None, rngs=nnx.Rngs(0)), "config must be a ModelConfig, .* got None"),
    (lambda: st.HybridLM.abstract("x"), "config must be a ModelConfig, .* got 'x'"),
    (lambda: st.load_medusa(None, model), "path must be the directory of .*, got None"),
    (lambda: st.load_medusa("a" * 5000, model), r"no checkpoint at a{297}\.{3}: there is no"),
    (lambda: st.save_pretrained(model, "a" * 5000), r"the name of /.*a\.{3} is too long; choose"),
    (lambda: st.save_pretrained(model, 5), "path must be the directory to create, got 5"),
    (lambda: st.save_pretrained("model", "x"), "model must be a HybridLM, got str; load one with"),
    (lambda: st.TreeTopology.chain(2).draw(5), "path is a sequence of nodes, got 5 and "),
    (lambda: st.NgramDrafter(max_match=10**12), "max_match must be .* from 1 to 64; got 10{12}$"),
]:
    with pytest.raises(ValueError, match=message):
        make()
with pytest.raises(ValueError, match="max_match must be an integer"):
    st.NgramDrafter(max_match=2.5)
"""


def test_wrong_types_are_refused():
    """In a process without the shape checker, which would raise first."""
    subprocess.run([sys.executable, "-c", WRONG_TYPES], check=True)
