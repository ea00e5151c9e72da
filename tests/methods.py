"""The prompts, trees and drafters that tests of decoding share."""

import dataclasses
import functools
from collections.abc import Callable

import jax

import stree_jax as st
from stree_jax.testing import PROMPTS, perturbed, tiny_model
from tests.helpers import heads_of, mtp_head_of

__all__ = ["CHAIN", "DEEP", "KEY", "METHODS", "PROMPTS", "RAGGED", "SAMPLED", "TREE", "drafts"]

Topology = st.TreeTopology
KEY = jax.random.key(3)
SAMPLED = dict(temperature=1.0, key=KEY)
CHAIN = Topology.chain(3)
TREE = Topology.from_branching((2, 2))
DEEP = Topology.beam(2, 10)
# Not in level order; its first children are a chain longer than the convolutions.
RAGGED = Topology.from_parents([-1, 0, 1, 2, 0, 4, 2, 6, 3])


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to draft: `make` takes a draft model or the target."""

    make: Callable
    topology: st.TreeTopology | None = None  # None: the drafter's own
    # The target itself, a model that often agrees, one that does not know it: they share a program.
    drafts: tuple[str, ...] = ("itself", "alike", "unrelated")
    follows: bool = False  # with the target as its own draft, first children are always right


def static(topology):
    return Method(st.ModelDrafter, topology, follows=True)


def of_target(make, topology=None):
    return Method(make, topology, drafts=("itself",))


def dynamic(**options):
    return functools.partial(st.DynamicDrafter, **options)


def by_turns(target):
    return st.InterleavedDrafter(perturbed(target, 0.05), perturbed(target, 0.15, 1), "sqqsss")


def heads(**options):
    return lambda target: st.MedusaDrafter(target, heads_of(target), **options)


def mtp(make=st.ModelDrafter, **options):
    return lambda target: make(st.MtpModel(target, mtp_head_of(target, latent=8)), **options)


METHODS = {
    "chain of 1": static(Topology.chain(1)),
    "chain of 6": static(Topology.chain(6)),  # longer than the convolution
    "branching": static(TREE),
    "one wide level": static(Topology.from_branching((7,))),
    "ragged": static(RAGGED),
    **{f"paper {name}": static(Topology.paper(name)) for name in "ABCDE"},
    "deep": static(DEEP),
    "deep beam": Method(st.BeamDrafter, DEEP, drafts=("itself", "alike")),
    "deep dynamic": Method(dynamic(expand=2), DEEP, drafts=("itself", "alike")),
    "beam": Method(st.BeamDrafter, Topology.beam(3, 3)),
    "dynamic": Method(dynamic(expand=4), Topology.budget(9, 4)),
    "budget of 2": of_target(st.DynamicDrafter, Topology.budget(2, 1)),
    "root alone": of_target(st.ModelDrafter, Topology.chain(0)),
    "best tokens": Method(
        functools.partial(st.ModelDrafter, child_sampling="top_k"), TREE, drafts=("alike",)
    ),
    # Draft models of another family, and of another shape with 40 rows for the same 37 tokens.
    "another family": of_target(lambda _: st.ModelDrafter(tiny_model("nemotron_h hybrid")), TREE),
    "a padded vocabulary": of_target(lambda _: st.ModelDrafter(tiny_model("groups")), TREE),
    "lookup": of_target(lambda _: st.NgramDrafter(), Topology.chain(6)),
    "lookup tree": of_target(lambda _: st.NgramDrafter(), Topology.from_branching((2, 2, 1))),
    "heads": of_target(heads(), Topology.from_parents([-1, 0, 0, 1, 1, 2, 2, 3])),
    "best of heads": of_target(heads(child_sampling="top_k"), TREE),
    "mtp head": of_target(mtp(), TREE),
    "mtp head, deep": of_target(mtp(), DEEP),
    "mtp head, beam": of_target(mtp(st.BeamDrafter), Topology.beam(2, 2)),
    "mtp head, dynamic": of_target(mtp(st.DynamicDrafter, expand=3), Topology.budget(6, 3)),
    "mtp head, chain": of_target(mtp(), Topology.chain(6)),
    "mtp head, ragged": of_target(mtp(), RAGGED),
    "mtp head, wide": of_target(mtp(), Topology.from_branching((7,))),
    "mtp head, paper A": of_target(mtp(), Topology.paper("A")),
    "turns": of_target(by_turns),
}


def drafts(target, name="branching", amount=0.1):
    """Options of a method; its draft model is one that often agrees with the target."""
    method = METHODS[name]
    model = target if method.drafts == ("itself",) else perturbed(target, amount)
    return dict(drafter=method.make(model), topology=method.topology)
