r"""llama.cpp for `benchmarks.peer`: the embedded models as GGUF files, and decoding with them.

Needs two packages. The second one, which nothing else here needs, builds llama.cpp, whose source it
brings along, for this machine; a C++ compiler must be there (some 10 minutes on 2 cores):

    pip install gguf
    CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TESTS=OFF \
        -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF" \
        pip install --no-binary llama-cpp-python "llama-cpp-python==0.3.36"

Where its products by AMX crash, build it without them, with this before the same command:

    export CFLAGS="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" CXXFLAGS="$CFLAGS"

Each model runs in a process of its own, so a crash costs only what that model was to do.

Tested with that version, which has llama.cpp at 0c1e57098. `versions` in the results say for which
instructions it was built.
"""

import ctypes
import functools
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import stree_jax as st
from benchmarks.common import Worker
from benchmarks.models import Pair
from stree_jax.convert.gguf import TURNED

NAME = "llama.cpp"
INSTALL = "pip install gguf llama-cpp-python, as in the docstring of benchmarks/llama_cpp.py"
PRECISIONS = {"float32": "F32", "bfloat16": "BF16", "8 bits": "Q8_0", "4 bits": "Q4_0"}
DRAFTS = (3, 4)  # its own default, and the chain that we are compared with

Decode = Callable[[list[int]], np.ndarray]  # from a prompt to its new tokens

# The architecture in llama.cpp, and the fields of transformers' config: heads, their size, states,
# groups, width of the convolution, epsilon of the norms.
_HYBRID = (
    "GRANITE_HYBRID mamba_n_heads mamba_d_head mamba_d_state mamba_n_groups mamba_d_conv"
    " rms_norm_eps"
)
LAYOUTS = {
    "mamba2": "MAMBA2 num_heads head_dim state_size n_groups conv_kernel layer_norm_epsilon",
    "bamba": _HYBRID,
    "granitemoehybrid": _HYBRID,
}


def write_gguf(checkpoint: Path, path: Path, precision: str) -> None:
    """Writes a checkpoint in transformers' format as GGUF, without its tokenizer.

    `stree_jax.convert` wrote it: Mamba-2, Bamba, or Granite 4 without experts; others are refused.
    `precision`, a key of `PRECISIONS`, is that of the matrices; the rest is float32, as in files of
    llama.cpp's own converter.
    """
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((checkpoint / "config.json").read_text())
    layout = config["model_type"]
    if layout not in LAYOUTS:
        raise ValueError(f"model_type is {layout!r}; GGUF files are written for {[*LAYOUTS]}")
    name, *fields = LAYOUTS[layout].split()
    architecture = gguf.MODEL_ARCH[name]
    heads, head_dim, state, groups, width, epsilon = (config[field] for field in fields)
    d_model, num_layers = config["hidden_size"], config["num_hidden_layers"]
    rope = config.get("rope_parameters", {"rope_type": "default"})
    for name, value, held in (
        ("time_step_limit", config["time_step_limit"], [0, {"__float__": "Infinity"}]),
        ("n_groups", groups, 1),  # it norms each group by itself, transformers all of them
        ("inner size", heads * head_dim, 2 * d_model),
        ("rope_type", rope["rope_type"], "default"),
        ("num_local_experts", config.get("num_local_experts", 0), 0),
    ):
        if value != held:
            raise ValueError(f"llama.cpp has {name} = {held} here, not {value}")

    facts = {
        "vocab_size": config["vocab_size"],
        "tokenizer_model": "none",  # prompts are tokens
        "block_count": num_layers,
        "context_length": 1 << 20,
        "embedding_length": d_model,
        "feed_forward_length": config.get(
            "shared_intermediate_size", config.get("intermediate_size", 0)
        ),
        "head_count": config.get("num_attention_heads", 0),
        "layer_norm_rms_eps": epsilon,
        "ssm_conv_kernel": width,
        "ssm_inner_size": heads * head_dim,
        "ssm_state_size": state,
        "ssm_time_step_rank": heads,  # its name for the number of heads
        "ssm_group_count": groups,
    }
    size = rotary = 0
    if layout != "mamba2":
        size = d_model // config["num_attention_heads"]
        kv_heads, places = config["num_key_value_heads"], _attention_layers(config)
        turns = config.get("position_embedding_type", "rope") == "rope"
        rotary = size // 2 if layout == "bamba" else size  # which turns half of each head
        facts |= {
            "head_count_kv": [kv_heads * (i in places) for i in range(num_layers)],  # 0: Mamba-2
            "rope_dimension_count": rotary,
            "rope_freq_base": rope["rope_theta"],
            "rope_scaling_finetuned": turns,  # this architecture's switch for RoPE
        }
    if layout == "granitemoehybrid":
        facts |= {
            "embedding_scale": config["embedding_multiplier"],
            "residual_scale": config["residual_multiplier"],
            "attention_scale": config["attention_multiplier"],
            "logit_scale": config["logits_scaling"],
        }
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    if layout == "bamba":  # the converter's order, of all channels, gives other texts in llama.cpp
        writer.add_uint32(TURNED, rotary)
    for name, value in facts.items():
        getattr(writer, f"add_{name}")(value)

    names = gguf.get_tensor_name_map(architecture, num_layers)
    matrices = gguf.GGMLQuantizationType[PRECISIONS[precision]]
    block, _ = gguf.GGML_QUANT_SIZES[matrices]
    shards = map(load_file, sorted(checkpoint.glob("*.safetensors")))
    tensors = itertools.chain.from_iterable(shard.items() for shard in shards)
    for source, tensor in itertools.chain.from_iterable(itertools.starmap(_as_dense, tensors)):
        name = names.get_name(source.replace("dt_bias", "dt_proj.bias"), (".weight", ".bias"))
        in_blocks = tensor.ndim == 2 and tensor.shape[1] % block == 0  # few bits: blocks of 32
        kind = matrices if in_blocks else gguf.GGMLQuantizationType.F32
        tensor = tensor.astype(np.float32)
        match source.split(".")[-2:]:
            case [_, "A_log"]:
                tensor = -np.exp(tensor)[:, None]
            case [_, "D"]:
                tensor = tensor[:, None]
            case ["conv1d", "weight"]:
                tensor = tensor[:, 0]
            case ["norm", "weight"] if "ssm_norm" in name:
                tensor = tensor[None]
            case ["q_proj" | "k_proj", _]:
                tensor = interleaved(tensor, size, rotary)
        writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _attention_layers(config: dict[str, Any]) -> Collection[int]:
    """The numbers of the layers with attention."""
    if "attn_layer_indices" in config:
        return config["attn_layer_indices"]
    return [i for i, kind in enumerate(config["layer_types"]) if kind != "linear_attention"]


def _as_dense(name: str, tensor: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """A tensor under the names of other models: Granite's gate and up projection are one matrix."""
    start, _, part = name.partition("shared_mlp.")
    match part:
        case "input_linear.weight":
            gate, up = np.split(tensor, 2)
            yield f"{start}mlp.gate_proj.weight", gate
            yield f"{start}mlp.up_proj.weight", up
        case "output_linear.weight":
            yield f"{start}mlp.down_proj.weight", tensor
        case _:
            yield name, tensor


def interleaved(weight: np.ndarray, head_dim: int, rotary: int) -> np.ndarray:
    """Rows of queries or keys in llama.cpp's order.

    It turns neighbours together, transformers the two halves: with 4 of 6 channels turned, the
    rows 0 1 2 3 4 5 of a head become 0 2 1 3 4 5. A weight is `[heads * head_dim, d_model]`.
    """
    order = np.arange(head_dim)
    order[:rotary] = order[:rotary].reshape(2, -1).T.ravel()
    return weight.reshape(-1, head_dim, *weight.shape[1:])[:, order].reshape(weight.shape)


def show_error(level: int, text: bytes, _: Any) -> None:
    """Shows messages of llama.cpp that are errors."""
    if level == 4:  # GGML_LOG_LEVEL_ERROR; the Python package still has the numbers of old ones
        sys.stderr.write(text.decode())


class Model:
    """A model that llama.cpp has loaded, and the state of one text."""

    def __init__(self, path: Path, num_places: int, threads: int, *, float32: bool):
        """Loads a GGUF file, mapped into memory, for texts of at most `num_places` tokens.

        With `float32` keys, values and attention are float32, not float16; log-probabilities then
        differ by 6e-6 instead of 7e-4 from ours (embedded target).
        """
        import llama_cpp as api

        self.api, self.log = api, api.llama_log_callback(show_error)
        api.llama_log_set(self.log, None)
        self.model = api.llama_model_load_from_file(
            str(path).encode(), api.llama_model_default_params()
        )
        settings = api.llama_context_default_params()
        settings.n_ctx = settings.n_batch = num_places
        settings.n_threads = settings.n_threads_batch = threads
        if float32:
            settings.type_k = settings.type_v = api.GGML_TYPE_F32
            settings.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = api.llama_init_from_model(self.model, settings)
        if self.context is None:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self.memory = api.llama_get_memory(self.context)
        self.vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(num_places, 0, 1)
        fields = (self.batch.token, self.batch.pos, self.batch.n_seq_id, self.batch.logits)
        self.token, self.place, num_texts, self.wanted = (
            np.ctypeslib.as_array(field, (num_places,)) for field in fields
        )
        num_texts[:] = 1
        for i in range(num_places):
            self.batch.seq_id[i][0] = 0
        self.saved, self.saved_end = (ctypes.c_uint8 * 0)(), 0
        self.samplers: dict[float, Any] = {}  # by temperature

    def clear(self) -> None:
        """Forgets the text."""
        self.api.llama_memory_clear(self.memory, False)

    def read(self, tokens: Sequence[int], place: int, *, every: bool = False) -> list[int]:
        """Reads tokens from a place on; returns the best token after the last, or after each."""
        num, first = len(tokens), 0 if every else len(tokens) - 1
        self.batch.n_tokens = num
        self.token[:num], self.place[:num] = tokens, range(place, place + num)
        self.wanted[:num] = np.arange(num) >= first
        status = self.api.llama_decode(self.context, self.batch)
        assert status == 0, f"llama_decode returned {status}"
        logits = self.api.llama_get_logits(self.context)
        scores = np.ctypeslib.as_array(logits, (num - first, self.vocab_size))
        return scores.argmax(axis=1).tolist()

    def draw(self, temperature: float) -> int:
        """A token after the last one that was read, by llama.cpp's sampler."""
        if temperature not in self.samplers:
            chain = self.api.llama_sampler_chain_init(self.api.llama_sampler_chain_default_params())
            self.api.llama_sampler_chain_add(chain, self.api.llama_sampler_init_temp(temperature))
            self.api.llama_sampler_chain_add(chain, self.api.llama_sampler_init_dist(0))
            self.samplers[temperature] = chain
        return self.api.llama_sampler_sample(self.samplers[temperature], self.context, -1)

    def save(self, place: int) -> None:
        """Copies the recurrent states of a text that ends before `place`."""
        flags = self.api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        size = self.api.llama_state_seq_get_size_ext(self.context, 0, flags)
        if size != len(self.saved):
            self.saved = (ctypes.c_uint8 * size)()
        copied = self.api.llama_state_seq_get_data_ext(self.context, self.saved, size, 0, flags)
        assert copied == size
        self.saved_end = place

    def restore(self) -> None:
        """Goes back to where `save` was, which also drops later keys and values."""
        flags, size = self.api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY, len(self.saved)
        copied = self.api.llama_state_seq_set_data_ext(self.context, self.saved, size, 0, flags)
        assert copied == size
        removed = self.api.llama_memory_seq_rm(self.memory, 0, self.saved_end, -1)
        assert removed


def plain(
    model: Model, prompt: list[int], *, temperature: float, tokens: int, eos: int | None
) -> np.ndarray:
    """Decoding a token at a time; above temperature 0 its own sampler draws the tokens."""
    model.clear()
    best, text = model.read(prompt, 0), [*prompt]
    while True:
        text += [model.draw(temperature)] if temperature else best
        if len(text) == len(prompt) + tokens or text[-1] == eos:
            return np.array(text[len(prompt) :])
        best = model.read(text[-1:], len(text) - 1)


def drafted(
    target: Model, draft: Model, prompt: list[int], *, num_drafts: int, tokens: int, eos: int | None
) -> np.ndarray:
    """Greedy decoding with its own speculation, as `examples/speculative-simple` does it.

    llama.cpp cannot go back by some tokens in the states of the architectures "mamba2" and
    "granitehybrid" (the snapshots of each token, `n_rs_seq`, are for other ones and other drafts).
    Its tools save the states before each draft. If a part of a draft is rejected they restore them,
    and read the accepted part and the target's own token again as the next draft. So a rejection
    costs a second call of the target, which mostly gives one more token. The draft model reads
    what the target read once more, in one call.
    """
    for model in (target, draft):
        model.clear()
        model.read(prompt[:-1], 0)
    text, drafts, end = [*prompt], list[int](), len(prompt) + tokens
    while len(text) < end and eos not in text[len(prompt) :]:
        place = len(text) - 1
        if not drafts:
            draft.save(place)
            token = text[-1:]
            for i in range(min(num_drafts, end - len(text) - 1)):
                token = draft.read(token, place + i)
                drafts += token
            target.save(place)
            draft.restore()
        best = target.read([text[-1], *drafts], place, every=True)
        draft.read([text[-1], *drafts], place)
        accepted = next((i for i, token in enumerate(drafts) if token != best[i]), len(drafts))
        if accepted < len(drafts):
            drafts = best[: accepted + 1]
            target.restore()
            draft.restore()
        else:
            text += best
            drafts = []
    new = text[len(prompt) :]
    return np.array(new[: new.index(eos) + 1] if eos in new else new)


def load(files: Sequence[Path], num_places: int, threads: int, float32: bool) -> list[Model]:
    """The models of GGUF files, for texts of at most `num_places` tokens."""
    return [Model(path, num_places, threads, float32=float32) for path in files]


def loaded(
    writes: Sequence[Callable[[Path], Any]], precision: str, num_places: int, threads: int
) -> Worker:
    """A worker with models in llama.cpp, of checkpoints in transformers' format.

    Each of `writes` makes one.
    """
    with tempfile.TemporaryDirectory() as directory:
        files = []
        for number, write in enumerate(writes):
            checkpoint, path = Path(directory) / f"{number}", Path(directory) / f"{number}.gguf"
            write(checkpoint)
            write_gguf(checkpoint, path, precision)
            files.append(path)
        return Worker(load, files, num_places, threads, precision == "float32")


def read_repeatedly(model: Model, size: int, count: int) -> None:
    """As many calls, one after the other, that read so many tokens each."""
    model.clear()
    for number in range(count):
        model.read([0] * size, number * size, every=True)


def calls(
    model: st.HybridLM, precision: str, threads: int, count: int, sizes: Sequence[int]
) -> dict[int, Callable[[], None]]:
    """By number of tokens, `count` calls that read as many. Each has run once."""
    from stree_jax.convert.writing import write_as

    def write(checkpoint: Path) -> None:
        checkpoint.mkdir()
        write_as(model, checkpoint, "hf")

    worker = loaded([write], precision, count * max(sizes), threads)
    reads = {size: functools.partial(worker.run, read_repeatedly, size, count) for size in sizes}
    for read in reads.values():
        read()
    return reads


def decoders(
    pair: Pair, temperatures: Collection[float], tokens: int, threads: int
) -> tuple[dict[float, dict[str, Decode]], dict[str, Any]]:
    """Decoding of the embedded pair by llama.cpp, by temperature, and the versions.

    Its own speculation is compared at temperature 0 only. Each way decodes the first prompt before
    it counts: one that crashes is left out, with a line. An ImportError names a missing package.
    """
    import gguf  # noqa: F401  both are missed before anything is made
    import llama_cpp

    from stree_jax.convert import convert

    writes = [
        functools.partial(convert, st.demo_path(name), dtype="float32", to="hf")
        for name in ("target", "draft")
    ]
    built = llama_cpp.llama_print_system_info().decode()
    versions = {"llama-cpp-python": llama_cpp.__version__, "llama.cpp was built with": built}
    ways: dict[float, dict[str, Decode]] = {temperature: {} for temperature in temperatures}
    how: dict[str, Any] = {"tokens": tokens, "eos": pair.target.config.eos_token}
    most = max(map(len, pair.prompts)) + tokens

    def add(precision: str, parts: Any, of_ways: dict[tuple[float, str], Any]) -> None:
        """Ways that decode with these models: functions of them, by temperature and name."""
        try:
            worker = loaded(parts, precision, most, threads)
            for (temperature, name), function in of_ways.items():
                decode = functools.partial(worker.run, function, **how)
                decode(pair.prompts[0])
                ways[temperature][name] = decode
        except RuntimeError as error:
            print(f"{', '.join(name for _, name in of_ways)}: left out, {error}")

    for precision in PRECISIONS:
        name = name_of(precision)
        plainly = {(at, name): functools.partial(plain, temperature=at) for at in temperatures}
        add(precision, writes[:1], plainly)
    if 0 in ways:
        drafting = {num: functools.partial(drafted, num_drafts=num) for num in DRAFTS}
        named = {(0, f"{NAME}, chain of {num}"): decode for num, decode in drafting.items()}
        add("float32", writes, named)
    return ways, versions


def name_of(precision: str) -> str:
    """What tables call its plain decoding in a type."""
    return NAME if precision == "float32" else f"{NAME}, {precision}"
