import dataclasses
import functools
import re
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal
from tokenizers import Tokenizer

import stree_jax as st
from stree_jax.checkpoint.load import load_config
from stree_jax.extensions.medusa.training import medusa_loss
from stree_jax.models import linear
from stree_jax.testing import perturbed, tiny_model
from stree_jax.training import data
from stree_jax.training.objective import distillation_loss, next_token_loss
from stree_jax.training.recipe import Recipe, Text, Training
from stree_jax.training.run import continued, distill, train
from stree_jax.training.trainer import bfloat16_product, fit, multiplying, schedule
from tests.helpers import CtrlC, apply, assert_same_model, refusal
from tests.numpy_parts import log_softmax
from tests.training.conftest import RECIPE

thorough = pytest.mark.thorough


@pytest.fixture(scope="module")
def trained(text):
    """A target trained by the recipe, and the steps that were reported."""
    file = text.with_name("trained.toml")
    file.write_text(RECIPE)
    path = text.with_name("target")
    reports = train(Recipe.load(file), path)
    return path, [report.step for report in reports]


def test_a_recipe_is_read(recipe_file, text):
    recipe = Recipe.load(recipe_file)
    assert recipe.training == Training(
        steps=6, batch_size=2, sequence_length=16, save_every=2, warmup_steps=2
    )
    assert recipe.text == (Text(str(text), 1.0, "# "),)


def test_the_tokenizer_and_its_documents(text):
    texts = [Text(str(text), document_start="# ")]
    tokenizer = data.train_tokenizer(texts, 300)
    assert tokenizer.get_vocab_size() <= 300
    assert tokenizer.token_to_id(data.END_OF_TEXT) == 0
    sample = "the cat\n\tsat — naïve 中"
    assert tokenizer.decode(tokenizer.encode(sample).ids) == sample
    train_split, held_out = data.load_corpus(texts, tokenizer, 17)
    whole = np.concatenate([train_split.streams[0], held_out.streams[0]])
    assert (whole == 0).sum() == 200  # one per document
    decoded = tokenizer.decode(whole.tolist(), skip_special_tokens=True)
    assert decoded == text.read_text()


def test_batches_are_a_function_of_the_step():
    corpus = data.Corpus((np.arange(100, dtype=np.uint16), np.arange(500, 900)), (1.0, 3.0))
    first = data.batch_at(corpus, 3, seed=0, batch_size=400, length=8)
    assert first.shape == (400, 8)
    assert first.dtype == np.int32
    assert_array_equal(first, data.batch_at(corpus, 3, 0, 400, 8))
    assert not np.array_equal(first, data.batch_at(corpus, 4, 0, 400, 8))
    assert (np.diff(first, axis=1) == 1).all()  # windows of one stream
    assert 0.6 < (first[:, 0] >= 500).mean() < 0.9  # three quarters from the second


def test_losses():
    model = tiny_model("groups")  # with vocabulary padding, which must not count
    tokens = np.array([[1, 5, 2, 9], [3, 3, 0, 36]], np.int32)
    logits = np.asarray(apply(model, tokens), np.float64)[..., :37]
    log_probs = log_softmax(logits)
    want = -np.take_along_axis(log_probs[:, :-1], tokens[:, 1:, None], axis=-1).mean()
    assert_allclose(jax.jit(next_token_loss)(model, tokens), want, rtol=1e-5)

    target = jnp.asarray(apply(tiny_model("plain"), tokens))
    p = np.asarray(jax.nn.softmax(target), np.float64)
    divergence = (p * (np.log(p) - log_probs)).sum(-1).mean()
    compiled = jax.jit(distillation_loss)
    got = compiled(model, target, tokens)
    assert_allclose(got, divergence, rtol=1e-4)
    same = compiled(model, apply(model, tokens), tokens)
    assert_allclose(same, 0, atol=1e-6)


def new_model():
    return st.HybridLM(st.ModelConfig.tiny(num_layers=1), rngs=nnx.Rngs(0))


def loss(model, tokens, _):
    return next_token_loss(model, tokens)


def batch(step):
    start = np.arange(2)[:, None] + step
    return ((start + np.arange(17)) % 37).astype(np.int32)  # counting: easy to learn


TRAINING = Training(*(8, 2, 16), save_every=3, warmup_steps=2, products="bfloat16")


def fitted(path, model=None, loss=loss, training=TRAINING):
    """What a run reports."""
    return [*fit(model or new_model(), loss, batch, training, path)]


@thorough
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    whole, run = new_model(), tmp_path / "a\\b" / "parts [1]"  # special where files are globbed
    losses = [report.loss for report in fitted(tmp_path / "whole", whole)]
    assert losses[-1] < losses[0]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(whole))} == {"float32"}

    interrupted = fit(new_model(), loss, batch, TRAINING, run)
    for report in interrupted:
        if report.step == 7:  # saved after steps 3 and 6; step 7 is lost
            interrupted.close()
            break
    resumed = new_model()
    rest = fitted(run, resumed)
    assert [report.step for report in rest] == [7, 8]
    assert_allclose([report.loss for report in rest], losses[6:], rtol=1e-5)
    jax.tree.map(
        lambda a, b: assert_allclose(a, b, atol=1e-6),
        nnx.state(resumed),
        nnx.state(whole),
    )
    assert fitted(run) == []


@thorough
def test_a_model_can_be_trained_after_ctrl_c_at_every_line(tmp_path):
    """Its weights are there, and the next call goes on from the latest checkpoint."""
    whole, model = new_model(), new_model()
    fitted(tmp_path / "whole", whole)
    CtrlC("training/trainer").again(lambda: fitted(tmp_path / "run", model))
    close = functools.partial(assert_allclose, atol=1e-6)
    jax.tree.map(close, nnx.state(model), nnx.state(whole))


def test_the_gradient_of_a_bfloat16_product():
    """Both gradients are products of rounded factors, in float32."""
    rng = np.random.default_rng(0)
    rows, kernel, ahead = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 3, 8), (8, 5), (2, 3, 5))
    )
    output, gradients = jax.vjp(bfloat16_product, rows, kernel)
    rounded = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in (rows, kernel, ahead)]
    x, w, g = rounded[0].reshape(6, 8), rounded[1], rounded[2].reshape(6, 5)
    assert_allclose(output, (x @ w).reshape(2, 3, 5), rtol=1e-5, atol=1e-5)
    of_rows, of_kernel = gradients(ahead)
    assert_allclose(of_rows, (g @ w.T).reshape(2, 3, 8), rtol=1e-5, atol=1e-5)
    assert_allclose(of_kernel, x.T @ g, rtol=1e-5, atol=1e-5)
    layer = linear(8, 5, bias=False, dtype=jnp.float32, rngs=nnx.Rngs(0))
    want = bfloat16_product(rows, layer.kernel[...])
    assert not np.array_equal(layer(rows), want)
    assert_array_equal(multiplying(layer, "bfloat16")(rows), want)


def test_the_schedule_with_decay_steps():
    training = dataclasses.replace(TRAINING, decay_steps=2)  # at its peak up to step 6
    rates = [float(schedule(training)(step)) / training.learning_rate for step in range(9)]
    assert_allclose(rates, [0, 0.5, 1, 1, 1, 1, 1, 0.525, 0.05], rtol=1e-6)


@thorough
def test_a_run_with_other_shapes_is_not_resumed(tmp_path):
    fitted(tmp_path / "run", training=dataclasses.replace(TRAINING, steps=3))
    wider = st.HybridLM(st.ModelConfig.tiny(d_model=32), rngs=nnx.Rngs(0))
    refusal(
        "is damaged or has other shapes; remove it",
        list,
        fit(wider, loss, batch, TRAINING, tmp_path / "run"),
    )


@thorough
@pytest.mark.parametrize(
    "bad",
    [
        lambda loss: loss * jnp.nan,
        lambda loss: loss + 0.0 * jnp.sqrt(loss - jax.lax.stop_gradient(loss)),  # gradient: 0 * inf
    ],
    ids=["loss", "update"],
)
def test_what_is_not_finite_stops_the_run_and_is_not_saved(bad, tmp_path):
    def spoiled(model, tokens, _):
        return bad(next_token_loss(model, tokens))

    training = dataclasses.replace(TRAINING, save_every=1)
    with pytest.raises(FloatingPointError, match="not finite at step 1"):
        fitted(tmp_path / "run", None, spoiled, training)
    assert len(fitted(tmp_path / "run", training=training)) == training.steps


@thorough
def test_train_and_distill_write_checkpoints(trained, recipe_file, tmp_path, monkeypatch):
    recipe, draft_path = Recipe.load(recipe_file), tmp_path / "draft"
    target_path, steps = trained
    assert steps == [1, 2, 3, 4, 5, 6]
    target = st.from_pretrained(target_path)
    assert target.config.eos_token == 0
    assert target.config.kinds == ("mamba2", "mlp", "attention", "mlp")
    assert (target_path / "README.md").read_text().startswith("Held-out loss: ")

    small = dataclasses.replace(
        recipe,
        model=dict(d_model=16, num_layers=1, head_dim=8, state_size=8),
        training=dataclasses.replace(recipe.training, generated=0.5),
    )
    batches = []
    monkeypatch.setattr(
        "stree_jax.training.run.generate",
        lambda target, prompts, **options: (
            batches.append(len(prompts)) or st.generate(target, prompts, **options)
        ),
    )
    list(distill(small, target_path, draft_path))
    assert batches == [8, 8]  # one row for each of 8 steps; the even steps and the odd ones
    draft = st.from_pretrained(draft_path)
    assert draft.config.vocab_size == target.config.vocab_size
    assert len(draft.config.kinds) == 1
    assert st.load_tokenizer(draft_path).to_str() == st.load_tokenizer(target_path).to_str()
    out = st.generate(target, [[5, 6]], max_new_tokens=4, drafter=st.ModelDrafter(draft))
    assert out.lengths.tolist() == [4]
    # Restarting a finished run only rewrites its output.
    assert list(train(recipe, target_path)) == []

    # Another recipe or another target is another run.
    longer = dataclasses.replace(recipe.training, steps=7)
    refusal(
        r"target\.run belongs to a run with another recipe",
        list,
        train(dataclasses.replace(recipe, training=longer), target_path),
    )
    st.save_pretrained(tiny_model(), tmp_path / "other", tokenizer=st.load_tokenizer(target_path))
    refusal(
        "tokenizer of .*other has 280 tokens, its model 37",
        list,
        distill(small, tmp_path / "other", draft_path),
    )
    perturbed_path = tmp_path / "perturbed"
    st.save_pretrained(
        perturbed(target, 0.1), perturbed_path, tokenizer=st.load_tokenizer(target_path)
    )
    refusal(
        r"draft\.run belongs to a run with another .* target",
        list,
        distill(small, perturbed_path, draft_path),
    )


@thorough
def test_training_goes_on_from_a_checkpoint(trained, text, tmp_path):
    start, _ = trained
    table = RECIPE[RECIPE.index("[training]") :].replace("steps = 6", "steps = 1")
    still = "learning_rate = 0.0\nwarmup_steps = 0\n[[text]]"
    table = table.replace("warmup_steps = 2\n", "").replace("[[text]]", still)
    file = text.with_name("on.toml")
    file.write_text(f'start = "{start.name}"\n{table}')
    list(train(Recipe.load(file), tmp_path / "on"))
    assert_same_model(*map(st.from_pretrained, (tmp_path / "on", start)))
    assert st.load_tokenizer(tmp_path / "on").to_str() == st.load_tokenizer(start).to_str()
    list(distill(Recipe.load(file), start, tmp_path / "draft"))  # its own draft
    card = (tmp_path / "draft" / "README.md").read_text()
    assert re.match(r"Held-out loss: -?0\.0000 nats", card)
    other = Tokenizer.from_str(st.load_tokenizer(start).to_str().replace('"Z":', '"Zz":'))
    st.save_pretrained(st.from_pretrained(start), tmp_path / "other", tokenizer=other)
    refusal(
        "different tokenizers",
        list,
        distill(Recipe.load(file), tmp_path / "other", tmp_path / "draft"),
    )


@thorough
def test_the_target_continues_the_first_half():
    model, tokens = tiny_model(), batch(0)
    greedy = continued(model, tokens, seed=0, step=1)
    assert_array_equal(greedy[:, :8], tokens[:, :8])
    for t in range(8, 17):
        best = np.asarray(apply(model, np.pad(greedy, ((0, 0), (0, 3)))))[:, t - 1].argmax(-1)
        assert_array_equal(greedy[:, t], best)
    model = nnx.clone(model)  # other tests use the same one
    model.config = dataclasses.replace(model.config, eos_token=int(greedy[0, 8]))
    assert_array_equal(continued(model, tokens, seed=0, step=1), greedy)
    sampled = continued(model, tokens, seed=0, step=2)
    assert not np.array_equal(sampled, greedy)
    assert_array_equal(sampled, continued(model, tokens, seed=0, step=2))


@thorough
@pytest.mark.parametrize("name", ["target", "draft"])
def test_the_recipe_of_an_embedded_model(name):
    """It describes the model beside it."""
    path = st.demo_path(name)
    first = tomllib.loads(path.with_name(f"{name}.toml").read_text())
    Training(**first["training"])
    while "start" in first:  # the first run chose the model
        first = tomllib.loads(path.with_name(f"{first['start']}.toml").read_text())
    have = load_config(path)
    want = st.ModelConfig.mamba2_lm(have.vocab_size, eos_token=0, **first["model"])
    assert dataclasses.replace(have, max_length=None) == want


@thorough
def test_the_loss_of_medusa_heads():
    """Against a loop over heads and positions; multipliers and padding count."""
    for name in ("falcon_h1 hybrid", "groups"):
        target = tiny_model(name)
        heads = st.MedusaHeads(target, num_heads=2, rngs=nnx.Rngs(0))
        heads.kernel[...] = 0.3 * jax.random.normal(jax.random.key(0), heads.kernel.shape)
        tokens = np.array([[1, 5, 2, 9, 3], [3, 3, 0, 36, 7]], np.int32)
        hidden = jax.jit(lambda model, tokens: model.hidden(tokens))(target, tokens)
        log_p = jax.nn.log_softmax(np.asarray(apply(target, tokens), np.float64)[..., :37])
        want, ahead = 0.0, heads(hidden)
        for head, weight in enumerate((1.0, 0.8)):
            log_q = jax.nn.log_softmax(target.logits(ahead[:, :, head])[..., :37])
            terms = [
                (np.exp(log_p[:, t + head + 1]) * (log_p[:, t + head + 1] - log_q[:, t])).sum(-1)
                for t in range(4 - head)
            ]
            want += weight * np.mean(terms) / 1.8
        got = jax.jit(medusa_loss)(heads, target, tokens)
        assert_allclose(got, want, rtol=1e-4)
