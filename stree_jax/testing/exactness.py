"""Exactness as one call: `assert_lossless` for tokens, `assert_same_distribution` for samples."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.checks import check_ids
from stree_jax.decoding.drafters import Drafter
from stree_jax.decoding.generate import generate
from stree_jax.decoding.options import Options
from stree_jax.decoding.plan import Plan, plan
from stree_jax.decoding.processors import Processing, first_states
from stree_jax.decoding.results import PAD, Generation
from stree_jax.decoding.rules import Rule, map_rows
from stree_jax.decoding.sampling import filtered_logits, position_noise, token_log_probs
from stree_jax.decoding.tree_choice import TREES, TreeChoice
from stree_jax.decoding.types import Context
from stree_jax.decoding.verifiers import Verifier
from stree_jax.decoding.way import Topology, Way
from stree_jax.models.bits import bits_obstacle
from stree_jax.models.lm import HybridLM
from stree_jax.tree import TreeTopology

# Ragged: a prompt of one token, and one whose repetitions prompt lookup finds.
PROMPTS = [[5, 9, 2, 30, 11, 7, 7], [3], [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]]


class RandomChoice(TreeChoice):
    """Takes any of the trees at random, for a random number of steps: `topology=RandomChoice()`."""

    def __init__(self, trees: Sequence[TreeTopology] = TREES, *, seed: int = 0, most: int = 2):
        super().__init__(trees)
        self._draws, self._most = np.random.default_rng(seed), most

    def next(self, *_: Any, **__: Any) -> tuple[int, int]:
        """See `TreeChoice`."""
        number, steps = self._draws.integers((0, 1), (len(self.trees), self._most + 1))
        return int(number), int(steps)

    def wanted(self, *_: Any) -> None:
        """See `TreeChoice`: a program is compiled when it is used."""


@jax.transfer_guard("allow")
def assert_lossless(
    model: HybridLM,
    drafter: Drafter,
    *,
    topology: Topology | None = None,
    verifier: str | Verifier | None = None,
    temperatures: Sequence[float] = (0.0, 1.0),
    prompts: Sequence[Sequence[int]] | None = None,
    to_the_bit: bool | None = None,
    **options: Any,
) -> list[Generation]:
    """Asserts that drafts change nothing but the number of steps.

    Tokens, lengths and the returned cache of every row must be those of autoregressive decoding
    with the same key. Where `bits_obstacle` finds nothing they must be equal to the bit, and
    log-probabilities too.

    Args:
        model: the target: in float32, packed for a CPU, or one whose texts are equal to the bit.
            Others do not promise the same tokens.
        drafter: the drafter under test, or the one whose drafts the verifier under test gets.
        topology: the draft tree, or several, see `generate`; None: the drafter's default.
        verifier: see `generate`. Rules that keep the target's distribution but not its tokens are
            refused above temperature 0.
        temperatures: temperatures to decode at.
        prompts: token ids of each row; None: three ragged prompts.
        to_the_bit: True: all numbers must be equal, of `generate(to_the_bit=True)`; False: caches
            may differ by 3e-5 of their largest value; None: all numbers, where `bits_obstacle`
            finds nothing for the tree and the rows.
        **options: other options of `generate`. Without them there are 24 new tokens, enough for
            several steps, some without acceptance, and the key is that of seed 0.

    Returns:
        The generation at each temperature, whose `stats` a test can check.

    Raises:
        AssertionError: rows differ. The message names row, position and both tokens, and says
            whether the difference is a near tie, which another order of float32 sums explains, or
            real.
        ValueError: the arguments promise no equality, or not to the bit, or `generate` refuses
            them.
    """
    size = model.config.vocab_size
    prompts = [[t % size for t in row] for row in PROMPTS] if prompts is None else prompts
    way = Way(drafter, topology, verifier, to_the_bit=bool(to_the_bit))
    is_cold = all(heat == 0 for heat in temperatures)
    tree = way.fitted(model, temperature_is_zero=is_cold).topology
    obstacle = None if to_the_bit else bits_obstacle(model, tree.num_nodes, len(prompts))
    to_the_bit = obstacle is None if to_the_bit is None else to_the_bit
    if model.activation_dtype != jnp.float32 and obstacle:
        raise ValueError(
            f"model has dtype {model.dtype}, and only float32 reproduces autoregressive decoding"
            " token for token; build it with dtype='float32', or pack it for a CPU: model.packed()."
            f" Its texts are not equal to the bit: {obstacle}"
        )
    generations = []
    defaults = {"max_new_tokens": 24, "key": 0, "log_probs": to_the_bit}
    for temperature in temperatures:
        row_options = Options(**{**defaults, "temperature": temperature, **options})
        request = plan(model, prompts, row_options, **way)
        if not request.decoder.verifier.follows_target:
            raise ValueError(
                f"verifier {request.decoder.verifier.name!r} keeps the target's distribution, not"
                f" its tokens, at temperature {temperature}; test it with assert_same_distribution,"
                " pass verifier='target_only', or give a rule of your own follows_target = True"
            )
        plain = Way(to_the_bit=way.to_the_bit)
        want = generate(model, prompts, options=row_options, return_cache=True, **plain)
        got = generate(model, prompts, options=row_options, return_cache=True, **way)
        assert_same_text(model, request, got, want, to_the_bit=to_the_bit)
        generations.append(got)
    return generations


def assert_same_text(
    model: HybridLM, request: Plan, got: Generation, want: Generation, *, to_the_bit: bool = False
) -> None:
    """Asserts that two generations of a request have the same tokens and caches.

    `assert_lossless` for requests that were planned by hand, whose rows may have different keys,
    temperatures and filters, which explain a difference. Caches and log-probabilities are compared
    if both have some, the latter only `to_the_bit`.

    Raises:
        AssertionError: they differ; the message is that of `assert_lossless`.
    """
    for row, texts in enumerate(zip(got.tokens, want.tokens, strict=True)):
        if difference := first_difference(model, request, row, *texts):
            raise AssertionError(
                f"row {row}, new token {difference.place}: {difference.got} for {difference.want};"
                f" {'a near tie' if difference.is_tie and not to_the_bit else 'a real difference'}:"
                f" their scores differ by {difference.gap:.3g} (temperature"
                f" {float(request.sampling.temperature[row]):g}, verifier"
                f" {request.decoder.verifier.name!r})"
            )
    np.testing.assert_array_equal(got.lengths, want.lengths)
    if to_the_bit and got.log_probs is not None and want.log_probs is not None:
        np.testing.assert_array_equal(got.log_probs, want.log_probs, "not equal to the bit")
    if got.cache is None or want.cache is None:
        return
    leaves = zip(jax.tree.leaves_with_path(got.cache), jax.tree.leaves(want.cache), strict=True)
    for (path, mine), reference in leaves:
        mine, reference = np.asarray(mine), np.asarray(reference)
        np.testing.assert_allclose(
            mine,
            reference,
            # Of the largest value, autoregressive decoding and a prefill of its text differ by up
            # to 1.1e-5 (the last convolution state of six layers), trees by up to 1.6e-5.
            rtol=0 if to_the_bit else 1e-4,
            atol=0 if to_the_bit else 3e-5 * np.abs(reference).max(initial=1.0),
            err_msg=f"same tokens, but another cache{jax.tree_util.keystr(path)}: a wrong replay?",
        )


class Difference(NamedTuple):
    """The first difference of a new text from the one that it should be."""

    place: int  # among new tokens
    got: int
    want: int
    gap: float  # of their scores: logits, with noise above temperature 0
    is_tie: bool  # the gap is what another order of float32 sums makes


def first_difference(
    model: HybridLM, request: Plan, row: int, got: np.ndarray, want: np.ndarray
) -> Difference | None:
    """Compares new tokens of a row of a request; None: they are equal.

    Sums of float32 depend on the number of nodes: tokens closer than 1e-4 of the largest logit may
    swap. The model runs on prompt and common text as a sequence, whose length is a multiple of 64.
    """
    if np.array_equal(got, want):
        return None
    at = int(np.flatnonzero(got != want)[0])
    length = int(request.context.length[row])
    prompt, size = np.asarray(request.context.tokens)[row, :length], model.config.vocab_size
    text = np.concatenate([prompt, want[:at]])
    padded = np.pad(text, (0, -len(text) % 64))[None]
    logits = apply(model, padded)[:, len(text) - 1, None, :size].astype(jnp.float32)
    largest = max(1.0, float(np.abs(logits).max()))
    processors = map_rows(request.sampling.processors, lambda values: values[row][None])
    logits = processed_after(processors, prompt[None], want[None, :at], logits)[:, -1]
    temperature = float(request.sampling.temperature[row])
    if temperature > 0:
        sampling = dataclasses.replace(request.sampling, processors=())
        sampling = jax.tree.map(lambda values: values[row][None], sampling)
        start = jnp.array([at], jnp.int32)
        noise = position_noise(request.keys[row][None], start, 0, logits.shape[-1])[:, 0]
        logits = filtered_logits(logits, sampling) + noise
    tokens, scores = (int(got[at]), int(want[at])), np.asarray(logits[0], np.float64)
    gap = math.inf if PAD in tokens else float(abs(scores[tokens[0]] - scores[tokens[1]]))
    return Difference(at, *tokens, gap, gap < largest * 1e-4 / (temperature or 1.0))


@jax.jit
def processed_after(
    processors: tuple[Rule, ...], prompts: Any, new_tokens: Any, logits: jax.Array
) -> jax.Array:
    """Logits `[rows, T, V]` after some new tokens, one more at each place, through processors."""
    rows, length = prompts.shape
    context = Context(jnp.asarray(prompts, jnp.int32), jnp.full(rows, length, jnp.int32))
    rule = Processing(processors, first_states(processors, context, logits.shape[-1]))
    states, processed = rule.room(1), []
    for at in range(new_tokens.shape[1] + 1):
        place = at - new_tokens.shape[1] + logits.shape[1] - 1
        if place >= 0:
            processed.append(rule(logits[:, place : place + 1], states))
        if at < new_tokens.shape[1]:
            states = rule.advance(states, jnp.asarray(new_tokens[:, at : at + 1], jnp.int32))
    return jnp.concatenate(processed, axis=1)


@jax.transfer_guard("allow")
def assert_same_distribution(
    model: HybridLM,
    drafter: Drafter | None,
    *,
    topology: Topology | None = None,
    verifier: str | Verifier | None = None,
    prompt: Sequence[int] = (1, 0, 2, 1, 0),
    num_tokens: int = 2,
    rows: int = 4096,
    error_probability: float = 1e-6,
    **options: Any,
) -> Generation:
    """Asserts that sampled texts have the model's own distribution.

    One prompt is continued in many rows. For each length up to `num_tokens`, the frequencies of all
    possible texts are compared with the probabilities that the model's logits give them. The bound
    on the sum of their absolute differences is that of Weissman et al. (2003): with n rows and k
    texts it is above `sqrt(2 (k ln 2 + ln(1 / p)) / n)` with probability p at most. So an exact
    method fails with `error_probability` at most, whatever the number of rows; with a model of 6
    tokens and the other defaults, a method is caught whose texts are off by more than 7 % in total
    variation, or which gives a text that is impossible.

    Args:
        model: the target, with few tokens, such as `random_model(ModelConfig.tiny(vocab_size=6))`.
        drafter: the drafter; None: autoregressive decoding.
        topology, verifier: see `generate`.
        prompt: token ids that all rows continue.
        num_tokens: number of new tokens per row. A drafter without drafts in its first step, such
            as Medusa heads, needs one more.
        rows: number of samples; more give a smaller bound.
        error_probability: probability that an exact method fails.
        **options: other options of `generate`, one value for all rows. Without them the temperature
            is 1 and the key that of seed 0.

    Returns:
        The generation, so that a test can assert that drafts were accepted.

    Raises:
        AssertionError: the distribution differs.
        ValueError: too many texts for the rows, or `generate` refuses the arguments.
    """
    size = model.config.vocab_size
    error = error_probability / num_tokens  # of each length
    bound = largest_distance(size**num_tokens, rows, error)
    if bound > 0.5:
        raise ValueError(
            f"{size} tokens make {size**num_tokens} texts of {num_tokens}: {rows} rows cannot tell"
            " their distributions apart; use a model with fewer tokens, such as"
            " random_model(ModelConfig.tiny(vocab_size=6)), or more rows"
        )
    options = {"temperature": 1.0, "key": 0} | options
    row_options = Options(max_new_tokens=num_tokens, eos_token=(), **options)
    way = Way(drafter, topology, verifier)
    out = generate(model, [[*prompt]] * rows, options=row_options, **way)
    prefixes = np.array([*itertools.product(range(size), repeat=num_tokens - 1)], np.int32)
    sampling = plan(model, [[*prompt]] * len(prefixes), row_options).sampling
    prompts = np.tile(prompt, (len(prefixes), 1))
    logits = apply(model, np.hstack([prompts, prefixes]))
    logits = logits[:, len(prompt) - 1 :, :size]  # after the prompt, and after each new token
    logits = processed_after(sampling.processors, prompts, prefixes, logits)
    log_probs = jax.jit(token_log_probs)(logits, sampling)
    next_token = np.exp(np.asarray(log_probs, np.float64))
    probabilities = np.ones(1)
    for length in range(1, num_tokens + 1):
        # Texts are in lexicographic order, so different prefixes are this many rows apart.
        after_prefix = next_token[:: size ** (num_tokens - length), length - 1]
        probabilities = (probabilities[:, None] * after_prefix).ravel()
        index = out.tokens[:, :length] @ size ** np.arange(length)[::-1]
        frequencies = np.bincount(index, minlength=size**length) / rows
        shape = (size,) * length
        _compare(frequencies.reshape(shape), probabilities.reshape(shape), rows, error)
    return out


def _compare(frequencies: np.ndarray, probabilities: np.ndarray, rows: int, error: float) -> None:
    """Compares texts of one length; the arrays have an axis for each token."""
    impossible = np.argwhere((probabilities == 0) & (frequencies > 0))
    if len(impossible):
        raise AssertionError(
            f"the new tokens {impossible[0].tolist()} were sampled, and their probability is 0"
        )
    differences = np.abs(frequencies - probabilities)
    bound = largest_distance(frequencies.size, rows, error)
    if differences.sum() > bound:
        worst = np.unravel_index(differences.argmax(), differences.shape)
        raise AssertionError(
            f"texts of {frequencies.ndim} new tokens do not have the model's distribution: absolute"
            f" differences sum to {differences.sum():.4f}, and the bound for {rows} rows is"
            f" {bound:.4f}; the largest is at {[int(token) for token in worst]}, with frequency"
            f" {frequencies[worst]:.4f} for {probabilities[worst]:.4f}"
        )


def largest_distance(texts: int, rows: int, error: float) -> float:
    """Bound on the sum of absolute differences, exceeded with probability at most `error`."""
    return math.sqrt(2 * (texts * math.log(2) + math.log(1 / error)) / rows)


@jax.transfer_guard("allow")
def apply(model: HybridLM, tokens: Any) -> jax.Array:
    """Logits of whole sequences, compiled once for each structure of a model and each shape."""
    tokens = jnp.asarray(tokens)
    check_ids("tokens", tokens, model.config.vocab_size)
    return _apply(model, tokens.astype(jnp.int32))


_apply = jax.jit(HybridLM.__call__)
