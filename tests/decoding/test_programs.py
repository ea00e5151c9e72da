"""How often programs are compiled, and that caches are not copied."""

import re

import jax
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding import programs
from stree_jax.decoding.plan import plan
from stree_jax.decoding.prompts import buffer_size, list_size
from stree_jax.testing import perturbed, tiny_model
from tests.decoding.texts import started
from tests.helpers import COMPILED, some
from tests.methods import drafts

TREE = st.TreeTopology.from_parents([-1, 0, 0, 2])  # of no other test


def programs_of(**options):
    """How many programs a request compiles."""
    before = len(COMPILED)
    st.generate(tiny_model(), **options)
    return len(COMPILED) - before


@pytest.fixture(scope="module")
def warm():
    """Compiles a greedy and a sampled program of two rows, with drafts."""
    common = drafts(tiny_model()) | dict(topology=TREE, max_new_tokens=6)
    greedy = common | dict(prompts=[[1, 2, 3], [4]])
    sampled = greedy | dict(temperature=0.7, top_k=3, key=jax.random.key(0))
    assert programs_of(**greedy) > 0
    assert programs_of(**sampled) > 0
    return greedy, sampled


@pytest.mark.parametrize(
    ("change", "of"),
    [
        (dict(prompts=[[5] * 40, [6] * 7]), "all"),
        (dict(max_new_tokens=13, prompts=[[1] * 50, [2]]), "all"),
        (dict(eos_token=[3, 4, 5, 6]), "all"),
        (dict(eos_token=()), "all"),
        (dict(max_length=60), "all"),
        (dict(temperature=1.3), "sampled"),
        (dict(top_k=7), "sampled"),
        (dict(top_k=0, top_p=0.5), "sampled"),
        (dict(key=jax.random.key(5)), "sampled"),
    ],
)
def test_nearby_requests_share_programs(change, of, warm):
    for request in warm if of == "all" else warm[1:]:
        assert programs_of(**request | change) == 0


@pytest.mark.thorough
def test_longer_requests_compile_again_in_geometric_steps(warm):
    """Each new size of buffer compiles, and is then shared."""
    greedy, _ = warm
    assert programs_of(**greedy | dict(max_new_tokens=80)) > 0
    assert programs_of(**greedy | dict(max_new_tokens=90)) == 0
    sizes = sorted({buffer_size(n) for n in range(1, 5000)})
    assert sizes[:6] == [64, 96, 128, 192, 256, 384]
    assert len(sizes) == 14
    assert all(n <= buffer_size(n) <= max(64, 1.5 * n) for n in range(1, 5000))


def counting(num_states):
    """An automaton that counts tokens."""
    next_state = np.minimum(np.arange(num_states) + 1, num_states - 1)
    return st.Automaton(np.repeat(next_state[:, None], 37, axis=1))


@pytest.mark.parametrize(
    ("few", "more"),
    [
        (dict(top_log_probs=1), dict(top_log_probs=8)),
        (dict(stop=[[1]]), dict(stop=[[1, 2], [3, 4, 5], [6]])),
        (dict(processors=[st.BannedTokens([1])]), dict(processors=[st.BannedTokens(range(8))])),
        (dict(processors=[counting(3)]), dict(processors=[counting(100)])),
        (
            dict(processors=[st.RepetitionPenalty(1.2)]),
            dict(processors=[st.RepetitionPenalty(1.7)]),
        ),
        (dict(min_new_tokens=2), dict(min_new_tokens=3)),
    ],
)
def test_short_lists_share_a_program(few, more):
    """Its key is asked for, nothing is compiled: lists of 1 to 8 are arrays of one size."""

    def key(options):
        request = plan(tiny_model(), [[1]], **options)
        leaves, structure = jax.tree.flatten((request.limits, request.sampling))
        return request.decoder, structure, [leaf.shape for leaf in leaves]

    assert key(few) == key(more)
    assert [list_size(n) for n in (0, 1, 8, 9, 32, 33, 600)] == [8, 8, 8, 32, 32, 128, 2048]


@pytest.mark.thorough
@pytest.mark.parametrize("committed", [(), ("target",), ("draft",), ("target", "draft")])
def test_the_second_step_shares_the_program_of_the_first(committed):
    models = {"target": tiny_model(), "draft": perturbed(tiny_model(), 0.3)}
    for name in committed:
        models[name] = jax.device_put(models[name], jax.devices()[0])
    options = dict(drafter=st.ModelDrafter(models["draft"]), topology=TREE, max_new_tokens=20)
    steps = st.stream(models["target"], [[1, 2, 3]], **options)
    next(steps)
    before = len(COMPILED)
    assert list(steps)
    assert len(COMPILED) == before


@pytest.mark.thorough
def test_the_caches_of_a_prompt_are_not_copied():
    """A run reuses the buffers of the first state, and neither the request nor the model's."""
    model = tiny_model("bamba hybrid")
    request = plan(model, [[1, 2, 3], [4]], **drafts(model) | dict(topology=TREE))
    texts = []
    for _ in range(2):
        state = started(model, request)
        caches = jax.tree.leaves((state.cache, state.drafter, state.pending, state.context))
        state = request.decoder.run(model, request.drafter, state, request.limits, request.sampling)
        assert all(leaf.is_deleted() for leaf in caches)
        texts.append(state.context.tokens)
    np.testing.assert_array_equal(*texts)


SCOPES = {"draft", "verify", "replay", "sampling"}
WAYS = ["branching", "beam", "dynamic", "lookup", "heads", "turns"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("way", some(WAYS, "branching", "turns"))
def test_a_profile_names_the_parts_of_a_step(way, temperature):
    """Of the loop, and of the step that `stream` runs."""
    model = tiny_model()
    request = plan(model, [[1, 2]], temperature=temperature, key=0, **drafts(model, way))
    decoder, drafter, context, keys, limits, sampling, *_ = request
    state = decoder.start(model, drafter, context, keys, sampling)
    for program in (st.SpeculativeDecoder.run, st.SpeculativeDecoder.step):
        lowered = program.lower(decoder, model, drafter, state, limits, sampling)
        names = re.findall(r'loc\("([^"]*)"', lowered.as_text(debug_info=True))
        if way == "branching":  # as XLA keeps them
            names = re.findall(r'op_name="([^"]*)"', lowered.compile().as_text())
        assert {part for name in names for part in name.split("/")} >= SCOPES


@pytest.mark.skipif(not programs.MOST.is_file(), reason="the system has no such limit")
def test_programs_are_freed_before_a_process_has_no_room(monkeypatch):
    request = dict(prompts=[[1]], max_new_tokens=5)
    programs_of(**request)
    assert programs_of(**request) == 0
    monkeypatch.setattr(programs, "_LEFT", [0])
    monkeypatch.setattr(programs, "num_mappings", lambda: 10_000_000)
    jax.jit(abs)(0)
    assert programs_of(**request) > 0
