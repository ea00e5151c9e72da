"""Shared by several tests, beyond `stree_jax.testing`."""

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from flax import nnx

import stree_jax as st
from pallas_kernels.native import build_backend
from stree_jax.decoding.programs import COMPILE
from stree_jax.testing import apply, perturbed, random_model  # noqa: F401
from stree_jax.testing import random_mtp_head as mtp_head_of  # noqa: F401

DOCS = Path(__file__).parents[1] / "docs"  # there in a checkout only
_NOT_RUN = r"<!-- not run: (.+?) -->\n"


def disk_is_full(*_, files=(), **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *files)


# An entry for each program that XLA has compiled in this process.
COMPILED: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: COMPILED.append(event) if event == COMPILE else None
)


def linked_driver(library, folder, flags=(), compiler=None):
    """The program of `kernels/driver.cc` with a library, as a linker takes it."""
    if not (compiler := compiler or build_backend.compiler()):
        pytest.skip("there is no C++ compiler")
    source, driver = Path(__file__).with_name("kernels") / "driver.cc", folder / "driver"
    flags = ("-std=c++17", "-O1", *flags, "-isystem", jax.ffi.include_dir(), source, *library)
    subprocess.run([*compiler, *flags, "-o", driver, "-pthread"], check=True)
    return driver


def emulated_tests(library, folder, chosen, compiler=None, runs=()):
    """Tests ops against `reference.py` with a library: what failed, and the calls of each op.

    `runs` is the command that runs a program, as an emulator.
    """
    driver = linked_driver(library, folder, compiler=compiler)
    tests = [f"tests/kernels/test_{each}.py" for each in ("ops", "matmul", "other_ops")]
    options = ["-qrf", "-p", "tests.emulated", "-p", "no:cacheprovider", "-k", chosen]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", *options),
            *("-m", "not thorough and not gpu and not slow", *tests),
        ],
        cwd=Path(__file__).parents[1],
        # The plugin imports packages before an option could check their signatures.
        env=os.environ
        | {"STREE_JAX_EMULATED": shlex.join(map(str, [*runs, driver])), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
    )
    counts = re.search(r"^\{.*\}$", done.stdout, re.MULTILINE)
    assert counts, done.stdout + done.stderr
    return re.findall("^FAILED (.*)$", done.stdout, re.MULTILINE), json.loads(counts[0])


def saved_model(folder, tokenizer, **options):
    """Saves a tiny model with a tokenizer, and returns it; its texts go anywhere."""
    vocab_size = tokenizer.get_vocab_size()
    model = random_model(st.ModelConfig.tiny(vocab_size=vocab_size, num_layers=1, **options))
    st.save_pretrained(model, folder, tokenizer=tokenizer)
    return model


def saved_pair(folder):
    """Saves tiny models and heads with tokenizer, tree and vocabulary of the embedded ones."""
    embedded = st.demo_path("target")
    tokenizer = st.load_tokenizer(embedded)
    model = saved_model(folder / "target", tokenizer, tie_embeddings=False)
    st.save_pretrained(perturbed(model, 0.1), folder / "draft", tokenizer=tokenizer)
    st.save_medusa(st.MedusaHeads(model, num_heads=3, rngs=nnx.Rngs(0)), model, folder / "medusa")
    shutil.copy(embedded.with_name("tree.json"), folder)
    return folder


def some(values, *quick):
    """Values of a table of cases: all but those named are for `make test-all`."""
    assert {*quick} <= {*values}, (quick, values)
    thorough = pytest.mark.thorough
    return [pytest.param(each, marks=() if each in quick else thorough) for each in values]


def as_users(function):
    """The function as users compile it: tests compile with less effort, see tests/conftest.py."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 3})


def word_tokenizer(words, unknown):
    """A tokenizer whose tokens are these words, written as bytes of byte-level BPE."""
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def crcs(path):
    """The checksums of a saved model's arrays."""
    return json.loads((path / "checksums.json").read_text())["crc32"]


def assert_same_model(one, other):
    """Both have the same config, if it is not a head's without one, and weights to the bit."""
    assert getattr(one, "config", None) == getattr(other, "config", None)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(one), nnx.state(other))


def with_weight(model, name, change):
    """A copy of the model with one weight changed. (`nnx.split` shares the variables: writing to
    its state would change the model, which other tests use too.)"""
    copy = nnx.clone(model)
    weight = getattr(copy, name)
    weight[...] = change(weight[...])
    return copy


def heads_of(model, num_heads=4):
    """Heads with random weights."""
    heads = st.MedusaHeads(model, num_heads=num_heads, rngs=nnx.Rngs(0))
    keys = jax.random.split(jax.random.key(0))
    for key, weight in zip(keys, (heads.kernel, heads.bias), strict=True):
        weight[...] = 0.3 * jax.random.normal(key, weight.shape)
    return heads


@jax.jit
def _continued(model, tokens):
    return jax.lax.fori_loop(0, 8, lambda _, tokens: model(tokens).argmax(axis=-1), tokens)


def temporary_bytes(model):
    """What a loop over a model takes beside its weights; jax 0.12 converts none for two rows."""
    compiled = _continued.lower(model, np.zeros((1, 1), np.int32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def by_message(names, rows):
    """A test for each row of a table, whose message is its name too."""
    return pytest.mark.parametrize(names, rows, ids=[row[-1] for row in rows])


def refusal(message, call, /, *arguments, **options):
    """The text of the ValueError of a call: one line, in which the message is found."""
    with pytest.raises(ValueError, match=message) as error:
        call(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def state_after(drafter, context, topology, max_length):
    """The state of a drafter that has read texts, without hidden states of a target."""
    state = drafter.init(len(context.length), topology, max_length)
    return drafter.read(state, context.tokens, None, context.length - 1)


def python(*arguments, timeout=900, code=0, **environment):
    """The output of another Python process, whose exit code is known; not pytest's variables."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    result = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=mine | environment,
        timeout=timeout,
    )
    assert result.returncode == code, result.stdout[-20_000:] + result.stderr
    return result.stdout


def fences(page):
    """Language and text of each block of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def python_blocks(page):
    """The Python of a page, block by block: why it is not run, if so, and its code."""
    return re.findall(
        rf"(?:^{_NOT_RUN})?^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
    )


class CtrlC:
    """Comes before every line of files of this pattern once: the `visit()`th time."""

    def __init__(self, files, visit=lambda: 1):
        self.files, self.visit, self.left = re.compile(f"stree_jax/{files}.py$"), visit, {}

    def again(self, call):
        """What a call returns, which is made again whenever it was interrupted."""
        before = sys.gettrace()
        while True:
            sys.settrace(self)
            try:
                return call()
            except KeyboardInterrupt:
                continue
            finally:
                sys.settrace(before)

    def __call__(self, frame, event, _):
        if not self.files.search(frame.f_code.co_filename):
            return None
        if event == "line":
            line = frame.f_code.co_filename, frame.f_lineno
            self.left[line] = self.left.get(line, self.visit()) - 1
            if self.left[line] == 0:
                raise KeyboardInterrupt
        return self


def rows(**values):
    """Options of each row, from lists of their values."""
    return [
        st.Options(**dict(zip(values, row, strict=True)))
        for row in zip(*values.values(), strict=True)
    ]
