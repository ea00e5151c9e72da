"""JAX's switches, as research code sets them: no token depends on any."""

import contextlib
import functools

import jax
import numpy as np
import pytest

import stree_jax as st
from stree_jax.testing import CONFIGS, PROMPTS, perturbed, random_model, tiny_model
from tests.extensions.heads import HEADS, parts
from tests.methods import METHODS, TREE, drafts

SWITCHES = (
    lambda: jax.enable_x64(True),
    lambda: jax.numpy_dtype_promotion("strict"),
    lambda: jax.numpy_rank_promotion("raise"),
    lambda: jax.default_prng_impl("rbg"),
    lambda: jax.transfer_guard("disallow"),
)
# One layer of each kind, in sizes that native code takes.
EVERY = st.ModelConfig(
    vocab_size=37,
    d_model=16,
    layers=(
        st.Mamba2Config(num_heads=2, head_dim=16, state_size=16, num_groups=2),
        st.MoeConfig(num_experts=3, num_active=2, hidden_size=16, router="sigmoid"),
        st.GatedDeltaConfig(num_heads=2, head_dim=16, num_groups=1, state_size=16),
        st.AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=16, rotary_dim=8, qkv_bias=True),
    ),
    tie_embeddings=False,
)
RULES = dict(
    top_k=8,
    top_p=0.9,
    filters=[st.MinP(0.01)],
    processors=[
        *(st.RepetitionPenalty(1.2), st.FrequencyPenalty(0.3), st.PresencePenalty(0.5)),
        *(st.LogitBias({7: -2.0}), st.BannedTokens([3])),
    ],
    min_new_tokens=2,
    stop=[[1, 2]],
    top_log_probs=2,
)


@functools.cache
def every(**options):
    return random_model(EVERY, **options)


def generated(model, drafter=None, topology=None, temperature=1.0, **options):
    options = dict(max_new_tokens=6, key=3) | options
    request = dict(drafter=drafter, topology=topology, temperature=temperature)
    out = st.generate(model, PROMPTS, **request, **options)
    return out.tokens, out.log_probs


def ruled(model):
    return generated(model, st.ModelDrafter(perturbed(model, 0.1)), TREE, **RULES)


def served():
    """Rows that begin while others run, and a prompt of several chunks."""
    drafting = dict(drafter=st.NgramDrafter(), topology=TREE)
    scheduler = st.Scheduler(tiny_model(), rows=2, max_length=90, quantum=3, **drafting)
    for seed, prompt in enumerate([[1, 2, 3], [4, 5] * 40, [7]]):
        scheduler.submit(st.Request(prompt, max_new_tokens=5, temperature=seed / 2, key=seed))
    return {each.request_id: each.tokens for each in scheduler.completions()}


def functional():
    """The loop inside a program, with arrays that are on the device."""
    decoder = st.SpeculativeDecoder(TREE, "target_only", max_length=64, num_best=1)
    prompts = st.Context(np.array([[5, 9, 2], [3, 0, 0]]), np.array([3, 1]))  # in 64 bits
    limits = st.Limits(np.array([6, 4]), np.full((2, 1), -1))
    sampling = st.Sampling(np.full(2, 0.8), filters=(st.TopP(np.full(2, 0.9)),))
    arrays = jax.device_put((np.zeros((2, 2), np.uint32), prompts, limits, sampling))

    @jax.jit
    def decode(model, drafter, data, prompts, limits, sampling):
        keys = jax.random.wrap_key_data(data, impl="threefry2x32")
        state = decoder.start(model, drafter, prompts, keys, sampling)
        tokens = decoder.run(model, drafter, state, limits, sampling).context.tokens[:, :12]
        return tokens, st.text_log_probs(model, tokens)

    drafter = st.DynamicDrafter(perturbed(tiny_model(), 0.1), expand=2)
    return decode(tiny_model(), drafter, *arrays)


def loaded(folder):
    """A model from files, in 8 bits."""
    st.save_pretrained(every(), folder / "model")
    model = st.from_pretrained(folder / "model", quantize="int8")
    return ruled(model), st.score(model, PROMPTS)


def streamed():
    pieces = st.stream(tiny_model(), PROMPTS, **drafts(tiny_model()), max_new_tokens=6)
    return [[*map(list, rows)] for rows in pieces]


def going_on():
    """Several texts of a prompt, and then more of each."""
    model = tiny_model("qwen3_5 hybrid")
    options = dict(max_new_tokens=4, temperature=1.0, key=0, **drafts(model))
    first = st.generate(model, PROMPTS, n=2, return_prefix=True, **options)
    return first.tokens, st.generate(model, [[3]] * 6, after=first.prefix, **options).tokens


def gradient():
    loss = jax.jit(jax.grad(lambda model, tokens: st.text_log_probs(model, tokens).sum()))
    return loss(every(), jax.device_put(np.array([[1, 2, 3, 4, 5]], np.int32)))


def of_kind(name, **options):
    model = tiny_model(name, **options)
    return generated(model, **drafts(model))


def verified(verifier, child_sampling):
    drafter = st.ModelDrafter(perturbed(tiny_model(), 0.1), child_sampling=child_sampling)
    return generated(tiny_model(), drafter, TREE, verifier=verifier, lossy=verifier == "typical")


@functools.cache
def made(name):
    return drafts(tiny_model(), name)


def by(name):
    return [generated(tiny_model(), **made(name), temperature=heat) for heat in (0, 1)]


def with_head(name):
    return generated(parts(name).target, parts(name).drafter())


def in_kernels():
    model = every(implementation="pallas_interpret")
    return generated(model, st.ModelDrafter(perturbed(model, 0.1)), TREE, max_new_tokens=3)


QUICK = {"scheduler": served, "functional": functional}
SLOW = {"stream": streamed, "going on": going_on, "gradient": gradient, "kernels": in_kernels}
SLOW |= {"rules": lambda: ruled(every())}
SLOW |= {name: functools.partial(of_kind, name) for name in CONFIGS}
SLOW |= {
    f"{name}, bfloat16": functools.partial(of_kind, f"{name} hybrid", dtype="bfloat16")
    for name in ("qwen3_next", "mamba2attn", "nemotron_h", "zamba2", "falcon_h1")
}
SLOW |= {name: functools.partial(by, name) for name in METHODS if not name.startswith("paper")}
SLOW |= {name: functools.partial(with_head, name) for name in HEADS}
SLOW |= {
    name: functools.partial(verified, name, child_sampling)
    for name, child_sampling in {
        "multi_step": "iid",
        "without_replacement": "without_replacement",
        "traversal": "without_replacement",
        "typical": "shared",
    }.items()
}


def check(decode):
    want = decode()
    with contextlib.ExitStack() as stack:
        for switch in SWITCHES:
            stack.enter_context(switch())
        got = decode()
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), got, want)


@pytest.mark.parametrize("name", QUICK)
def test_all_at_once(name):
    check(QUICK[name])


def test_all_at_once_with_files(tmp_path):
    folders = iter((tmp_path / "without", tmp_path / "with"))
    check(lambda: loaded(next(folders)))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_at_once(name):
    check(SLOW[name])
