"""Keywords that a function does not have, and what they are called here."""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

from stree_jax.messages import shown

__all__ = ["check_keywords", "explained"]  # what an extension may use

_Made = TypeVar("_Made")
# What other libraries call an argument, and how it is given here.
_HERE = {
    **dict.fromkeys(("tree", "draft_tree"), "topology"),
    **dict.fromkeys(("seed", "rng", "random_seed"), "key=jax.random.key(seed)"),
    **dict.fromkeys(("draft", "draft_model", "assistant_model"), "drafter"),
    **dict.fromkeys(("max_tokens", "num_tokens", "new_tokens"), "max_new_tokens"),
    **dict.fromkeys(("max_seq_len", "max_model_len", "context_length"), "max_length"),
    **dict.fromkeys(("torch_dtype", "param_dtype"), "dtype"),
    **dict.fromkeys(("input_ids", "inputs"), "prompts"),
    **dict.fromkeys(("eos_token_id", "end_token"), "eos_token"),
    **dict.fromkeys(("num_return_sequences", "num_samples"), "n"),
    **dict.fromkeys(("stop_strings", "stop_sequences"), "stop"),
    **dict.fromkeys(("logprobs", "return_log_probs"), "log_probs"),
    **dict.fromkeys(("batch_size", "max_num_seqs"), "rows"),
    **dict.fromkeys(("device_map", "tensor_parallel_size"), "mesh=st.make_mesh(model=2)"),
    **dict.fromkeys(("load_in_8bit", "quantization"), 'quantize="int8"'),
    "do_sample": "temperature=1.0",
    "logits_processor": "processors",
    "repetition_penalty": "processors=[st.RepetitionPenalty(1.2)]",
    "presence_penalty": "processors=[st.PresencePenalty(0.5)]",
    "frequency_penalty": "processors=[st.FrequencyPenalty(0.5)]",
    "logit_bias": "processors=[st.LogitBias({7: -2.0})]",
}


def explained(more: Iterable[str] = ()) -> Callable[[_Made], _Made]:
    """Decorates a function or a class, whose unknown keywords are refused with what they are here.

    Args:
        more: names of keywords that its signature does not have.
    """

    def decorated(made: Any) -> Any:
        is_class = isinstance(made, type)
        function = made.__init__ if is_class else made
        parameters = inspect.signature(function).parameters.values()
        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        known = {each.name for each in parameters if each.kind in kinds} - {"self"} | {*more}

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            check_keywords(made.__name__, keywords, known)
            return function(*arguments, **keywords)

        if is_class:
            made.__init__ = call
        return made if is_class else call

    return decorated


def check_keywords(function: str, keywords: Iterable[str], known: Collection[str]) -> None:
    """Refuses keywords that are not known.

    Raises:
        TypeError: there is one. The message has its name here, or the nearest one, or all.
    """
    for name in keywords:
        if name in known:
            continue
        here = _HERE.get(name, "")
        if (found := re.match(r"\w+", here)) and found[0] in known:
            way_out = f": it is {here}"
        elif near := difflib.get_close_matches(name, known, n=1, cutoff=0.75):
            way_out = f"; did you mean {near[0]!r}?"
        else:
            way_out = f"; known: {', '.join(sorted(known))}"
        raise TypeError(
            f"{function}() got an unexpected keyword argument; there is no option"
            f" {shown(name)}{way_out}"
        )
