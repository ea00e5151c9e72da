"""Drafting a chain with two models that take turns.

The drafts of hierarchical speculative decoding (Chen, "An Exploration of Hierarchical Speculative
Decoding", algorithm 2). Its acceptance rule is not exact. Here each draft comes with the
distribution of the model that drew it, or with the target's noise, and the verifiers of all other
drafters are exact for it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax import Drafter, DraftTree, HybridLM, Step, TreeTopology, Verdict
from stree_jax.array_types import Array, Float
from stree_jax.decoding import KnownNodes, WholeModel, WholeModelState
from stree_jax.decoding.drafters import check_child_sampling, drawn_children, root_token
from stree_jax.messages import shown
from stree_jax.models import check_model, same_tokenizer

MAX_PATTERN = 16  # each letter is a call of a model in the program


class InterleavedDrafter(Drafter):
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

    inner_layers = None

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
        sizes = medium.config.vocab_size, small.config.vocab_size
        if not same_tokenizer(*sizes):
            raise ValueError(
                f"medium and small have different vocabularies: {sizes[0]} and {sizes[1]} tokens"
            )
        self.medium = medium
        self.small = small
        self.pattern = letters
        self._child_sampling = child_sampling

    def check(self, target: HybridLM, topology: TreeTopology, *, temperature_is_zero: bool) -> None:
        if topology != self.default_topology():
            raise ValueError(
                f"the pattern {self.pattern!r} fills a chain of {len(self.pattern)} drafts and no"
                f" other tree; leave topology out, or use TreeTopology.chain({len(self.pattern)})"
            )

    def default_topology(self) -> TreeTopology:
        """Returns a chain with a draft for each letter."""
        return TreeTopology.chain(len(self.pattern))

    def init(
        self, batch: int, topology: TreeTopology, max_length: int
    ) -> dict[str, WholeModelState]:
        return {
            name: model.init(batch, topology.num_nodes - model.num_catch_up, max_length)
            for name, model in self._models().items()
        }

    def read(
        self, state: dict[str, WholeModelState], tokens: Array, hidden: Any, lengths: Array
    ) -> dict[str, WholeModelState]:
        return {
            name: model.read(state[name], tokens, None, lengths)
            for name, model in self._models().items()
        }

    def propose(
        self, state: dict[str, WholeModelState], step: Step, topology: TreeTopology
    ) -> tuple[DraftTree, dict[str, WholeModelState]]:
        is_zero = step.sampling.temperature_is_zero
        drawing = self.child_sampling(topology, temperature_is_zero=is_zero)
        models = self._models()
        names = {name[0]: name for name in models}
        tokens = root_token(step.context)
        valid = jnp.ones_like(tokens, bool)
        read = dict.fromkeys(models, 0)  # nodes of the chain that a model has run
        log_probs: list[Any] = []
        rules = step.processors.room(1)
        for depth, letter in enumerate(self.pattern):
            name = names[letter]
            logits, reader = models[name].run(
                state[name],
                tokens[:, read[name] :],
                TreeTopology.chain(depth).tree(valid),
                KnownNodes(read[name], depth + 1 - read[name]),
                num_logits=1,
            )
            read[name] = depth + 1
            state = state | {name: reader}
            logits = step.processors.masked(logits, rules)
            keys = jax.vmap(jax.random.fold_in, (0, None))(step.keys, depth)
            drawn, exists, law = drawn_children(drawing.kind, logits, 1, step, depth, keys)
            log_probs.append(law)
            rules = step.processors.advance(rules, drawn[:, :, 0])
            tokens = jnp.concatenate([tokens, drawn[:, :, 0]], axis=1)
            valid = jnp.concatenate([valid, valid[:, -1:] & exists[:, :, 0]], axis=1)

        rows = jnp.arange(topology.num_nodes, dtype=jnp.int32)
        draft = DraftTree(
            tokens=tokens,
            tree=topology.tree(valid),
            log_probs=jnp.concatenate(log_probs, axis=1) if drawing.is_sampled else None,
            log_prob_row=jnp.where((rows < topology.depth) & drawing.is_sampled, rows, -1),
            finite=valid[:, -1],
            drawn=drawing,
        )
        return draft, state

    def commit(
        self,
        state: dict[str, WholeModelState],
        draft: DraftTree,
        verdict: Verdict,
        hidden: Float[Array, "B N M"],
        topology: TreeTopology,
    ) -> dict[str, WholeModelState]:
        nodes = np.arange(topology.num_nodes, dtype=np.int32)

        def committed(name: str, model: WholeModel) -> WholeModelState:
            num_read = topology.num_nodes - model.num_catch_up
            place = jnp.broadcast_to(np.where(nodes < num_read, nodes, -1), draft.tokens.shape)
            chain = TreeTopology.chain(num_read - 1).tree(draft.tree.valid[:, :num_read])
            return model.commit(state[name], chain, place, draft, verdict)

        return {name: committed(name, model) for name, model in self._models().items()}

    def _models(self) -> dict[str, WholeModel]:
        """Returns the models, named by letter and number of slots for tokens that they do not run.

        So states of another number of slots have other names, and are not taken for these.
        """
        models = {"q": self.medium, "s": self.small}
        slots = {letter: len(self.pattern) - self.pattern.rindex(letter) for letter in models}
        return {
            f"{letter} with {slots[letter]} slots": WholeModel(model, slots[letter])
            for letter, model in models.items()
        }
