"""`TreeRollout`: texts for Tunix's trainers, decoded with draft trees."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from stree_jax import Drafter, TreeTopology, generate, text_log_probs
from stree_jax.array_types import Array, Float32, Int
from stree_jax.extensions.tunix.policy import Policy, rolled
from stree_jax.messages import needs

try:
    from tunix.rl.rollout import base_rollout
except ImportError as error:
    raise ImportError(f"{needs('TreeRollout', 'google-tunix', 'tunix')} ({error})") from error


class TreeRollout(base_rollout.BaseRollout):
    """A rollout engine of Tunix that decodes with trees; texts are the policy's own.

    `ClusterConfig(rollout_engine=functools.partial(TreeRollout, drafter=drafter), ...)`: Tunix
    makes it. New weights are swapped in, and nothing compiles again. The drafter is not trained: as
    the policy moves away from it fewer drafts are accepted, and texts stay exact.

    Args:
        rollout_actor: the `Policy` that decodes.
        tokenizer: Tunix's tokenizer: `encode`, `decode`, `bos_id`, `eos_id`, `pad_id`.
        mesh: the rollout's mesh, of one device.
        rollout_config: not needed; `generate` gets one.
        drafter, topology: see `stree_jax.generate`.

    Raises:
        ValueError: another kind of model, or a mesh of several devices.
    """

    def __init__(
        self,
        rollout_actor: Any,
        tokenizer: Any,
        mesh: Any = None,
        rollout_config: Any = None,
        *,
        drafter: Drafter | None = None,
        topology: TreeTopology | None = None,
    ):
        if not isinstance(rollout_actor, Policy):
            raise ValueError(
                f"rollout_actor must be a Policy(model), got {type(rollout_actor).__name__}"
            )
        if mesh is not None and mesh.size > 1:
            raise ValueError(f"TreeRollout runs on one device, and mesh has {mesh.size}")
        self._policy: Policy = rollout_actor
        self._tokenizer = tokenizer
        self._drafts: dict[str, Any] = dict(drafter=drafter, topology=topology)
        self._num_calls = 0

    def generate(self, prompts: list[str], rollout_config: Any, **_: Any) -> Any:
        """Samples a text for each prompt.

        Log-probabilities are those of the distribution that was sampled from: after temperature,
        top-k and top-p. Without `rollout_config.seed` each call draws other texts.

        Args:
            prompts: the prompts.
            rollout_config: Tunix's `RolloutConfig`.

        Returns:
            Tunix's `RolloutOutput`, without logits; tokens include the end token, texts do not.
        """
        own = rollout_config
        tokens = [self._encoded(prompt) for prompt in prompts]
        ends = [self.eos_id()] if own.eos_tokens is None else [*own.eos_tokens]
        seed = jax.random.key(0) if own.seed is None else own.seed
        if own.seed is None:
            seed = jax.random.fold_in(seed, self._num_calls)
        self._num_calls += 1
        out = generate(
            self._policy.model,
            tokens,
            max_new_tokens=own.max_tokens_to_generate,
            temperature=float(own.temperature),
            top_k=max(own.top_k or 0, 0),
            top_p=1.0 if own.top_p is None else float(own.top_p),
            eos_token=ends,
            key=seed,
            log_probs="sampled" if own.return_logprobs else False,
            **self._drafts,
        )
        new = [row[:count] for row, count in zip(out.tokens, out.lengths, strict=True)]
        log_probs = None
        if out.log_probs is not None:
            log_probs = [row[:n] for row, n in zip(out.log_probs, out.lengths, strict=True)]
        width = max(own.max_prompt_length, max(map(len, tokens)))
        padded = np.full((len(tokens), width), self.pad_id(), np.int32)
        for row, prompt in zip(padded, tokens, strict=True):
            row[width - len(prompt) :] = prompt
        return base_rollout.RolloutOutput(
            text=[
                self._tokenizer.decode(row[: len(row) - (reason == "end_token")].tolist())
                for row, reason in zip(new, out.finish_reasons, strict=True)
            ],
            logits=None,
            tokens=new,
            left_padded_prompt_tokens=padded,
            logprobs=log_probs,
        )

    def get_per_token_logps(
        self, prompt_tokens: Array, completion_tokens: Array
    ) -> Float32[Array, "B T"]:
        """The policy's log-probabilities of completions, at temperature 1.

        Args:
            prompt_tokens: left-padded prompts.
            completion_tokens: right-padded completions `[B, T]`.
        """
        return _log_probs(
            self._policy.model,
            jnp.asarray(prompt_tokens),
            jnp.asarray(completion_tokens),
            self.pad_id(),
        )

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Swaps in weights, in the dtypes and on the device of the old ones.

        Args:
            params: the state of a `Policy`, or part of it.
            filter_types: not needed.

        Raises:
            ValueError: a weight that the policy lacks, or one of another shape.
        """
        state = nnx.state(self._policy)
        old = flatten_dict(nnx.to_pure_dict(state))
        new = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
        for path, value in flatten_dict(new).items():
            if path not in old or old[path].shape != value.shape:
                name = ".".join(map(str, path))
                there = f"has the shape {old[path].shape}" if path in old else "does not exist"
                raise ValueError(f"weight {name} of shape {value.shape}: the policy's {there}")
            own, value = old[path], value.astype(old[path].dtype)
            # An array that is committed to its device would compile all programs again.
            if (value.sharding, value.committed) != (own.sharding, own.committed):
                value = jax.device_put(value, own.sharding)
            old[path] = value
        nnx.replace_by_pure_dict(state, unflatten_dict(old))
        nnx.update(self._policy, state)

    def pad_id(self) -> int:
        """The id that pads prompts and completions."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """The end token."""
        return self._tokenizer.eos_id()

    def model(self) -> Policy:
        """The policy."""
        return self._policy

    def _encoded(self, prompt: str) -> list[int]:
        """The tokens of a prompt, after a first token if the tokenizer has one, as in Tunix."""
        tokens, first = [*self._tokenizer.encode(prompt)], self._tokenizer.bos_id()
        return [first, *tokens] if first and tokens[:1] != [first] else tokens


@jax.jit
def _log_probs(
    model: Any, prompts: Int[Array, "B L"], completions: Int[Array, "B T"], pad: Any
) -> Float32[Array, "B T"]:
    tokens = jnp.concatenate([prompts, completions], axis=1)
    first = jnp.argmax(prompts != pad, axis=1)  # real token; a prompt has one
    scores = text_log_probs(model, rolled(tokens, -first))
    scores = jnp.pad(scores, ((0, 0), (1, 0)))  # of each token
    return rolled(scores, first)[:, prompts.shape[1] :]
