"""Rollouts for Tunix, against the real package where it is installed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.testing import perturbed, random_model
from tests.helpers import COMPILED

base_rollout = pytest.importorskip("tunix.rl.rollout.base_rollout")
common = pytest.importorskip("tunix.rl.common")

from stree_jax.extensions.tunix import Policy, TreeRollout  # noqa: E402

CONFIG = st.ModelConfig.tiny(vocab_size=40, num_layers=2)
PROMPTS = ["abc", "q", "hello world"]


class Letters:
    """A tokenizer of letters; 0 pads, 1 begins, 2 ends."""

    def encode(self, text, **_):
        return [3 + ord(letter) % 30 for letter in text]

    def decode(self, ids, **_):
        return "".join(chr(97 + int(token)) for token in ids)

    def pad_id(self):
        return 0

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2


@functools.cache
def model():
    return random_model(CONFIG)


def rollout(policy=None, **options):
    drafter = st.ModelDrafter(perturbed(model(), 0.1))
    policy = Policy(nnx.clone(model())) if policy is None else policy
    return TreeRollout(policy, Letters(), drafter=drafter, **options)


def config(**options):
    common = dict(max_tokens_to_generate=10, max_prompt_length=16, return_logprobs=True)
    return base_rollout.RolloutConfig(**common | options)


def test_texts_and_log_probs():
    engine = rollout()
    own = config(seed=jax.random.PRNGKey(3), temperature=0.8, top_p=0.9)
    out = engine.generate(PROMPTS, own)
    tokens = [[1, *Letters().encode(prompt)] for prompt in PROMPTS]
    want = st.generate(
        model(), tokens, max_new_tokens=10, temperature=0.8, top_p=0.9, key=own.seed,
        eos_token=2, log_probs="sampled",
    )  # fmt: skip
    for i, prompt in enumerate(tokens):
        assert out.tokens[i].tolist() == want.tokens[i, : want.lengths[i]].tolist()
        np.testing.assert_allclose(out.logprobs[i], want.log_probs[i, : want.lengths[i]], atol=1e-4)
        assert out.left_padded_prompt_tokens[i].tolist() == [0] * (16 - len(prompt)) + prompt
        assert 2 not in Letters().encode(out.text[i])
    again = engine.generate(PROMPTS, config())
    other = engine.generate(PROMPTS, config())
    assert any(a.tolist() != b.tolist() for a, b in zip(again.tokens, other.tokens, strict=True))


def test_log_probs_are_tunixs_own():
    """Of left-padded prompts: Tunix's own function with a `Policy`, and the rollout's."""
    engine = rollout()
    out = engine.generate(PROMPTS, config(temperature=1.0, seed=jax.random.PRNGKey(1)))
    completions = np.zeros((3, 10), np.int32)
    for row, tokens in zip(completions, out.tokens, strict=True):
        row[: len(tokens)] = tokens
    prompts = jnp.asarray(out.left_padded_prompt_tokens)
    got = engine.get_per_token_logps(prompts, jnp.asarray(completions))
    structure, state = nnx.split(engine.model())
    theirs = common.compute_per_token_logps(
        structure,
        state,
        prompt_tokens=prompts,
        completion_tokens=jnp.asarray(completions),
        pad_id=0,
        eos_id=2,
    )
    for i, tokens in enumerate(out.tokens):
        count = len(tokens)
        np.testing.assert_allclose(got[i, :count], out.logprobs[i], atol=1e-4)
        np.testing.assert_allclose(theirs[i, :count], out.logprobs[i], atol=1e-4)


def test_new_weights_compile_nothing():
    engine, own = rollout(), config(seed=jax.random.PRNGKey(3), temperature=0.0)
    before = engine.generate(PROMPTS, own)
    changed = perturbed(model(), 0.3, seed=5)
    count = len(COMPILED)
    engine.update_params(nnx.state(Policy(changed), nnx.Param), (nnx.Param,))
    after = engine.generate(PROMPTS, own)
    assert len(COMPILED) == count
    tokens = [[1, *Letters().encode(prompt)] for prompt in PROMPTS]
    want = st.generate(changed, tokens, max_new_tokens=10, eos_token=2)
    for i in range(3):
        assert after.tokens[i].tolist() == want.tokens[i, : want.lengths[i]].tolist()
    assert any(a.tolist() != b.tolist() for a, b in zip(before.tokens, after.tokens, strict=True))


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"rollout_actor must be a Policy\(model\), got HybridLM"):
        rollout(model())
    with pytest.raises(ValueError, match="of shape .*: the policy's does not exist"):
        rollout().update_params({"model": {"other": jnp.zeros(3)}})
    with pytest.raises(ValueError, match=r"weight model\.embedding of shape .* has the shape"):
        rollout().update_params({"model": {"embedding": jnp.zeros(3)}})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of Tunix
def test_grpo_trains_a_policy():
    """Two steps of Tunix's own trainer, which makes the rollout and gives it new weights."""
    rl_cluster = pytest.importorskip("tunix.rl.rl_cluster")
    grpo = pytest.importorskip("tunix.rl.grpo.grpo_learner")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    drafter = st.ModelDrafter(perturbed(model(), 0.1))
    cluster = rl_cluster.RLCluster(
        actor=Policy(nnx.clone(model())),
        reference=Policy(nnx.clone(model())),
        tokenizer=Letters(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(
                (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT), mesh
            ),
            rollout_engine=functools.partial(TreeRollout, drafter=drafter),
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(1e-3), eval_every_n_steps=100, max_steps=2
            ),
            rollout_config=config(max_tokens_to_generate=8, temperature=1.0),
        ),
    )
    learner = grpo.GRPOLearner(
        rl_cluster=cluster,
        reward_fns=lambda prompts, completions, **_: [text.count("e") for text in completions],
        algo_config=grpo.GRPOConfig(num_generations=2, num_iterations=1, beta=0.04),
    )
    before = np.array(cluster.rollout.model().model.embedding[...])
    learner.train([{"prompts": np.array(texts)} for texts in (["ab", "cd"], ["ef", "gh"])])
    after = np.array(cluster.rollout.model().model.embedding[...])
    assert isinstance(cluster.rollout, TreeRollout)
    assert np.abs(after - before).max() > 1e-4
