"""LoRA adapters as PEFT writes them, with random matrices."""

import json

import numpy as np

from tests.convert.checkpoints import write_safetensors

TUNED = {
    "peft_type": "LORA",
    "r": 3,
    "lora_alpha": 5,
    "target_modules": ["in_proj", "out_proj"],
    "bias": "none",
    "lora_dropout": 0.1,
    "fan_in_fan_out": False,
    "use_dora": False,
    "layer_replication": None,
    "base_model_name_or_path": "org/base",
}


def pairs(weights, *modules, rank=3, prefix="base_model.model.", renamed=lambda name: name):
    """Random pairs of matrices for modules of these weights, by PEFT's names."""
    rng, found = np.random.default_rng(7), {}
    for module in modules:
        rows, columns = weights[f"{module}.weight"].shape
        for half, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            name = f"{prefix}{renamed(module)}.lora_{half}.weight"
            found[name] = rng.normal(size=shape).astype(np.float32)
    return found


def written(path, tensors, name="adapter_model.safetensors", **changes):
    """An adapter's directory."""
    write_safetensors(path, {}, tensors, name)
    (path / "config.json").unlink()
    values = {key: value for key, value in (TUNED | changes).items() if value is not ...}
    (path / "adapter_config.json").write_text(json.dumps(values))
    return path
