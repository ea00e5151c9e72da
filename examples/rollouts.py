"""Reinforcement learning by Google's Tunix, with rollouts decoded by trees.

On a CPU with native code the log-probabilities of a rollout are, to the bit, those that a loss
computes of its texts, so the first importance weights are 1. `pip install google-tunix`; without it
`Policy` and these numbers alone are checked.
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
    from tunix.rl.grpo import grpo_learner
    from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput
except ImportError:
    BaseRollout = object


class Policy(nnx.Module):
    """A model that Tunix trains: actor, reference and rollout actor of an `RLCluster`.

    Tunix pads prompts on the left, and a state-space model must not read padding: rows are moved to
    the left, run, and moved back.
    """

    def __init__(self, model):
        self.model = model.in_first()  # names and shapes as Tunix has them

    def __call__(self, tokens, positions=None, cache=None, attention_mask=None, **_):
        """Next-token logits; a token whose row of the mask does not have itself is padding."""
        if cache is not None:
            raise ValueError("Policy has no cache; texts are sampled by TreeRollout")
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
    """Log-probabilities of completions of left-padded prompts, at temperature 1."""
    tokens = jnp.concatenate([prompts, completions], axis=1)
    real = jnp.arange(tokens.shape[1]) >= jnp.argmax(prompts != pad, axis=1)[:, None]
    seen = jnp.broadcast_to(real[..., None], (*real.shape, tokens.shape[1]))
    logits, _ = policy(tokens, attention_mask=seen)
    scores = jax.nn.log_softmax(logits[:, prompts.shape[1] - 1 : -1])
    return jnp.take_along_axis(scores, completions[..., None], axis=2)[..., 0]


class TreeRollout(BaseRollout):
    """A rollout engine of Tunix that decodes with trees; texts are the policy's own.

    `ClusterConfig(rollout_engine=functools.partial(TreeRollout, drafter=drafter), ...)`: Tunix
    makes it. New weights are swapped in, and nothing compiles again. The drafter is not trained: as
    the policy moves away from it fewer drafts are accepted, and texts stay exact.
    """

    def __init__(
        self, rollout_actor, tokenizer, mesh=None, rollout_config=None, *, drafter, topology=None
    ):
        self._policy, self._tokenizer = rollout_actor, tokenizer
        self._drafts = dict(drafter=drafter, topology=topology)
        self._key = jax.random.key(0)

    def generate(self, prompts, rollout_config, **_):
        """Samples a text for each prompt; without a seed each call draws others."""
        own, tokens = rollout_config, [self._tokenizer.encode(prompt) for prompt in prompts]
        if own.seed is None:
            self._key, seed = jax.random.split(self._key)
        out = st.generate(
            self._policy.model,
            tokens,
            max_new_tokens=own.max_tokens_to_generate,
            temperature=float(own.temperature),
            top_k=max(own.top_k or 0, 0),
            top_p=1.0 if own.top_p is None else float(own.top_p),
            eos_token=own.eos_tokens or self.eos_id(),
            key=seed if own.seed is None else own.seed,
            log_probs="sampled" if own.return_logprobs else False,
            **self._drafts,
        )
        new, chosen = (
            None if rows is None else [row[:n] for row, n in zip(rows, out.lengths, strict=True)]
            for rows in (out.tokens, out.log_probs)
        )
        texts = [
            self._tokenizer.decode(row[: len(row) - (reason == "end_token")].tolist())
            for row, reason in zip(new, out.finish_reasons, strict=True)
        ]
        left = padded(tokens, self.pad_id(), own.max_prompt_length)
        return RolloutOutput(
            text=texts, logits=None, tokens=new, left_padded_prompt_tokens=left, logprobs=chosen
        )

    def get_per_token_logps(self, prompt_tokens, completion_tokens):
        """The policy's log-probabilities of completions."""
        rows = jnp.asarray(prompt_tokens), jnp.asarray(completion_tokens)
        return log_probs(self._policy, *rows, self.pad_id())

    def update_params(self, params, filter_types=None):
        """Swaps in weights, in the dtypes and on the device of the old ones."""
        state = nnx.state(self._policy)
        old = flatten_dict(nnx.to_pure_dict(state))
        for path, value in flatten_dict(nnx.to_pure_dict(params)).items():
            own, value = old[path], value.astype(old[path].dtype)
            # An array that is committed to its device would compile all programs again.
            if (value.sharding, value.committed) != (own.sharding, own.committed):
                value = jax.device_put(value, own.sharding)
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


def trained(model, drafter, words, prompts):
    """Runs two steps of Tunix's GRPO, which makes the rollouts, and returns the policy."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    roles = rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT
    cluster = rl_cluster.RLCluster(
        actor=Policy(nnx.clone(model)),
        reference=Policy(nnx.clone(model)),
        tokenizer=words,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            rollout_engine=functools.partial(TreeRollout, drafter=drafter),
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(1e-3), eval_every_n_steps=100, max_steps=2
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=8, max_prompt_length=16, return_logprobs=True
            ),
        ),
    )
    learner = grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        reward_fns=lambda prompts, completions, **_: [text.count("e") for text in completions],
        algo_config=grpo_learner.GRPOConfig(num_generations=2, num_iterations=1, beta=0.04),
    )
    learner.train([{"prompts": np.array([prompt, prompt])} for prompt in prompts])
    return cluster.rollout


def main() -> None:
    """Compares log-probabilities of padded prompts with those of sampling; trains with Tunix."""
    model = st.from_pretrained(st.demo_path("target"))
    drafter = st.ModelDrafter(st.load_draft(st.demo_path("draft"), model))
    words = Words(st.load_tokenizer(st.demo_path("target")), 0)
    prompts = ["Once upon", "The train was late"]
    tokens = [words.encode(prompt) for prompt in prompts]
    options = dict(max_new_tokens=8, temperature=1.0, eos_token=(), log_probs="sampled")
    out = st.generate(model, tokens, drafter=drafter, key=jax.random.key(0), **options)
    policy = Policy(model)
    found = log_probs(policy, padded(tokens, words.pad_id(), 16), out.tokens, words.pad_id())
    is_close = np.abs(found - out.log_probs).max() < 1e-3
    print(f"{out.stats.tau:.2f} tokens per target call, log-probabilities as sampled: {is_close}")
    if bits_obstacle(model) is None:
        texts = [[*prompt, *new] for prompt, new in zip(tokens, out.tokens.tolist(), strict=True)]
        scored = np.stack([scores[-8:] for scores in st.score(model, texts)])
        of_loss = [jax.jit(st.text_log_probs)(model, np.array([text]))[0, -8:] for text in texts]
        ratios = np.exp(scored - out.log_probs), np.exp(np.stack(of_loss) - out.log_probs)
        print(f"importance weights are 1, to the bit: {all((each == 1).all() for each in ratios)}")
    if BaseRollout is object:
        print("pip install google-tunix, and it trains too")
        return
    rollout = trained(model, drafter, words, prompts)
    config = RolloutConfig(max_tokens_to_generate=8, max_prompt_length=16, temperature=0.0)
    new = rollout.generate(prompts, config)
    own = st.generate(rollout.model().model, tokens, max_new_tokens=8, eos_token=words.eos_id())
    is_own = [row.tolist() for row in new.tokens] == [
        row[:n].tolist() for row, n in zip(own.tokens, own.lengths, strict=True)
    ]
    moved = rollout.model().model.embedding[...] - policy.model.embedding[...]
    print(f"trained: {bool(jnp.abs(moved).max() > 1e-4)}, its texts are its own: {is_own}")


if __name__ == "__main__":
    main()
