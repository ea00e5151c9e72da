"""`Way`: how a text is drafted and accepted, which changes its speed and not its tokens."""

import contextlib
import dataclasses
import functools
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from stree_jax.decoding.drafters.base import Drafter, draft_models, drawn_by, with_tokens_of
from stree_jax.decoding.tree_choice import NO_TOPOLOGY, TREES, TreeChoice
from stree_jax.decoding.verifiers import Verifier, default_verifier, verifier_of
from stree_jax.mesh.partition import ONE_DEVICE
from stree_jax.messages import shown
from stree_jax.models.bits import bits_obstacle
from stree_jax.models.lm import HybridLM
from stree_jax.tree import TreeTopology, parsed

# A tree, words for one such as "chain:4"; "auto", trees to choose from, or a `TreeChoice`.
Topology = TreeTopology | str | Sequence[TreeTopology] | TreeChoice | Any


class FittedWay(NamedTuple):
    """A way to decode with a target, in which nothing is left to choose."""

    drafter: Drafter | None
    topology: TreeTopology  # of several trees one that is as large as any
    verifier: Verifier
    trees: tuple[TreeTopology, ...] = ()  # to choose from, the first without drafts
    choice: TreeChoice | None = None  # the user's own


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to decode, for `generate(model, prompts, **way)`, `stream`, `complete` and others.

    `bench` compares ways, and the report of `tune` has the fastest as its `way`.

    Attributes:
        drafter, topology, verifier, lossy, to_the_bit: see `generate`.
    """

    drafter: Drafter | None = None
    topology: Topology | None = None
    verifier: str | Verifier | None = None
    lossy: bool = False
    to_the_bit: bool = False

    def keys(self) -> list[str]:
        """The names of the fields that are not left out: `**way` passes them as keywords."""
        fields = dataclasses.fields(self)
        return [f.name for f in fields if getattr(self, f.name) is not f.default]

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]

    def fitted(self, model: HybridLM, *, temperature_is_zero: bool) -> FittedWay:
        """The drafter, tree and verifier with which a target is decoded.

        Raises:
            ValueError: they do not fit each other or the target, the verifier is lossy and that is
                not allowed, or the texts are not equal to the bit and that was asked for.
        """
        _check_drafter(self.drafter)
        _check_placement(model, self.drafter)
        drafter, topology = with_tokens_of(self.drafter, model), self.topology
        if isinstance(topology, str):
            topology = parsed(topology)
        trees: tuple[TreeTopology, ...] = ()
        choice = topology if isinstance(topology, TreeChoice) else None
        if choice is not None or isinstance(topology, str | Sequence):
            if drafter is None:
                raise ValueError(_needs_drafter(f"topology = {shown(topology)}"))
            how = {"temperature_is_zero": temperature_is_zero}
            among = choice or _choice_of(topology, drafter, model, **how)
            if drafter.chooses_shape:
                raise ValueError(
                    f'topology = "auto": {type(drafter).__name__} chooses the shape of its trees'
                    " itself; give it a TreeTopology.budget, or leave topology out"
                )
            trees, topology = among.trees, among.largest
            for tree in trees[1:]:
                _checked_topology(tree, drafter, model.config.vocab_size)
                drafter.check(model, tree, **how)
        topology = _checked_topology(topology, drafter, model.config.vocab_size)
        if drafter is not None and not trees:
            drafter.check(model, topology, temperature_is_zero=temperature_is_zero)
        drawn = drawn_by(drafter, topology, temperature_is_zero=temperature_is_zero)
        verifier = verifier_of(
            default_verifier(drawn, topology, temperature_is_zero=temperature_is_zero)
            if self.verifier is None
            else self.verifier
        )
        verifier.check(drawn, topology, temperature_is_zero=temperature_is_zero)
        if trees and not verifier.follows_target:
            raise ValueError(
                f'topology = "auto" with verifier {verifier.name!r}, whose texts depend on the'
                " tree: use 'target_only', or name a tree"
            )
        if not (self.lossy or verifier.lossless):
            raise ValueError(
                f"verifier {verifier.name!r} is lossy: its output does not have the target's"
                " distribution; pass lossy=True if you want that, or leave verifier out"
            )
        if self.to_the_bit:
            obstacle = bits_obstacle(model, topology.num_nodes, to_the_bit=True)
            if obstacle:
                raise ValueError(f"to_the_bit = True is refused: {obstacle}; leave it out")
        return FittedWay(drafter, topology, verifier, trees, choice)


def _choice_of(topology: Any, drafter: Drafter, model: HybridLM, **how: Any) -> TreeChoice:
    """A choice of the user's trees; "auto": `TREES` that the drafter can fill, or its own."""
    if topology != "auto":
        return TreeChoice(topology)
    fitting = []
    for tree in TREES:
        with contextlib.suppress(ValueError):
            drafter.check(model, tree, **how)
            fitting.append(tree)
    return _among(*fitting or [drafter.default_topology()])


@functools.lru_cache(maxsize=64)
def _among(*trees: TreeTopology) -> TreeChoice:
    """A choice that is told nothing: its trees are asked for once a text."""
    return TreeChoice(trees)


def _check_drafter(drafter: Drafter | None) -> None:
    if drafter is None:
        return
    if not isinstance(drafter, Drafter):
        raise ValueError(
            "drafter must be a ModelDrafter(...), an NgramDrafter(...) or of another class derived"
            f" from stree_jax.Drafter, got {shown(drafter)}"
        )
    for leaf in jax.tree.leaves(drafter):
        if not isinstance(leaf, jax.Array | np.ndarray | numbers.Number):
            raise ValueError(f"drafter must be a pytree of arrays, and has a leaf {shown(leaf)}")


def _check_placement(model: HybridLM, drafter: Drafter | None) -> None:
    """Refuses a drafter whose models do not lie on the target's devices."""
    partition = model.partition
    for draft in draft_models(drafter):
        if draft.partition == dataclasses.replace(partition, shards=1):
            continue
        if partition == ONE_DEVICE:
            raise ValueError(
                "the draft model is on a mesh and the target is not; st.shard(target, mesh) puts it"
                " there"
            )
        is_there = draft.partition.mesh == partition.mesh
        where = "cut into parts" if is_there else "not on the target's mesh"
        raise ValueError(
            f"the draft model is {where}; on a mesh every device has all of it: load it with"
            " from_pretrained(..., mesh=mesh, replicate=True), or use"
            " st.shard(draft, mesh, replicate=True)"
        )


def _checked_topology(
    topology: TreeTopology | Any, drafter: Drafter | None, vocab_size: int
) -> TreeTopology:
    if topology is None:
        topology = TreeTopology.chain(0) if drafter is None else drafter.default_topology()
    if not isinstance(topology, TreeTopology):
        raise ValueError(NO_TOPOLOGY + shown(topology))
    if drafter is None and topology.num_nodes > 1:
        raise ValueError(_needs_drafter(f"a tree of {topology.num_nodes} nodes"))
    if topology.is_budget and drafter is not None and not drafter.chooses_shape:
        raise ValueError(
            f"TreeTopology.budget({topology.num_nodes}, {topology.depth}) is a size, for drafters"
            f" that choose the shape, such as DynamicDrafter; {type(drafter).__name__} takes a"
            " shape, such as TreeTopology.from_branching((3, 2, 1))"
        )
    branching = max(map(len, topology.children))
    if branching > vocab_size:
        raise ValueError(f"nodes with {branching} children, but only {vocab_size} tokens exist")
    return topology.level_order()


def _needs_drafter(trees: str) -> str:
    return f"{trees} needs a drafter: pass drafter=ModelDrafter(...)"
