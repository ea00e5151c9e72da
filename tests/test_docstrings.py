"""Every public method is documented, where it is written or where it is promised."""

import importlib
import inspect
import pkgutil

import stree_jax
from stree_jax.extensions.reasoning.search import Task
from stree_jax.models.layer import Mixer

# What classes are written to without inheriting from it.
PROMISES = (stree_jax.Filter, stree_jax.Rule, Task, Mixer)


def public_classes():
    for found in pkgutil.walk_packages(stree_jax.__path__, "stree_jax."):
        if found.name.endswith(("__main__", "lm_eval")):  # lm_eval needs the harness
            continue
        module = importlib.import_module(found.name)
        for name, value in vars(module).items():
            if inspect.isclass(value) and value.__module__ == found.name and name[0] != "_":
                yield value


def test_public_methods_are_documented():
    """Ruff's D102 would have each override say "See `Drafter`", and hide what it inherits."""
    missing = [
        f"{owner.__module__}.{owner.__name__}.{name}"
        for owner in public_classes()
        for name in vars(owner)
        if name[0] != "_" and inspect.isroutine(getattr(owner, name))
        if not inspect.getdoc(getattr(owner, name))
        if not any(name in vars(promise) for promise in PROMISES)
    ]
    assert not missing
    for promise in PROMISES:
        for name, method in vars(promise).items():
            assert name[0] == "_" or not inspect.isroutine(method) or method.__doc__, name
