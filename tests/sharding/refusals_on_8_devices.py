"""What is refused for models on meshes of 8 CPU devices. Run by `test_on_8_devices.py`."""

import jax.numpy as jnp
from flax import nnx

import stree_jax as st
from tests.helpers import by_message, heads_of, mtp_head_of, refusal
from tests.sharding.meshes import PROMPTS, decode, draft_of, model_of, replicated_draft, sharded


def eagle3_head(model):
    sizes = model.config.d_model, model.config.vocab_size, 8, (1,)
    parts = st.AttentionConfig(2, 1, 8, input_multiple=2), st.MlpConfig(8)
    return st.Eagle3Head(st.Eagle3Config(*sizes, *parts), rngs=nnx.Rngs(0))


def drafting(model, *parts, drafter=st.ModelDrafter):
    return decode(model, drafter=drafter(*parts))


# Of a target on a mesh, the same on one device, and drafts on that mesh and on one device.
REFUSED = [
    (lambda on, one, draft, far: drafting(on, far), "not on the target's mesh"),
    (
        lambda on, one, draft, far: drafting(on, replicated_draft("mamba2", 4, 2)),
        "not on the target's mesh",
    ),
    (lambda on, one, draft, far: drafting(on, on), "cut into parts"),
    (lambda on, one, draft, far: drafting(one, draft), "the target is not"),
    (
        lambda on, one, draft, far: drafting(on, draft, far, "qs", drafter=st.InterleavedDrafter),
        "not on the target's mesh",
    ),
    (lambda on, *_: on(jnp.ones((2, 3), jnp.int32)), "its own methods cannot be called"),
    (lambda on, *_: decode(on, return_prefix=True), "return_prefix is for models on one device"),
    (lambda on, *_: st.tune(on, st.NgramDrafter(), PROMPTS), "tune is for models on one device"),
    (
        lambda on, one, *_: st.MtpDrafter(on, mtp_head_of(one)),
        "MtpModel is for models on one device",
    ),
    (
        lambda on, one, *_: drafting(on, one, mtp_head_of(one), drafter=st.MtpDrafter),
        "a multi-token-prediction head is for models on one",
    ),
    (lambda on, *_: st.load_mtp("there", on), "load_mtp is for models on one device"),
    (lambda on, *_: st.load_eagle3("there", on), "load_eagle3 is for models on one device"),
    (lambda on, *_: st.load_dflash("there", on), "load_dflash is for models on one device"),
    (lambda on, *_: st.Eagle3Drafter(on, eagle3_head(on)), "an EAGLE-3 head is for models on one"),
    (
        lambda on, one, *_: drafting(on, one, eagle3_head(on), drafter=st.Eagle3Drafter),
        "an EAGLE-3 head is for models on one device",
    ),
    (lambda on, one, *_: st.MedusaDrafter(on, heads_of(one)), "MedusaDrafter is for models on one"),
    (lambda *_: st.from_pretrained("there", replicate=True), "pass mesh="),
]


@by_message(("call", "message"), REFUSED)
def test_what_is_refused(call, message):
    name = "mamba2"
    models = sharded(name, 2, 4), model_of(name), replicated_draft(name, 2, 4), draft_of(name)
    refusal(message, call, *models)
