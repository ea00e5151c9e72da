"""The table of heads that all tests of heads run on: head, drafter, and the head in float64."""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import stree_jax as st
from stree_jax.testing import apply, tiny_model
from tests.extensions import (
    dflash_files,
    eagle3_files,
    ling_files,
    mtp_files,
    numpy_heads,
    qwen_files,
)
from tests.helpers import heads_of


class Parts(NamedTuple):
    """A head of a kind, for a target."""

    kind: str
    target: st.HybridLM
    head: Any
    make: Callable[..., st.Drafter]  # from the target and the head
    exact: Any  # the head in float64, see `numpy_heads`

    def drafter(self, **options):
        return self.make(self.target, self.head, **options)


def of_target(target):
    """Embedding and output head, with the target's multipliers."""
    config = target.config
    return {
        "embedding": config.embedding_multiplier * np.asarray(target.embedding[...]),
        "lm_head": config.logits_multiplier * np.asarray(target.output_head[...]),
    }


def from_files(saved, load, target, **options):
    """A head as it is loaded from its files."""
    with tempfile.TemporaryDirectory() as folder:
        return load(saved(Path(folder), **options), target)


def medusa(name):
    target = tiny_model(name)
    head = heads_of(target)
    weights = {"kernel": head.kernel[...], "bias": head.bias[...]} | of_target(target)
    return Parts("medusa", target, head, st.MedusaDrafter, numpy_heads.Medusa(weights))


def mtp(files, exact, name=None, **options):
    """A head of such files, for the target of their checkpoint or another one."""
    values, _, weights = files.files(**options)
    with tempfile.TemporaryDirectory() as folder:
        path = files.saved(Path(folder), **options)
        target = tiny_model(name) if name else st.from_pretrained(path)
        head = st.load_mtp(path, target)
    return Parts("mtp", target, head, st.MtpDrafter, exact(values, weights | of_target(target)))


def eagle3(embeds=False):
    target, changes, tensors = tiny_model("nemotron_h hybrid"), {}, {}
    weights = eagle3_files.tensors() | of_target(target)
    if embeds:  # by its own embedding
        changes = dict(norm_before_residual=True)
        weights["embedding"] = np.random.default_rng(1).normal(size=(37, 16)).astype(np.float32)
        tensors = {"embed_tokens.weight": weights["embedding"]}
    head = from_files(eagle3_files.saved, st.load_eagle3, target, changes=changes, replaced=tensors)
    exact = numpy_heads.Eagle3(eagle3_files.CONFIG | changes, weights)
    return Parts("eagle3", target, head, st.Eagle3Drafter, exact)


def dflash(**options):
    target = tiny_model("nemotron_h hybrid")
    config, weights = dflash_files.files(**options)
    head = from_files(dflash_files.saved, st.load_dflash, target, **options)
    exact = numpy_heads.DFlash(config, weights | of_target(target))
    return Parts("dflash", target, head, st.DFlashDrafter, exact)


# Targets with multipliers and a padded vocabulary, tied and untied, are among them.
HEADS = {
    "medusa": lambda: medusa("plain"),
    "medusa, multipliers": lambda: medusa("falcon_h1 hybrid"),
    "medusa, padded": lambda: medusa("groups"),
    "mtp": lambda: mtp(mtp_files, numpy_heads.Mtp, "plain", latent=False),
    "mtp, latent": lambda: mtp(mtp_files, numpy_heads.Mtp, "falcon_h1 hybrid"),
    "mtp, qwen": lambda: mtp(qwen_files, numpy_heads.Qwen),
    "mtp, qwen, experts": lambda: mtp(qwen_files, numpy_heads.Qwen, "plain", experts=True),
    "mtp, ling": lambda: mtp(ling_files, numpy_heads.Ling),
    "eagle3": eagle3,
    "eagle3, its own embedding": lambda: eagle3(embeds=True),
    "dflash": dflash,
    "dflash, dspark": lambda: dflash(dspark=True),
    "dflash, dspark, filled in": lambda: dflash(dspark=True, sample_from_anchor=False),
    "dflash, second": lambda: dflash(**dflash_files.SECOND),
}
KINDS = ("medusa", "mtp", "eagle3", "dflash")


@functools.cache
def parts(name):
    """An entry of `HEADS`."""
    return HEADS[name]()


@functools.partial(jax.jit, static_argnames="inner")
def hidden_of(model, tokens, inner=()):
    return model.hidden(tokens, inner)


def states_of(model, text, inner=()):
    """The target's states that heads read: after its final norm, or those of inner layers."""
    padded = np.pad(np.asarray(text, np.int32), (0, 96 - len(text)))[None]
    states = np.asarray(hidden_of(model, padded, tuple(inner)))[0, : len(text)]
    last, width = states[:, : model.config.d_model], model.config.d_model
    logits = model.config.logits_multiplier * last @ np.asarray(model.output_head[...]).T
    np.testing.assert_allclose(logits, np.asarray(apply(model, padded))[0, : len(text)], atol=1e-4)
    return states[:, width:] if inner else last
