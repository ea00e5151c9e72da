"""Reinforcement learning by Google's Tunix, whose texts a `Scheduler` samples with drafts.

`pip install google-tunix`. The class follows the release 0.1.7: a sampler is a `BaseRollout`, with
`generate`, `get_per_token_logps` and `update_params`. (The protocol with `sample` and `weight_sync`
is in Tunix's repository only, as `tunix.experimental.rollout.sampler`.) Without Tunix the policy
alone is checked: its log-probabilities are, to the bit, those of sampling.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import stree_jax as st
from stree_jax.testing import bits_obstacle

try:
    from tunix.rl import rl_cluster
    from tunix.rl.function_registry import register_policy_loss_fn
    from tunix.rl.grpo import grpo_learner
    from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput
except ImportError:
    BaseRollout = object

PROMPTS = "Once upon", "The train was late", "Ann has", "Every morning"


class Policy(nnx.Module):
    """A model that Tunix trains: the actor of an `RLCluster`.

    Its matrices are packed, as a CPU reads them, and each of their arrays is a weight for Tunix.
    `policy_loss` reads the model. Tunix's own losses, and a reference with `beta`, call it: they
    are not for this class.
    """

    def __init__(self, model):
        weights, self.structure = jax.tree.flatten(model)
        self.weights = nnx.List(map(nnx.Param, weights))

    @property
    def model(self):
        """The model with the weights of now."""
        return jax.tree.unflatten(self.structure, jax.tree.leaves(self.weights))


@jax.jit
def log_probs(policy, prompts, completions, pad):
    """Log-probabilities of completions of left-padded prompts, at temperature 1; differentiable.

    A state-space model must not read padding: rows are moved to the left, read, and moved back.
    """
    tokens = jnp.concatenate([prompts, completions], axis=1)
    first = jnp.argmax(prompts != pad, axis=1)
    scores = st.text_log_probs(policy.model, jax.vmap(jnp.roll)(tokens, -first))
    return jax.vmap(jnp.roll)(scores, first)[:, prompts.shape[1] - 1 :]


class TreeSampler(BaseRollout):
    """A sampler for Tunix that decodes with drafts; texts are the policy's own.

    `ClusterConfig(rollout_engine=functools.partial(TreeSampler, drafter=drafter), ...)`: Tunix
    makes it. New weights are swapped in, and nothing compiles again. The drafter is not trained: as
    the policy moves away from it fewer drafts are accepted, and texts stay exact.
    """

    def __init__(self, rollout_actor, tokenizer, mesh, rollout_config, **drafts):
        self._policy, self._tokenizer, self._key = rollout_actor, tokenizer, jax.random.key(0)
        most = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate
        self._scheduler = st.Scheduler(rollout_actor.model, rows=4, max_length=most, **drafts)

    def generate(self, prompts, rollout_config, **_):
        """Samples a text for each prompt; without a seed each call draws others."""
        self._scheduler.update(self._policy.model)  # Tunix trains it in place
        config, seed = rollout_config, rollout_config.seed
        if seed is None:
            self._key, seed = jax.random.split(self._key)
        tokens = [self._tokenizer.encode(prompt) for prompt in prompts]
        for row, key in zip(tokens, jax.random.split(seed, len(tokens)), strict=True):
            request = st.Request(
                row,
                max_new_tokens=config.max_tokens_to_generate,
                temperature=float(config.temperature),
                top_k=max(config.top_k or 0, 0),
                top_p=config.top_p or 1.0,
                eos_token=config.eos_tokens or self.eos_id(),
                key=key,
                log_probs="sampled",
            )
            self._scheduler.submit(request)
        done = sorted(self._scheduler.completions(), key=lambda text: text.request_id)
        if errors := [text.error for text in done if text.error]:
            raise RuntimeError(errors[0])
        return RolloutOutput(
            [self._tokenizer.decode(without_end(text)) for text in done],
            None,  # logits
            [np.array(text.tokens) for text in done],
            padded(tokens, self.pad_id(), config.max_prompt_length),
            [np.array(text.log_probs, np.float32) for text in done],
        )

    def get_per_token_logps(self, prompt_tokens, completion_tokens):
        """The policy's log-probabilities of completions: those of sampling, to the bit."""
        return log_probs(self._policy, prompt_tokens, completion_tokens, self.pad_id())

    def update_params(self, params, filter_types=None):
        """Takes weights, on the device of the old ones: nothing is compiled."""
        places = jax.tree.map(lambda old: old.sharding, nnx.state(self._policy))
        nnx.update(self._policy, jax.device_put(params, places))

    def pad_id(self):
        """The id that pads prompts and completions."""
        return self._tokenizer.pad_id()

    def eos_id(self):
        """The end token."""
        return self._tokenizer.eos_id()

    def model(self):
        """The policy."""
        return self._policy


def without_end(text):
    """The new tokens of a completion, without its end token."""
    return text.tokens[:-1] if text.finish_reason == "end_token" else text.tokens


def padded(prompts, pad, width):
    """Rows of so many tokens, with padding on the left."""
    return np.array([[pad] * (width - len(prompt)) + prompt for prompt in prompts], np.int32)


class Words:
    """A tokenizer with the methods that Tunix calls."""

    def __init__(self, tokenizer, end):
        self._tokenizer, self._end = tokenizer, end

    def encode(self, text, **_):
        return self._tokenizer.encode(text).ids

    def decode(self, ids, **_):
        return self._tokenizer.decode([int(token) for token in ids])

    def pad_id(self):
        return self._end

    eos_id = pad_id

    def bos_id(self):
        return None


def policy_loss(policy, example, algo_config, pad_id, **_):
    """GRPO's clipped loss (arXiv:2402.03300), of log-probabilities that are those of sampling.

    Tunix's own loss takes them from XLA's `logsumexp`, whose last bits are others.
    """
    new = log_probs(policy, example.prompt_ids, example.completion_ids, pad_id)
    is_text, advantages = example.completion_mask, example.advantages[:, None]
    ratio = jnp.exp(jnp.where(is_text, new - example.old_per_token_logps, 0.0))
    clipped = jnp.clip(ratio, 1 - algo_config.epsilon, 1 + algo_config.epsilon)
    gain = jnp.minimum(ratio * advantages, clipped * advantages)
    loss = -(gain * is_text).sum() / is_text.sum()
    return loss, {"ratio/min": ratio.min(), "ratio/max": ratio.max()}


def reward(prompts, completions, **_):
    """How many letters e there are."""
    return [text.count("e") for text in completions]


def trained(policy, drafter, words, config):
    """Runs 4 steps of Tunix's GRPO, of two passes each; the sampler, and the ratios of passes."""
    register_policy_loss_fn("to the bit")(policy_loss)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    cluster = rl_cluster.RLCluster(
        actor=policy,
        tokenizer=words,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={rl_cluster.Role.ACTOR: mesh, rl_cluster.Role.ROLLOUT: mesh},
            rollout_engine=functools.partial(TreeSampler, drafter=drafter),
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(1e-4), eval_every_n_steps=100, max_steps=8
            ),
            rollout_config=config,
        ),
    )
    learner = grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        reward_fns=reward,
        algo_config=grpo_learner.GRPOConfig(
            num_generations=4, num_iterations=2, beta=0.0, policy_loss_fn="to the bit"
        ),
    )
    logged = {"ratio/min": np.min, "ratio/max": np.max}
    cluster.actor_trainer.with_rl_metrics_to_log(logged)
    learner.train([{"prompts": np.array(PROMPTS)}] * 4)
    logger = cluster.actor_trainer.metrics_logger
    ratios = [logger.get_metric_history("actor", name, "train") for name in logged]
    return cluster.rollout, np.stack(ratios)


def main():
    """Compares log-probabilities in a gradient with those of sampling; trains with Tunix."""
    model = st.from_pretrained(st.demo_path("target"))
    drafter = st.ModelDrafter(st.load_draft(st.demo_path("draft"), model))
    words = Words(st.load_tokenizer(st.demo_path("target")), 0)
    tokens, most = [words.encode(prompt) for prompt in PROMPTS], 16
    out = st.generate(
        model,
        tokens,
        drafter=drafter,
        max_new_tokens=most,
        temperature=1.0,
        eos_token=(),
        key=0,
        log_probs="sampled",
    )

    @functools.partial(nnx.grad, has_aux=True)
    def slope(policy):
        scores = log_probs(policy, padded(tokens, 0, most), out.tokens, 0)
        return scores.sum(), scores

    # Without native code the order of sums differs.
    error = 0.0 if bits_obstacle(model) is None else 1e-3
    ratios = np.exp(nnx.jit(slope)(Policy(model))[1] - out.log_probs)
    assert (abs(ratios - 1) <= error).all(), ratios
    print(f"{out.stats.tau:.2f} tokens per target call")
    print(f"importance ratios in a gradient are 1, within {error}: True")
    if BaseRollout is object:
        print("pip install google-tunix, and it trains too")
        return
    config = RolloutConfig(max_tokens_to_generate=most, max_prompt_length=most, temperature=1.0)
    sampler, ratios = trained(Policy(model), drafter, words, config)
    assert (abs(ratios[:, ::2] - 1) <= error).all(), ratios
    print("so they are in the first passes of Tunix's GRPO")
    print(f"in its last pass they are {ratios[0, -1]:.2f} to {ratios[1, -1]:.2f}")
    sampler.update_params(nnx.state(Policy(model)))
    config.temperature = 0.0
    texts = sampler.generate(PROMPTS, config).tokens
    before = st.generate(model, tokens, max_new_tokens=most, eos_token=0)
    pairs = zip(texts, before.tokens, strict=True)
    print(f"old weights, old texts: {all((new == old[: len(new)]).all() for new, old in pairs)}")


if __name__ == "__main__":
    main()
