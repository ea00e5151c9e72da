"""Is text with drafts that of autoregressive decoding? 19 families, fifteen ways of decoding.

At temperature 0, and at temperature 1 with shared noise; in float32, bfloat16 and 8 bits, as models
are loaded on this device. Besides drafters and trees there are logits processors with a state,
which the plain text has too, and a `Scheduler` that gets the rows in another order. Small models
with random weights, in sizes that native code and the Pallas kernels accept. The draft is the
target with noise on its weights, so that it is often right, but not always. Rows are compared up to
their first difference, and every one is reported. On a CPU with native code log-probabilities must
be equal to the bit; elsewhere tokens, but for near ties. Exit code 1 if anything else differs.

Each row is written as it is found, and a run with the options of an earlier one, `--output` too,
goes on after it. What `--commit` writes has sums only.

    python -m benchmarks.lossless [--tokens 1000000] [--families Mamba-2 ...] [--types float32 ...]
        [--ways scheduler ...] [--data 2] [--model 2] [--output DIR | --commit]
"""

import argparse
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from rich.progress import track

import stree_jax as st
from benchmarks.common import Found, main, names
from benchmarks.methods import TWO_TREES, trees
from benchmarks.models import on_gpu
from stree_jax.decoding.plan import plan
from stree_jax.measuring.methods import Method
from stree_jax.measuring.report import Table
from stree_jax.mesh.partition import ONE_DEVICE
from stree_jax.testing import HYBRIDS, RandomChoice, bits_obstacle, perturbed, random_mtp_head
from stree_jax.testing.exactness import first_difference


def _enlarged(config: st.ModelConfig, **changes: Any) -> st.ModelConfig:
    """The config with the least sizes of heads, states and experts for Pallas."""

    def enlarged(layer: Any) -> Any:
        sizes: dict[str, Any] = {name: enlarged(part) for name, part in layer.parts.items()}
        match layer.kind:
            case "mamba2" | "gated_delta":
                sizes |= dict(head_dim=16, state_size=16, chunk_size=16)
            case "short_conv":
                sizes |= dict(num_channels=64)
            case "attention":
                sizes |= dict(head_dim=16, rotary_dim=16 * layer.rotary_dim // layer.head_dim)
            case "moe":
                sizes |= dict(hidden_size=32, latent_size=layer.latent_size and 32, shared_size=32)
        return dataclasses.replace(layer, **sizes)

    sizes: dict[str, Any] = dict(vocab_size=500, padded_vocab_size=512, d_model=64)
    sizes["layers"] = tuple(map(enlarged, config.layers))
    return dataclasses.replace(config, **sizes | changes)


_HYBRIDS = {
    "MambaInLlama": "mamba_in_llama",
    "mamba2attn": "mamba2attn",
    "Falcon-H1": "falcon_h1",
    "Bamba": "bamba",
    "Nemotron-H": "nemotron_h",
    "Granite-4-H": "granite_moe",
    "Zamba2": "zamba2",
    "Qwen3.5": "qwen3_5",
    "Qwen3-Next": "qwen3_next",
    "Olmo-Hybrid": "olmo_hybrid",
    "Lara": "lara",
    "Kimi-Linear": "kimi_linear",
    "Ling 3": "bailing_hybrid",
    "LFM2": "lfm2",
    "LFM2-MoE": "lfm2_moe",
    "LFM3": "lfm3",
}
_BAMBA = _enlarged(HYBRIDS["bamba"])
FAMILIES = {
    "mamba_ssm": dataclasses.replace(
        _BAMBA.with_layers(("mamba2", "mlp") * 2),
        mamba2=dataclasses.replace(_BAMBA.mamba2, norm="norm_then_gate"),
        residual_float32=True,
    ),
    # Not tied: with tied embeddings a random model repeats itself.
    "Mamba-2": st.ModelConfig.mamba2_lm(
        512, 128, 4, head_dim=64, state_size=64, tie_embeddings=False
    ),
    "Codestral-Mamba": dataclasses.replace(
        _BAMBA.with_layers(("mamba2",) * 3),
        mamba2=dataclasses.replace(_BAMBA.mamba2, num_heads=8, num_groups=4),
    ),
}
FAMILIES |= {name: _enlarged(HYBRIDS[hybrid]) for name, hybrid in _HYBRIDS.items()}

PROMPT_LENGTHS = (37, 5, 64, 1)
ROWS = 16
NEW_TOKENS = 64  # of a row
TEMPERATURES = (0.0, 1.0)
NOISE = 0.02  # relative, on the draft's weights
_RANDOM = np.random.default_rng(0)
_PARENTS = (-1, *(int(_RANDOM.integers(0, node)) for node in range(1, 32)))
TREES = TWO_TREES | {"random tree of 32": st.TreeTopology(_PARENTS)}

ON_A_DEVICE = ("Medusa heads", "multi-token prediction", "DFlash 2")
METHODS = (
    *TREES,
    *("chain of 12", "3 beams of 4", "dynamic tree of 16", "prompt lookup"),
    "two drafts in turns",
    *("penalty and grammar", "scheduler", "auto, at random", "scheduler, at random"),
    *ON_A_DEVICE,
)
TYPES = ("float32", "bfloat16", "int8")
OPTIONS = {
    "--families": names(FAMILIES),
    "--types": {"nargs": "+", "choices": TYPES, "default": ["float32"]},
    "--ways": names(METHODS),
    "--tokens": 1_000_000,
    **dict.fromkeys(("--data", "--model"), 1),  # of a mesh
}

Texts = Iterator[tuple[np.ndarray, np.ndarray, int]]


def batches(
    model: st.HybridLM, requests: Sequence[dict[str, Any]], options: Mapping[str, Any]
) -> Texts:
    """Tokens and log-probabilities of each request by `generate`, and calls of the target."""
    for given in requests:
        out = st.generate(model, **given, **options, log_probs=True)
        yield out.tokens, out.log_probs, out.stats.num_target_calls


def served(
    model: st.HybridLM, requests: Sequence[dict[str, Any]], options: Mapping[str, Any]
) -> Texts:
    """The same by a `Scheduler`, which gets the rows of all requests in shuffled order."""
    way, length = dict(options), max(PROMPT_LENGTHS) + NEW_TOKENS
    own = dict(max_new_tokens=NEW_TOKENS, log_probs=True, processors=way.pop("processors"))
    scheduler = st.Scheduler(model, rows=ROWS, max_length=length, **way)
    rows = [
        st.Request(prompt, key=key, temperature=given["temperature"], **own)
        for given in requests
        for prompt, key in zip(given["prompts"], given["key"], strict=True)
    ]
    order = np.random.default_rng(0).permutation(len(rows))
    rows_by_id = {scheduler.submit(rows[row]): row for row in order}
    done = {rows_by_id[each.request_id]: each for each in scheduler.completions()}
    ended = iter([done[row] for row in range(len(rows))])
    for given in requests:
        mine = [*itertools.islice(ended, len(given["prompts"]))]
        tokens = np.full((len(mine), NEW_TOKENS), st.PAD)
        log_probs = np.full(tokens.shape, np.nan, np.float32)
        for row, completion in enumerate(mine):
            new = slice(len(completion.tokens))
            tokens[row, new], log_probs[row, new] = completion.tokens, completion.log_probs
        yield tokens, log_probs, sum(completion.stats.num_target_calls for completion in mine)


class Way(NamedTuple):
    """A way of decoding."""

    method: Method
    processors: tuple[Any, ...] = ()  # which the plain text has too
    decode: Callable[..., Texts] = batches  # or `served`


class Piece(NamedTuple):
    """The subject of a row."""

    weights: str
    family: str
    temperature: float
    method: str


def ways_of(model: st.HybridLM, draft: st.HybridLM) -> list[Way]:
    """Fifteen ways to decode."""
    turns = st.InterleavedDrafter(draft, perturbed(draft, NOISE, 1), "qqss")
    drafter = st.ModelDrafter(draft)
    branching = st.TreeTopology.from_branching((3, 2, 1))
    methods = [
        *trees(drafter, TREES | {"chain of 12": "chain:12"}),
        Method("3 beams of 4", st.BeamDrafter(draft)),
        Method("dynamic tree of 16", st.DynamicDrafter(draft)),
        Method("prompt lookup", st.NgramDrafter(), branching),
        Method("two drafts in turns", turns),
    ]
    if model.partition == ONE_DEVICE:  # heads are not for a mesh
        heads = st.MedusaHeads(model, num_heads=3, rngs=nnx.Rngs(0))
        methods += [Method("Medusa heads", st.MedusaDrafter(model, heads))]
        head = st.MtpDrafter(model, random_mtp_head(model))
        methods += [Method("multi-token prediction", head, branching)]
        block = st.DFlashDrafter(model, random_block_head(model))
        methods += [Method("DFlash 2", block, branching)]
    rules = st.RepetitionPenalty(1.3), random_grammar(model.config.vocab_size)
    return [
        *map(Way, methods),
        Way(Method("penalty and grammar", drafter, branching), rules),
        Way(Method("scheduler", drafter, branching), decode=served),
        Way(Method("auto, at random", drafter, RandomChoice(most=4))),
        Way(Method("scheduler, at random", drafter, RandomChoice(most=4)), decode=served),
    ]


def random_block_head(model: st.HybridLM) -> st.DFlashHead:
    """A DFlash 2 head for a model, with random weights."""
    config = st.DFlashConfig(
        *(model.config.d_model, model.config.vocab_size),
        mask_token=3,
        block_size=5,
        inner_layers=(1, 2),
        attention=st.AttentionConfig(4, 2, 16, qk_norm_eps=1e-6),
        mlp=st.MlpConfig(64),
        windows=(9, None),
        causal=False,
        conv_width=2,
        markov_rank=8,
        candidates=8,
    )
    return st.DFlashHead(config, dtype=model.dtype, rngs=nnx.Rngs(0))


def random_grammar(vocab_size: int) -> st.Automaton:
    """Seven states: half of the tokens are allowed at each, and lead anywhere."""
    rng, shape = np.random.default_rng(0), (7, vocab_size)
    return st.Automaton(np.where(rng.random(shape) < 0.5, rng.integers(7, size=shape), -1))


def request(
    vocab_size: int, temperature: float, number: int, rows: int, tokens: int
) -> dict[str, Any]:
    """Arguments of `generate`: a ragged batch of random prompts, with its own keys."""
    rng = np.random.default_rng(number)
    lengths = itertools.islice(itertools.cycle(PROMPT_LENGTHS), rows)
    return {
        "prompts": [rng.integers(vocab_size, size=size).tolist() for size in lengths],
        "max_new_tokens": tokens,
        "temperature": temperature,
        "key": jax.random.split(jax.random.key(number), rows),
    }


def has_equal_bits(model: st.HybridLM) -> bool:
    """True if a model can be asked for equal bits, with all of these trees."""
    return bits_obstacle(model, 64, ROWS, to_the_bit=True) is None


def compared(
    model: st.HybridLM,
    way: Way,
    requests: Sequence[dict[str, Any]],
    plain: Sequence[tuple[np.ndarray, np.ndarray]],
) -> dict[str, Any]:
    """Counts, and the first difference of each row that differs, over all rounds.

    A row is right if all differences are near ties, of a model that is equal to the bit if there
    are none; `distinct` shows that the model does not repeat itself.
    """
    tokens, calls, emitted, found = 0, 0, 0, []
    to_the_bit = has_equal_bits(model)
    options = {**way.method.way, "processors": way.processors, "to_the_bit": to_the_bit}
    pieces = zip(requests, plain, way.decode(model, requests, options), strict=True)
    for number, (given, (want, of_want), (got, of_got, of_target)) in enumerate(pieces):
        calls, emitted = calls + of_target, emitted + int((got != st.PAD).sum())
        is_same = got == want
        if to_the_bit:
            is_same &= of_got.view(np.int32) == of_want.view(np.int32)
        same = np.cumprod(is_same, axis=1).sum(axis=1)  # up to the first difference
        tokens += int(np.minimum(same + 1, want.shape[1]).sum())
        for row in np.flatnonzero(same < want.shape[1]).tolist():
            request = plan(model, **given, processors=way.processors)
            difference = first_difference(model, request, row, got[row], want[row])
            gap = difference.gap if difference else 0.0  # 0: of log-probabilities
            tie = bool(difference and difference.is_tie) and not to_the_bit
            found.append(dict(round=number, row=row, place=int(same[row]), gap=gap, tie=tie))
    return {
        "tokens": tokens,
        "tau": emitted / calls,
        "distinct": len(np.unique(np.concatenate([want for want, _ in plain]))),
        "differences": found,
        "right": all(difference["tie"] for difference in found),
    }


def made(family: str, weights: str, mesh: Mesh | None) -> tuple[st.HybridLM, st.HybridLM]:
    """A family's model and its draft, with random weights, as loaded on this device or a mesh."""
    dtype = "bfloat16" if weights == "bfloat16" else "float32"
    model = st.HybridLM(FAMILIES[family], dtype=dtype, rngs=nnx.Rngs(0))
    model = model.quantized() if weights == "int8" else model
    if mesh is not None:
        draft = st.shard(perturbed(model, NOISE, 1), mesh, replicate=True)
        return st.shard(model, mesh), draft
    model = model if on_gpu() else model.packed()
    return model, perturbed(model, NOISE, 1)


def work(pieces: Sequence[Piece], rounds: int, mesh: Mesh | None) -> Iterator[dict[str, Any]]:
    """The rows of pieces, those of a family, a type and a temperature together."""
    for (weights, family, temperature), some in itertools.groupby(pieces, lambda piece: piece[:3]):
        (model, draft), size = made(family, weights, mesh), FAMILIES[family].vocab_size
        requests = [request(size, temperature, n, ROWS, NEW_TOKENS) for n in range(rounds)]
        bits = {"to_the_bit": has_equal_bits(model)}
        plain = [found[:2] for found in batches(model, requests, bits)]
        ways = {way.method.name: way for way in ways_of(model, draft)}
        for piece in some:
            way = ways[piece.method]
            rules = bits | {"processors": way.processors}
            ruled = batches(model, requests, rules) if way.processors else plain
            want = [found[:2] for found in ruled]
            began = time.perf_counter()
            row = compared(model, way, requests, want)
            yield piece._asdict() | row | {"seconds": round(time.perf_counter() - began, 2)}
        jax.clear_caches()  # the next family shares no program


def sums(fields: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A record for each value of some fields: tokens, differences, mean taus."""
    records = []
    for values in dict.fromkeys(tuple(row[field] for field in fields) for row in rows):
        named = dict(zip(fields, values, strict=True))
        part = [row for row in rows if named.items() <= row.items()]
        record = named | {"tokens": sum(row["tokens"] for row in part)}
        record |= {"differences": sum(len(row["differences"]) for row in part)}
        taus = [[row["tau"] for row in part if row["temperature"] == t] for t in TEMPERATURES]
        records.append(record | {"tau": [round(float(np.mean(each)), 3) for each in taus if each]})
    return records


def table(field: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """The sums by family or by method."""
    columns = {field: f"{{{field}}}", "tokens": "{tokens:,}", f"tau, T in {TEMPERATURES}": "{tau}"}
    columns |= {"differences": "{differences}"}
    return Table("Against autoregressive decoding", sums([field], rows), columns)


def run(options: argparse.Namespace) -> Iterator[Found]:
    """All ways with all families in all types at both temperatures; goes on after earlier rows."""
    sizes = {"data": options.data, "model": options.model}
    mesh = None if {*sizes.values()} == {1} else st.make_mesh(**sizes)
    methods = [name for name in options.ways if mesh is None or name not in ON_A_DEVICE]
    pieces = [
        Piece(*each)
        for each in itertools.product(options.types, options.families, TEMPERATURES, methods)
    ]
    rounds = math.ceil(options.tokens / (len(pieces) * ROWS * NEW_TOKENS))
    settings = {"rounds": rounds, "rows": ROWS, "new": NEW_TOKENS}
    settings |= {"families": options.families, "types": options.types, "ways": methods, **sizes}
    rows = earlier(options.output, settings)
    done = [Piece(*(row[field] for field in Piece._fields)) for row in rows]
    left = [piece for piece in pieces if piece not in done]
    for row in track(work(left, rounds, mesh), "rows", len(left), transient=True):
        rows.append(row)
        yield found_in(rows, settings)
    if not left:
        yield found_in(rows, settings)


def earlier(directory: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier run with the same settings."""
    for path in directory.glob("lossless-*.json"):
        found = json.loads(path.read_text())
        if found.items() >= settings.items():
            return found.get("work", [])  # not in what was committed
    return []


def found_in(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> Found:
    """The findings of some rows."""
    found = [
        {field: row[field] for field in Piece._fields} | each
        for row in rows
        for each in row["differences"]
    ]
    tokens, seconds = (sum(row[field] for row in rows) for field in ("tokens", "seconds"))
    return Found(
        {**settings, "tokens": tokens, "seconds": round(seconds), "work": rows}
        | {f"by_{field}": sums(("weights", field), rows) for field in ("family", "method")}
        | {"differences": found},
        [table(field, rows) for field in ("weights", "family", "method")],
        wrong=[each for each in found if not each["tie"]],
        line={
            "tokens": tokens,
            "tokens_per_second": round(tokens / seconds),
            "differences": len(found),
        },
    )


if __name__ == "__main__":
    main(run, OPTIONS)
