"""What a directory has instead of a checkpoint, and the way out, for messages."""

import re
from collections.abc import Sequence
from pathlib import Path

from stree_jax.checkpoint.files import entries, folders_with, has_file, read_json
from stree_jax.messages import shown, shown_path

ADAPTER = "adapter_config.json"

_ORIGINAL = "is not read: take the original, in safetensors"
_TORCH = "is not read: if it is a state dict, load it with torch and save it as model.safetensors"
# Weights in other formats, by their suffix.
_OTHERS = {
    **dict.fromkeys((".onnx", ".h5", ".msgpack", ".nemo", ".distcp"), _ORIGINAL),
    **dict.fromkeys((".pt", ".pth", ".ckpt"), _TORCH),
}
_OF_TRAINING = ("optimizer", "scheduler", "rng_state", "scaler", "training_args")
_SHARD = re.compile(r"(.+)-\d+-of-\d+(\.safetensors|\.bin)")


def refuse_adapter(directory: Path) -> None:
    """Refuses an adapter: changes of another model's weights.

    Raises:
        ValueError: it is one; names the model that it changes, if its config does.
    """
    file = directory / ADAPTER
    if not has_file(file):
        return
    base = read_json(file).get("base_model_name_or_path")
    of, name = ("its model", "MODEL") if base is None else (f"the model {shown(base)}", shown(base))
    raise ValueError(
        f"{directory} has an adapter (PEFT, such as LoRA) for {of}: load that with the adapter,"
        f" from_pretrained({name}, adapter='{shown_path(directory)}'), on the command line"
        f" --adapter; if the weights here are merged already, remove {ADAPTER}"
    )


def instead(directory: Path, configs: Sequence[str], weights: Sequence[str]) -> str:
    """The end of a message about a directory without a config, or with one and without weights.

    Args:
        directory: the directory.
        configs, weights: names of files, of which one is expected.
    """
    found = entries(directory)
    if not found:
        return "; it is empty"
    if "model_index.json" in found:
        return "; it is a pipeline of diffusers, and no language model"
    if inside := folders_with(directory, configs):
        return f"; give its folder {shown(inside[-1])}, which has one"
    for match in filter(None, map(_SHARD.fullmatch, found)):
        if (whole := match[1] + match[2]) in weights:
            return (
                f"; it has shards such as {shown(match[0])}: get their index {whole}.index.json too"
            )
    for name in found:
        suffix = Path(name).suffix
        if name.startswith(_OF_TRAINING):
            continue
        if suffix in _OTHERS:
            return f"; {shown(name)} {_OTHERS[suffix]}"
        if suffix in (".safetensors", ".bin") and {*configs}.isdisjoint(found):
            return f"; it has {shown(name)}: get the config.json that belongs to it"
        if named := [each for each in weights if each.endswith(suffix) and suffix]:
            return f"; if {shown(name)} has all of them, name it {named[0]}"
    return ""
