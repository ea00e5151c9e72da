"""Multi-token-prediction heads: drafts by a small head on the target's own hidden states.

`stree_jax.extensions.mtp.training` trains them; it is not imported here, to keep this light.
"""

from stree_jax.extensions.mtp.checkpoint import load_mtp
from stree_jax.extensions.mtp.drafter import MtpDrafter
from stree_jax.extensions.mtp.model import MtpModel
from stree_jax.heads import save_head as save_mtp
from stree_jax.models import MtpConfig, MtpHead

__all__ = ["MtpConfig", "MtpDrafter", "MtpHead", "MtpModel", "load_mtp", "save_mtp"]
