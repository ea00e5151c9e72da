"""Drafting with a multi-token-prediction head: what `ModelDrafter` does, without a draft model."""

from stree_jax import HybridLM, ModelDrafter
from stree_jax.extensions.mtp.model import MtpModel
from stree_jax.models import MtpHead


class MtpDrafter(ModelDrafter):
    """A multi-token-prediction head that fills a static tree level by level.

    The head reads the prompt's states through `read`, so that the first step drafts; only a prompt
    of a single token has none yet. Leaves are never run, and drafts leave nothing behind.

    Args:
        target: the model that `generate` decodes with, on one device.
        head: a head for that model, see `load_mtp`.
        child_sampling: see `ModelDrafter`.

    Raises:
        ValueError: another value of `child_sampling`, or a head of other sizes.
    """

    def __init__(self, target: HybridLM, head: MtpHead, *, child_sampling: str = "auto"):
        super().__init__(MtpModel(target, head), child_sampling=child_sampling)
