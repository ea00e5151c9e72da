"""GRPO (arXiv:2402.03300) in one file: groups of texts sampled with drafts, updates by optax.

    python examples/grpo.py

On a CPU with native code sampling and loss have equal log-probabilities, to the bit, with drafts or
without: the importance ratio is 1 in the first pass over a group, and nothing has to read the texts
before. The draft model learns from the texts too, and so follows the policy.
"""

import collections
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import stree_jax as st
from stree_jax.testing import bits_obstacle


def reward(text):
    """What is to be learned: texts with many letters e."""
    return text.count("e")


def new_log_probs(model, tokens, is_new):
    """Log-probabilities of new tokens, the last ones of their rows; 0 after an end."""
    log_probs = st.text_log_probs(model, tokens)[:, -is_new.shape[1] :]
    return jnp.where(is_new, log_probs, 0.0)


def loss(model, tokens, is_new, before, advantages):
    """GRPO's clipped loss, and the importance ratio of each new token."""
    ratio = jnp.exp(new_log_probs(model, tokens, is_new) - before)
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
    return -(gain * is_new).sum() / is_new.sum(), ratio


def imitation(draft, tokens, is_new):
    """The cross-entropy of the policy's texts."""
    value = -new_log_probs(draft, tokens, is_new).mean()
    return value, value


def learner(model, objective, rate):
    """A function that takes a step of a model's weights, and returns what the objective adds."""
    optimizer = optax.adam(rate)
    state = optimizer.init(model)

    @jax.jit
    def updated(model, state, *arguments):
        gradient, extra = jax.grad(objective, has_aux=True)(model, *arguments)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(model, updates), state, extra

    def learn(*arguments):
        nonlocal state
        new, state, extra = updated(model, state, *arguments)
        nnx.update(model, nnx.state(new))
        return extra

    return learn


def main(steps=40, samples=4, new_tokens=96, rate=1e-3):
    """Trains the embedded model, and compares steps with and without drafts."""
    model, draft = (st.from_pretrained(st.demo_path(name)) for name in ("target", "draft"))
    tokenizer = st.load_tokenizer(st.demo_path("target"))
    prompt = tokenizer.encode("Question: Ann has 3 pens.").ids
    # A choice of its own keeps what it learns while weights change.
    way = st.Way(st.ModelDrafter(draft), st.TreeChoice())
    learn, follow = learner(model, loss, rate), learner(draft, imitation, rate)
    seconds, rewards, ratios = collections.defaultdict(list), [], []

    def timed(name, call, *arguments, **options):
        began = time.perf_counter()
        result = jax.block_until_ready(call(*arguments, **options))
        seconds[name].append(time.perf_counter() - began)
        return result

    for step in range(steps):
        options = dict(
            n=samples,
            max_new_tokens=new_tokens,
            temperature=1.0,
            key=step,
            log_probs=True,
            tokenizer=tokenizer,
        )
        plain = timed("without", st.generate, model, [prompt], **options)
        out = timed("with", st.generate, model, [prompt], **way, **options)
        assert (out.tokens == plain.tokens).all()
        scores = np.array([reward(text) for text in out.texts])
        advantages = (scores - scores.mean()) / (scores.std() + 1e-6)
        # The worst and the best text of a group say most (arXiv:2504.13818).
        chosen = np.argsort(scores)[[0, -1]]
        new, is_new = out.tokens[chosen], np.arange(new_tokens) < out.lengths[chosen, None]
        tokens = np.hstack([[prompt, prompt], np.where(is_new, new, 0)])
        before = np.where(is_new, out.log_probs[chosen], 0.0)
        ratios += [timed("update", learn, tokens, is_new, before, advantages[chosen, None])]
        timed("refresh", follow, tokens, is_new)
        rewards.append(scores.mean())
        if step % 8 == 0:
            print(
                f"step {step}: reward {rewards[-1]:.2f},",
                f"{out.stats.tau:.2f} tokens per target call",
            )
    early, late = (np.mean(part) for part in np.array_split(rewards, 3)[::2])
    print(f"the reward went from {early:.2f} to {late:.2f}")
    print("no draft changed a text: True")
    if bits_obstacle(model) is None:
        assert (np.stack(ratios) == 1).all()
        print("importance ratios are 1, to the bit: True")
    # The first step compiles.
    without, drafted, update, refresh = (sum(times[1:]) for times in seconds.values())
    faster = (without + update) / (drafted + update + refresh)
    print(f"drafts made sampling {without / drafted:.2f} times as fast, a step {faster:.2f} times")
    return early, late


if __name__ == "__main__":
    early, late = main()
    assert late > early
