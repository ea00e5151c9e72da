"""GRPO (arXiv:2402.03300) in one file: groups of texts sampled with drafts, updates by optax.

    python examples/grpo.py

On a CPU with native code sampling and loss have equal log-probabilities, to the bit, with drafts or
without: the importance ratio is 1 in the first pass over a group, and nothing has to read the texts
before. The draft model learns from the texts too, and so follows the policy.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import stree_jax as st
from stree_jax.testing import bits_obstacle

PROMPTS = "Question: Ann has 3 pens.", "Once upon a time"
CLIP = 0.2


def reward(text):
    """What is to be learned: texts with many letters e."""
    return text.count("e") / max(len(text), 1)


def loss(model, tokens, is_new, before, advantages):
    """GRPO's clipped loss, and the importance ratios; entry t is of token t + 1."""
    log_probs = st.text_log_probs(model, tokens)
    ratio = jnp.exp(jnp.where(is_new, log_probs - before, 0.0))
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    gain = jnp.minimum(ratio * advantages, clipped * advantages)
    return -jnp.where(is_new, gain, 0.0).sum() / is_new.sum(), ratio


def imitation(draft, tokens, is_new):
    """The cross-entropy of the policy's new tokens."""
    value = -jnp.where(is_new, st.text_log_probs(draft, tokens), 0.0).sum() / is_new.sum()
    return value, value


def learner(model, objective, rate):
    """A function that takes a step of the weights of a model, and returns what else there is."""
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


def in_rows(prompts, out):
    """Whole texts, padded on the right; which tokens are new, and their log-probabilities."""
    width = max(map(len, prompts)) + out.tokens.shape[1]
    tokens, before = np.zeros((len(prompts), width), np.int32), np.zeros((len(prompts), width))
    is_new = np.zeros(tokens.shape, bool)
    for row, (prompt, length) in enumerate(zip(prompts, out.lengths, strict=True)):
        new = slice(len(prompt), len(prompt) + length)
        tokens[row, : new.start], tokens[row, new] = prompt, out.tokens[row, :length]
        before[row, new], is_new[row, new] = out.log_probs[row, :length], True
    return tokens, is_new[:, 1:], before[:, 1:].astype(np.float32)


def main(steps=30, samples=4, new_tokens=48, rate=3e-4):
    """Trains the embedded model, and compares steps with and without drafts."""
    model, draft = (st.from_pretrained(st.demo_path(name)) for name in ("target", "draft"))
    tokenizer = st.load_tokenizer(st.demo_path("target"))
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    learn, follow = learner(model, loss, rate), learner(draft, imitation, rate)
    rewards, seconds, ratios, are_same = [], [], [], []
    for step in range(steps):
        options = dict(max_new_tokens=new_tokens, temperature=1.0, key=step, log_probs=True)
        options |= dict(n=samples, tokenizer=tokenizer)
        times = [time.perf_counter()]
        plain = st.generate(model, prompts, **options)
        times.append(time.perf_counter())
        out = st.generate(model, prompts, drafter=st.ModelDrafter(draft), **options)
        times.append(time.perf_counter())
        scores = np.array([reward(text) for text in out.texts]).reshape(-1, samples)
        advantages = scores - scores.mean(axis=1, keepdims=True)
        advantages /= scores.std(axis=1, keepdims=True) + 1e-6
        # The best and the worst text of a group say most (arXiv:2504.13818).
        order = np.argsort(scores, axis=1) + samples * np.arange(len(prompts))[:, None]
        chosen = order[:, [0, -1]].ravel()
        texts = in_rows([prompt for prompt in prompts for _ in range(samples)], out)
        learned = *texts, advantages.reshape(-1, 1)
        learned = [values[chosen] for values in learned]
        ratios.append(np.asarray(learn(*learned)))
        times.append(time.perf_counter())
        jax.block_until_ready(follow(*learned[:2]))
        times.append(time.perf_counter())
        seconds.append(np.diff(times))
        rewards.append(scores.mean())
        are_same.append((out.tokens == plain.tokens).all())
        if step % 5 == 0:
            print(f"step {step}: reward {scores.mean():.3f}, {out.stats.tau:.2f} tokens per target call", np.round(np.diff(times),2))
    if bits_obstacle(model) is None:
        print(f"importance ratios are 1, to the bit: {(np.array(ratios) == 1).all()}")
    print(f"the texts of decoding without drafts: {all(are_same)}")
    early, late = np.mean(rewards[: steps // 3]), np.mean(rewards[-(steps // 3) :])
    print(f"reward {early:.3f}, then {late:.3f}, so it went up: {late > early}")
    plain, drafted, update, refresh = np.median(seconds[1:], axis=0)  # the first compiles
    without, with_drafts = plain + update, drafted + update + refresh
    print(f"a step with drafts took {with_drafts:.2f} s, and {without / with_drafts:.2f} times")


if __name__ == "__main__":
    main()
