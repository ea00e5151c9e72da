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
from flax.traverse_util import flatten_dict, unflatten_dict

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
    """A model that Tunix trains: actor and reference of an `RLCluster`.

    Tunix pads prompts on the left, and a state-space model must not read padding: rows are moved to
    the left, run, and moved back.
    """

    def __init__(self, model):
        self.model = model

    def __call__(self, tokens, positions=None, cache=None, attention_mask=None, **_):
        """Next-token logits; a token whose row of the mask does not have itself is padding."""
        if cache is not None:
            raise ValueError("Policy has no cache; texts are sampled by TreeSampler")
        first = jnp.zeros(len(tokens), jnp.int32)
        if attention_mask is not None:
            first = jnp.argmax(jnp.diagonal(attention_mask, axis1=1, axis2=2), axis=1)
        logits = self.model(rolled(tokens, -first))[..., : self.model.config.vocab_size]
        return rolled(logits, first), None


def rolled(rows, by):
    """Rotates each row to the right by its shift."""
    return jax.vmap(lambda row, shift: jnp.roll(row, shift, axis=0))(rows, by)


@jax.jit
def log_probs(policy, prompts, completions, pad):
    """Log-probabilities of completions of left-padded prompts, at temperature 1; differentiable."""
    tokens = jnp.concatenate([prompts, completions], axis=1)
    first = jnp.argmax(prompts != pad, axis=1)
    scores = st.text_log_probs(policy.model, rolled(tokens, -first))
    return rolled(scores, first)[:, prompts.shape[1] - 1 :]


class TreeSampler(BaseRollout):
    """A sampler for Tunix that decodes with drafts; texts are the policy's own.

    `ClusterConfig(rollout_engine=functools.partial(TreeSampler, drafter=drafter), ...)`: Tunix
    makes it. New weights are swapped in, and nothing compiles again. The drafter is not trained: as
    the policy moves away from it fewer drafts are accepted, and texts stay exact.
    """

    def __init__(
        self,
        rollout_actor,
        tokenizer,
        mesh=None,
        rollout_config=None,
        *,
        drafter=None,
        topology=None,
        rows=4,
    ):
        self._policy, self._tokenizer, self._key = rollout_actor, tokenizer, jax.random.key(0)
        most = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate
        self._scheduler = st.Scheduler(
            rollout_actor.model, rows=rows, max_length=most, drafter=drafter, topology=topology
        )

    def generate(self, prompts, rollout_config, **_):
        """Samples a text for each prompt; without a seed each call draws others."""
        config, seed = rollout_config, rollout_config.seed
        if seed is None:
            self._key, seed = jax.random.split(self._key)
        keys = jax.random.split(seed, len(prompts))
        tokens = [self._tokenizer.encode(prompt) for prompt in prompts]
        for row, key in zip(tokens, keys, strict=True):
            request = st.Request(
                row,
                max_new_tokens=config.max_tokens_to_generate,
                temperature=float(config.temperature),
                top_k=max(config.top_k or 0, 0),
                top_p=1.0 if config.top_p is None else float(config.top_p),
                eos_token=config.eos_tokens or self.eos_id(),
                key=key,
                log_probs="sampled",
            )
            self._scheduler.submit(request)
        done = sorted(self._scheduler.completions(), key=lambda text: text.request_id)
        return RolloutOutput(
            text=[self._tokenizer.decode(without_end(text)) for text in done],
            logits=None,
            tokens=[np.array(text.tokens, np.int32) for text in done],
            left_padded_prompt_tokens=padded(tokens, self.pad_id(), config.max_prompt_length),
            logprobs=[np.array(text.log_probs, np.float32) for text in done],
        )

    def get_per_token_logps(self, prompt_tokens, completion_tokens):
        """The policy's log-probabilities of completions: those of sampling, to the bit."""
        rows = jnp.asarray(prompt_tokens), jnp.asarray(completion_tokens)
        return log_probs(self._policy, *rows, self.pad_id())

    def update_params(self, params, filter_types=None):
        """Swaps in weights, in the dtypes and on the device of the old ones."""
        state = nnx.state(self._policy)
        old = flatten_dict(nnx.to_pure_dict(state))
        for path, value in flatten_dict(nnx.to_pure_dict(params)).items():
            before, value = old[path], value.astype(old[path].dtype)
            # An array that is committed to its device would compile all programs again.
            if (value.sharding, value.committed) != (before.sharding, before.committed):
                value = jax.device_put(value, before.sharding)
            old[path] = value
        nnx.replace_by_pure_dict(state, unflatten_dict(old))
        nnx.update(self._policy, state)

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
    return text.tokens[: len(text.tokens) - (text.finish_reason == "end_token")]


def padded(prompts, pad, width):
    """Rows of at least so many tokens, with padding on the left."""
    rows = np.full((len(prompts), max(width, *map(len, prompts))), pad, np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[len(row) - len(prompt) :] = prompt
    return rows


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
    """GRPO's loss (arXiv:2402.03300) with the policy's log-probabilities to the bit.

    Tunix's own loss takes them from XLA's `logsumexp`, whose last bits are others.
    """
    new = log_probs(policy, example.prompt_ids, example.completion_ids, pad_id)
    ratio, is_text = jnp.exp(new - example.old_per_token_logps), example.completion_mask
    clipped = jnp.clip(ratio, 1 - algo_config.epsilon, 1 + algo_config.epsilon)
    advantages = example.advantages[:, None]
    gain = jnp.minimum(ratio * advantages, clipped * advantages)
    ratio = jnp.where(is_text, ratio, 1.0)
    loss = -(gain * is_text).sum() / is_text.sum()
    return loss, {"ratio/min": ratio.min(), "ratio/max": ratio.max()}


def trained(policy, drafter, words, steps):
    """Runs steps of Tunix's GRPO, each of two passes; its sampler, ratios and mean rewards."""
    register_policy_loss_fn("to the bit")(policy_loss)
    rewards, roles = [], (rl_cluster.Role.ACTOR, rl_cluster.Role.ROLLOUT)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    cluster = rl_cluster.RLCluster(
        actor=policy,
        tokenizer=words,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            rollout_engine=functools.partial(TreeSampler, drafter=drafter),
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(1e-4), eval_every_n_steps=100, max_steps=2 * steps
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=16, max_prompt_length=16, temperature=1.0
            ),
        ),
    )

    def reward(prompts, completions, **_):
        scores = [text.count("e") / 16 for text in completions]
        rewards.append(np.mean(scores))
        return scores

    learner = grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        reward_fns=reward,
        algo_config=grpo_learner.GRPOConfig(
            num_generations=4, num_iterations=2, beta=0.0, policy_loss_fn="to the bit"
        ),
    )
    logged = {"ratio/min": np.min, "ratio/max": np.max}
    cluster.actor_trainer.with_rl_metrics_to_log(logged)
    learner.train([{"prompts": np.array(PROMPTS)}] * steps)
    logger = cluster.actor_trainer.metrics_logger
    ratios = [logger.get_metric_history("actor", name, "train") for name in logged]
    return cluster.rollout, np.stack(ratios), rewards


def main(steps=4) -> None:
    """Compares log-probabilities in a gradient with those of sampling; trains with Tunix."""
    model = st.from_pretrained(st.demo_path("target"))
    drafter = st.ModelDrafter(st.load_draft(st.demo_path("draft"), model))
    words = Words(st.load_tokenizer(st.demo_path("target")), 0)
    tokens, policy = [words.encode(prompt) for prompt in PROMPTS], Policy(model)
    options = dict(max_new_tokens=8, temperature=1.0, eos_token=(), log_probs="sampled")
    out = st.generate(model, tokens, drafter=drafter, key=jax.random.key(0), **options)
    prompts, most = padded(tokens, words.pad_id(), 16), 0 if bits_obstacle(model) is None else 1e-3

    @nnx.jit
    @functools.partial(nnx.grad, has_aux=True)
    def gradient(policy):
        scores = log_probs(policy, prompts, out.tokens, words.pad_id())
        return scores.sum(), scores

    ratios = np.exp(gradient(policy)[1] - out.log_probs)
    print(f"{out.stats.tau:.2f} tokens per target call")
    print(f"importance ratios are 1, within {most}: {(abs(ratios - 1) <= most).all()}")
    if BaseRollout is object:
        print("pip install google-tunix, and it trains too")
        return
    sampler, ratios, rewards = trained(policy, drafter, words, steps)
    first, second = ratios[:, ::2], ratios[:, 1::2]
    print(f"of first passes: {(abs(first - 1) <= most).all()}; then {second.min()} to {second.max()}")
    config = RolloutConfig(max_tokens_to_generate=16, max_prompt_length=16, temperature=1.0)
    new = sampler.generate(PROMPTS, config)
    ...


if __name__ == "__main__":
    main()
