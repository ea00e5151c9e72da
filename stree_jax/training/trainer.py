"""The training loop: an iterator over steps that resumes from its own checkpoints."""

import functools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from pallas_kernels.numerics import Deferred, Product, gated, total
from stree_jax.array_types import Array
from stree_jax.checkpoint.directories import plain_path
from stree_jax.models.layers import Projection
from stree_jax.models.lm import HybridLM
from stree_jax.models.matrices import Matrix, in_first, quantized_kinds
from stree_jax.training.recipe import Training

# (model, tokens, extra) -> scalar loss; the model is a HybridLM or Medusa heads. `extra` is the
# target of distillation or of heads, else None.
Loss = Callable[[Any, Array, Any], Array]


class Progress(NamedTuple):
    """The result of one step."""

    step: int
    loss: float
    tokens_per_second: float


def fit(
    model: nnx.Module,
    loss: Loss,
    batch: Callable[[int], np.ndarray],
    training: Training,
    checkpoints: Path,
    extra: Any = None,
) -> Iterator[Progress]:
    """Trains a float32 `model` in place, from the latest checkpoint if there is one.

    Its weights change when the iterator is exhausted; an interrupted one leaves them as they were,
    and the next call goes on from the latest checkpoint. Of a step `batch` gives the tokens
    `[batch_size, sequence_length + 1]`, the same in a resumed run.
    Several devices of this process share the rows of a batch, as many of them as divide it.
    """
    from orbax.checkpoint import v1 as ocp

    _check_trainable(model)
    graphdef, params = nnx.split(multiplying(model, training.products))
    optimizer = optax.chain(
        optax.clip_by_global_norm(training.clip_norm),
        optax.adamw(
            schedule(training),
            b2=0.95,
            weight_decay=training.weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim >= 2, params),  # matrices
        ),
    )
    weights = nnx.to_pure_dict(params)
    state = {"params": weights, "optimizer": optimizer.init(weights)}

    def of_rows(params, tokens, extra):
        of_params = jax.value_and_grad(lambda p: loss(nnx.merge(graphdef, p), tokens, extra))
        return jax.lax.pmean(of_params(params), "rows")

    devices = jax.local_devices()
    mesh = Mesh(devices[: math.gcd(training.batch_size, len(devices))], "rows")
    whole, rows = PartitionSpec(), PartitionSpec("rows")
    of_batch = jax.shard_map(
        of_rows, mesh=mesh, in_specs=(whole, rows, whole), out_specs=whole, check_vma=False
    )
    if extra is not None:
        extra = multiplying(extra, training.products)
    everywhere = NamedSharding(mesh, whole)
    extra = jax.device_put(extra, everywhere)
    state = jax.device_put(state, everywhere, may_alias=False)  # a step donates it

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state, tokens, extra):
        value, gradient = of_batch(state["params"], tokens, extra)
        updates, optimizer_state = optimizer.update(gradient, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        # Non-finite weights fail the step, so they never reach a checkpoint.
        value = jnp.where(jnp.isfinite(optax.tree.norm(params)), value, jnp.nan)
        return {"params": params, "optimizer": optimizer_state}, value

    checkpoints.mkdir(parents=True, exist_ok=True)
    with ocp.training.Checkpointer(
        plain_path(checkpoints),
        preservation_policy=ocp.training.preservation_policies.LatestN(2),
        save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
        cleanup_tmp_directories=True,
    ) as checkpointer:
        start = 0
        if checkpointer.latest is not None:
            start = checkpointer.latest.step
            try:
                state = checkpointer.load(start, abstract_state=state)  # of its types and places
            except Exception as error:  # Orbax raises many kinds
                raise ValueError(
                    f"the run in {checkpoints} is damaged or has other shapes;"
                    " remove it or choose another output"
                ) from error
        for step in range(start + 1, training.steps + 1):
            began = time.perf_counter()
            tokens = batch(step)
            state, value = update(state, tokens, extra)
            if not np.isfinite(value):
                raise FloatingPointError(
                    f"the loss or the weights are not finite at step {step}; lower learning_rate"
                )
            if step % training.save_every == 0 or step == training.steps:
                checkpointer.save(step, state)
            yield Progress(step, float(value), tokens.size / (time.perf_counter() - began))
    on_host = jax.tree.map(np.asarray, state["params"])  # else they stay bound to the mesh
    nnx.update(model, jax.tree.map(jnp.asarray, on_host))


def _check_trainable(model: nnx.Module) -> None:
    if quantized_kinds(model):
        raise ValueError("matrices in few bits cannot be trained; start from the original")


def multiplying(model: nnx.Module, products: str) -> nnx.Module:
    """Returns a model whose projections multiply in this dtype."""
    if products == "float32":
        return model
    model = nnx.clone(model)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Projection):
            module.kernel = _BFloat16Products(module.kernel[...])
    return model


class _BFloat16Products(Matrix):
    """A matrix whose products have bfloat16 factors."""

    def product_in_parts(
        self, x: Array | Deferred, *, wide: bool = False, gate: str | None = None, **options: Any
    ) -> Product:
        if wide:
            return super().product_in_parts(x, wide=True, **options)
        product = bfloat16_product(total(x), self[...])
        return product if gate is None else gated(gate, product)


@jax.custom_vjp
def bfloat16_product(inputs: Array, kernel: Array) -> Array:
    """Multiplies bfloat16 factors in float32, also in its gradients, unlike JAX."""
    left, right = inputs.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)
    return jnp.matmul(left, right, preferred_element_type=jnp.float32)


def _forward(inputs: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return bfloat16_product(inputs, kernel), (inputs, kernel)


def _backward(factors: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    inputs, kernel = factors
    rows, ahead = (value.reshape(-1, value.shape[-1]) for value in (inputs, gradient))
    return bfloat16_product(gradient, kernel.T), bfloat16_product(rows.T, ahead)


bfloat16_product.defvjp(_forward, _backward)


def schedule(training: Training) -> optax.Schedule:
    """Returns the learning rate by step, see `Training`."""
    peak, last = training.learning_rate, training.learning_rate / 20
    if training.decay_steps is None:
        return optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=peak,
            warmup_steps=training.warmup_steps,
            decay_steps=max(training.steps, training.warmup_steps + 1),
            end_value=last,
        )
    warmup = optax.linear_schedule(0.0, peak, training.warmup_steps)
    decay = optax.linear_schedule(peak, last, training.decay_steps)
    return optax.join_schedules(
        [warmup, optax.constant_schedule(peak), decay],
        [training.warmup_steps, training.steps - training.decay_steps],
    )


def evaluate(model: nnx.Module, loss: Loss, batches: list[np.ndarray], extra: Any = None) -> float:
    """Mean loss over batches of tokens."""
    compiled = jax.jit(loss)
    return float(np.mean([compiled(model, jnp.asarray(batch), extra) for batch in batches]))


def cast(model: HybridLM, dtype: DTypeLike) -> HybridLM:
    """Copies a model to a dtype, but for weights that stay float32."""
    _check_trainable(model)
    structure, wanted = HybridLM.abstract(model.config, dtype=dtype)
    have = nnx.to_pure_dict(nnx.state(in_first(model)))
    return nnx.merge(structure, jax.tree.map(lambda leaf, to: leaf.astype(to.dtype), have, wanted))
