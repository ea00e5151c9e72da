"""Drafting a chain with two models that take turns.

The drafts of hierarchical speculative decoding (Chen, "An Exploration of Hierarchical Speculative
Decoding", algorithm 2). Its acceptance rule is not exact. Here each draft comes with the
distribution of the model that drew it, or with the target's noise, and the verifiers of all other
drafters are exact for it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from stree_jax import (
    Context,
    DraftTree,
    HybridLM,
    Sampling,
    TreeTopology,
    Verdict,
    token_log_probs,
)
from stree_jax.array_types import Array, Bool, Float, Float32, Int, Key
from stree_jax.decoding import all_finite, prefill
from stree_jax.decoding.drafters import (
    check_child_sampling,
    chosen_child_sampling,
    root_token,
    shared_scores,
)
from stree_jax.extensions.hierarchical.chains import chain_of
from stree_jax.messages import shown
from stree_jax.models import Cache, Path, Pending, check_model, empty_path, path_to

MAX_PATTERN = 16  # each letter is a call of a model in the program


class ReaderState(NamedTuple):
    """The state of one of the models between steps.

    A model processes the chain up to its last turn. Tokens that are accepted beyond that are its
    *catch-up* tokens, which it processes together with the next root. Its own tree is a chain: as
    many slots as there can be catch-up tokens, filled from the end, then the nodes that it has
    processed.
    """

    cache: Cache
    pending: Pending  # pending record of its own tree
    path: Path  # accepted path in that tree, to be replayed
    catch_up: Int[Array, "B missed"]
    has_catch_up: Bool[Array, "B missed"]


class InterleavedDrafter(nnx.Module):
    """Two draft models that take turns at drafting one chain.

    `pattern` has a letter for each draft, in order: "q" for the medium model and "s" for the small
    one. "ssq ssq" are the drafts of hierarchical speculative decoding with m = 2 and n = 2. With
    the same number of calls, a pattern that begins with all letters of the better model accepts at
    least as much: a draft counts only if all drafts before it are accepted.

    In one call a model processes all tokens since its last turn, the other model's drafts included.

    Args:
        medium: the better draft model, with the target's vocabulary.
        small: the faster draft model, with the target's vocabulary.
        pattern: letters "q" and "s", at least one of each and at most `MAX_PATTERN`; spaces are
            ignored.
        child_sampling: "auto" takes the most probable token at temperature 0, and above it the best
            one with the noise that the target draws its tokens with. "iid" samples; then verifiers
            that test drafts by their probabilities are exact.

    Raises:
        ValueError: another pattern or `child_sampling`, something that is not a model, or models
            with different vocabularies.
    """

    def __init__(
        self, medium: HybridLM, small: HybridLM, pattern: str, *, child_sampling: str = "auto"
    ):
        letters = "".join(pattern.split()) if isinstance(pattern, str) else ""
        if {*letters} != {"q", "s"} or len(letters) > MAX_PATTERN:
            raise ValueError(
                "pattern must have letters q (medium) and s (small), both of them, and at most"
                f" {MAX_PATTERN} in all, such as 'ssq ssq'; got {shown(pattern)}. For one model use"
                " ModelDrafter with TreeTopology.chain"
            )
        check_child_sampling(child_sampling, ["iid"])
        for model in (medium, small):
            check_model(model)
        if medium.config.vocab_size != small.config.vocab_size:
            raise ValueError(
                f"medium and small have different vocabularies: {medium.config.vocab_size} and"
                f" {small.config.vocab_size} tokens"
            )
        self.medium = medium
        self.small = small
        self.pattern = letters
        self._child_sampling = child_sampling

    def models(self) -> list[HybridLM]:
        """See `Drafter`."""
        return [self.medium, self.small]

    def default_topology(self) -> TreeTopology:
        """A chain with a draft for each letter, the only tree that this drafter fills."""
        return TreeTopology.chain(len(self.pattern))

    def child_sampling(self, topology: TreeTopology, *, temperature_is_zero: bool) -> str:
        """See `Drafter`."""
        if topology != self.default_topology():
            raise ValueError(
                f"the pattern {self.pattern!r} fills a chain of {len(self.pattern)} drafts and no"
                f" other tree; leave topology out, or use TreeTopology.chain({len(self.pattern)})"
            )
        return chosen_child_sampling(self._child_sampling, temperature_is_zero=temperature_is_zero)

    def prepare(
        self, context: Context, topology: TreeTopology, max_length: int
    ) -> dict[str, ReaderState]:
        """See `Drafter`."""
        batch = context.length.shape[0]

        def reader(letter: str, model: HybridLM) -> ReaderState:
            num_read, num_missed = self._extent(letter)
            num_nodes = num_missed + num_read
            return ReaderState(
                cache=prefill(model, context.tokens, context.length - 1, max_length),
                pending=model.init_pending(batch, num_nodes),
                path=empty_path(batch, num_nodes),
                catch_up=jnp.zeros((batch, num_missed), jnp.int32),
                has_catch_up=jnp.zeros((batch, num_missed), bool),
            )

        return {"q": reader("q", self.medium), "s": reader("s", self.small)}

    def propose(
        self,
        state: dict[str, ReaderState],
        context: Context,
        keys: Key[Array, " B"],
        sampling: Sampling,
        topology: TreeTopology,
        noise: Float32[Array, "B _ V"] | None = None,
    ) -> tuple[DraftTree, dict[str, ReaderState]]:
        """See `Drafter`."""
        how = self.child_sampling(topology, temperature_is_zero=sampling.temperature_is_zero)
        models = {"q": self.medium, "s": self.small}
        tokens = root_token(context)
        valid = jnp.ones_like(tokens, bool)
        read = dict.fromkeys(models, 0)  # nodes of its own tree that a model has processed
        log_probs, finite = [], jnp.ones_like(valid[:, 0])
        for depth, letter in enumerate(self.pattern):
            model, reader = models[letter], state[letter]
            known = jnp.concatenate([reader.catch_up, tokens], axis=1)
            own_tree = chain_of(jnp.concatenate([reader.has_catch_up, valid], axis=1))
            is_first = read[letter] == 0
            logits, pending, cache = model.tree_forward(
                known[:, read[letter] :],
                own_tree,
                reader.cache,
                replay=(reader.pending, reader.path) if is_first else None,
                prefix_pending=None if is_first else reader.pending,
                num_logits=1,
            )
            read[letter] = known.shape[1]
            state = state | {letter: reader._replace(cache=cache, pending=pending)}
            logits = logits[:, 0, : model.config.vocab_size]
            finite &= all_finite(logits)
            if how == "iid":
                log_probs.append(token_log_probs(logits, sampling))
                of_depth = jax.vmap(jax.random.fold_in, (0, None))(keys, depth)
                drawn = jax.vmap(jax.random.categorical)(of_depth, log_probs[-1])
            elif how == "shared":
                assert noise is not None  # child_sampling refuses temperature 0
                scores = shared_scores(logits[:, None], sampling, noise, depth)
                drawn = jnp.argmax(scores[:, 0], axis=-1)
            else:
                drawn = jnp.argmax(logits, axis=-1)
            tokens = jnp.concatenate([tokens, drawn[:, None].astype(jnp.int32)], axis=1)
            valid = jnp.concatenate([valid, finite[:, None]], axis=1)

        rows = jnp.arange(topology.num_nodes, dtype=jnp.int32)
        draft = DraftTree(
            tokens=tokens,
            tree=topology.tree(valid),
            log_probs=jnp.stack(log_probs, axis=1) if log_probs else None,
            log_prob_row=jnp.where((rows < topology.depth) & bool(log_probs), rows, -1),
            finite=finite,
        )
        return draft, state

    def commit(
        self,
        state: dict[str, ReaderState],
        draft: DraftTree,
        verdict: Verdict,
        topology: TreeTopology,
        hidden: Float[Array, "B M"],
    ) -> dict[str, ReaderState]:
        """See `Drafter`."""
        ended = verdict.last < 0
        last = jnp.maximum(verdict.last, 0)

        def committed(letter: str, reader: ReaderState) -> ReaderState:
            num_read, num_missed = self._extent(letter)
            own_tree = chain_of(
                jnp.concatenate([reader.has_catch_up, draft.tree.valid[:, :num_read]], axis=1)
            )
            own_last = num_missed + jnp.minimum(last, num_read - 1)
            # The last nodes of the path; those beyond `num_read` are catch-up tokens.
            missed = last[:, None] - jnp.arange(num_missed, dtype=jnp.int32)[::-1]
            return reader._replace(
                path=path_to(own_tree, jnp.where(ended, -1, own_last)),
                catch_up=jnp.take_along_axis(draft.tokens, jnp.maximum(missed, 0), axis=1),
                has_catch_up=(missed >= num_read) & ~ended[:, None],
            )

        return {letter: committed(letter, reader) for letter, reader in state.items()}

    def _extent(self, letter: str) -> tuple[int, int]:
        """Nodes of the chain that a model processes, root included, and catch-up slots."""
        num_read = 1 + self.pattern.rindex(letter)
        return num_read, 1 + len(self.pattern) - num_read
