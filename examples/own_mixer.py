"""A mixer of your own: a gated linear recurrence as a kind of layer, outside the library.

    python examples/own_mixer.py

    h[t] = a[t] h[t-1] + (1 - a[t]) v[t],    a = sigmoid(gate(u)),    y = out(silu(z) h)

The state is a number per channel, so the pending record simply holds the state after each node of
the tree, and replay picks one. The model is trained a little, saved, loaded, and decoded with
trees.
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

import stree_jax as st
from stree_jax.models import LayerConfig, register
from stree_jax.testing import assert_lossless

ROWS = PartitionSpec("data")  # on a mesh, rows are split and channels are not


@register("gated_recurrence")
@dataclasses.dataclass(frozen=True)
class RecurrenceConfig(LayerConfig):
    """A layer with `width` channels of state."""

    width: int

    def build(self, d_model, *, dtype, rngs, **_):
        return Recurrence(self, d_model, dtype, rngs)

    def init_cache(self, batch, max_length, dtype):
        return jnp.zeros((batch, self.width))

    def init_pending(self, batch, num_nodes, dtype):
        return jnp.zeros((batch, num_nodes, self.width))

    def cache_specs(self, axis):
        return ROWS

    def pending_specs(self, axis):
        return ROWS


class Recurrence(nnx.Module):
    """The mixer; see `stree_jax.models.layer.Mixer` for the methods."""

    def __init__(self, config, d_model, dtype, rngs):
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=dtype, rngs=rngs)
        options["precision"] = lax.Precision.HIGHEST
        self.in_proj = nnx.Linear(d_model, 3 * config.width, **options)
        self.out_proj = nnx.Linear(config.width, d_model, **options)

    def _split(self, u):
        gate, value, z = jnp.split(self.in_proj(u).astype(jnp.float32), 3, axis=-1)
        keep = jax.nn.sigmoid(gate + 2.0)  # at first it remembers
        return keep, (1 - keep) * value, jax.nn.silu(z)

    def __call__(self, u, cache, valid, lengths):
        keep, new, z = self._split(u)
        keep, new = jnp.where(valid[..., None], keep, 1.0), jnp.where(valid[..., None], new, 0.0)

        def step(state, now):
            state = now[0] * state + now[1]
            return state, state

        cache, states = lax.scan(step, cache, (keep.swapaxes(0, 1), new.swapaxes(0, 1)))
        return self.out_proj((z * states.swapaxes(0, 1)).astype(u.dtype)), cache

    def tree(self, u, at):
        tree, _, cache, prefix_pending, replay = at
        if replay is not None:
            cache = self.replay(cache, replay)
        keep, new, z = self._split(u)
        first = tree.parents.shape[1] - u.shape[1]  # nodes before it are in `prefix_pending`
        states = jnp.zeros((*tree.parents.shape, cache.shape[-1]))
        if prefix_pending is not None:
            states = states.at[:, :first].set(prefix_pending)

        def node(q, states):  # parents come before their children
            parent = tree.parents[:, first + q, None]
            above = jnp.take_along_axis(states, jnp.maximum(parent, 0)[..., None], axis=1)[:, 0]
            state = keep[:, q] * jnp.where(parent < 0, cache, above) + new[:, q]
            return states.at[:, first + q].set(state)

        states = lax.fori_loop(0, u.shape[1], node, states)
        return self.out_proj((z * states[:, first:]).astype(u.dtype)), states, cache

    def replay(self, cache, along):
        node = along.path.last[:, None]
        state = jnp.take_along_axis(along.pending, jnp.maximum(node, 0)[..., None], axis=1)[:, 0]
        return jnp.where(node < 0, cache, state)


def config_of(num_layers: int) -> st.ModelConfig:
    """Recurrences with MLPs; the first layer is local attention, of another kind and size."""
    layers = (RecurrenceConfig(48), st.MlpConfig(64)) * num_layers
    local = st.AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=16, window=8)
    return st.ModelConfig(vocab_size=128, d_model=32, layers=(local, *layers))


def trained(num_layers: int, text: jax.Array, steps: int) -> st.HybridLM:
    """A model of the characters of a text."""
    graph, weights = nnx.split(st.HybridLM(config_of(num_layers), rngs=nnx.Rngs(0)))
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(weights, state, rows):
        def loss(weights):
            logits = nnx.merge(graph, weights)(rows[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()

        value, slope = jax.value_and_grad(loss)(weights)
        update, state = optimizer.update(slope, state)
        return optax.apply_updates(weights, update), state, value

    state = optimizer.init(weights)
    for key in jax.random.split(jax.random.key(0), steps):
        starts = jax.random.randint(key, (8, 1), 0, len(text) - 65)
        weights, state, value = step(weights, state, text[starts + jnp.arange(65)])
    print(f"{num_layers} recurrences, {steps} steps: {float(value):.2f} nats a character")
    return nnx.merge(graph, weights)


def main(steps: int = 150, num_layers: int = 3) -> None:
    """Trains target and draft, saves, loads, and decodes with trees; differences are errors."""
    characters = (ord(c) % 128 for c in Path(__file__).read_text())
    text = jnp.array([*characters])
    target, draft = (trained(n, text, steps) for n in (num_layers, 1))
    with tempfile.TemporaryDirectory() as folder:
        st.save_pretrained(target, f"{folder}/target")
        loaded = st.from_pretrained(f"{folder}/target")  # the kind is registered above
    prompts = [[ord(c) for c in words] for words in ("import ", "def tree(", "the state of")]
    options: dict[str, Any] = dict(prompts=prompts, max_new_tokens=40)
    for topology in (st.TreeTopology.paper("A"), st.TreeTopology.chain(12)):
        for out in assert_lossless(loaded, st.ModelDrafter(draft), topology=topology, **options):
            print(f"{out.stats.tau:.2f} tokens per target call, same text: True")


if __name__ == "__main__":
    main()
