"""A model of lm-evaluation-harness: `python -m stree_jax.lm_eval --model stree-jax --tasks ...`."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

import stree_jax as st
from stree_jax.checks import check_int, require
from stree_jax.cli.batch import Line, decoded
from stree_jax.cli.loading import load
from stree_jax.cli.options import Generate, TextOptions, wanted
from stree_jax.decoding.prompts import MAX_TOKENS, typed_key
from stree_jax.decoding.score import scored
from stree_jax.messages import shown

_ALL = {field.name for field in dataclasses.fields(Generate)}
_TEXT = {field.name for field in dataclasses.fields(TextOptions)}
_OTHER = {"checkpoint", "prompt", "prompts", "output", "rows", "show", "lossy", "distributed"}
_HERE = "\0here\0 "  # no template has it; the space is gone where contents are trimmed


def _check_names(of: str, given: dict[str, Any], known: set[str]) -> None:
    if unknown := given.keys() - known:
        raise ValueError(f"{of} has {sorted(unknown)} (commas need JSON), of {sorted(known)}")


@contextlib.contextmanager
def _named(context: str) -> Iterator[None]:
    """Gives an error the name of a request: the end of its context, as many begin alike."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"the request that ends in {context[-60:]!r}: {error}") from None


@register_model("stree-jax")
class StreeJax(TemplateLM):
    """A checkpoint, and what drafts for it, as a model of the harness.

    Contexts that are too long are cut on the left, as the harness's own models do.

    Args:
        pretrained: a checkpoint directory, GGUF file or hub name.
        batch_size: texts that are read or decoded at the same time; "auto": 8.
        max_gen_toks: most new tokens, where a task does not say.
        chat_template_args: variables of the chat template.
        **options: those of `stree-jax generate`, such as draft, tree, quantize, max_length or seed.
    """

    tokenizer_name = ""

    def __init__(
        self,
        pretrained: str,
        *,
        batch_size: int | str = 8,
        max_batch_size: Any = None,  # this and `device` are the harness's
        device: Any = None,
        max_gen_toks: int = 256,
        chat_template_args: dict[str, Any] | None = None,
        **options: Any,
    ):
        super().__init__()
        _check_names("model_args", options, _ALL - _TEXT - _OTHER)
        command = Generate.of(str(pretrained), **options)
        self.batch_size = check_int("batch_size", 8 if batch_size == "auto" else int(batch_size), 1)
        self._command, self._loaded = command, load(command)
        self._model, self._texts = self._loaded.model, self._loaded.texts
        self.max_length = command.max_length or self._model.config.max_length or MAX_TOKENS
        self.max_gen_toks, self._variables = max_gen_toks, chat_template_args or {}
        self.tokenizer_name = str(command.tokenizer or pretrained).replace("/", "__")

    @property
    def prefix_token_id(self) -> int:
        named = map(self._texts.special_token, ("bos_token", "eos_token"))
        ends = self._texts.end_tokens(self._model.config)
        for token in (each for each in (*named, *ends) if each is not None):
            return token
        raise ValueError("a text has no context, and the checkpoint names no token to put before")

    eot_token_id = prefix_token_id  # which the harness has no other use for

    def chat_template(self, chat_template: bool | str = False) -> str:
        if chat_template not in (True, False, "default"):
            raise ValueError(f"chat template {shown(chat_template)}: there is the default one only")
        return self._texts.template().source if chat_template else ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        template = self._texts.template()
        if add_generation_prompt:
            return template.render(chat_history, **self._variables)
        *before, last = chat_history  # which goes on
        history = [*before, last | {"content": last["content"] + _HERE}]
        text = template.render(history, **self._variables | {"add_generation_prompt": False})
        before_it, mark, after_it = text.rpartition(_HERE.strip())
        if not mark or last["content"].strip() not in before_it:
            raise ValueError("the chat template does not write the last message, which goes on")
        return before_it if after_it.startswith(" ") else before_it.rstrip()

    def tok_encode(self, string: str, add_special_tokens: Any = None, **_: Any) -> list[int]:
        special = add_special_tokens is not False
        return self._texts.tokens(string, special=special) if string else []

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        asked = [request for request in requests if request.args[1]]
        found = iter(super().loglikelihood(asked, disable_tqdm=disable_tqdm))
        return [next(found) if request.args[1] else (0.0, True) for request in requests]

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, **_: Any) -> Any:
        asked = [(args, [pair]) for args, *pair in requests]
        return self._scored("loglikelihood", asked, lambda *answer: answer, disable_tqdm)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        asked = []
        for args in (request.args for request in requests):
            tokens, first = self.tok_encode(args[0]), self.prefix_token_id
            windows = get_rolling_token_windows(tokens, first, self.max_length, 1)
            asked.append((args, [*map(make_disjoint_window, windows)]))
        return self._scored("loglikelihood_rolling", asked, lambda total, _: total, disable_tqdm)

    def _scored(self, kind: str, asked: Sequence[Any], answer: Any, disable_tqdm: bool) -> Any:
        """Answers requests, each with pairs of a context and what continues it."""
        pairs = [(number, *pair) for number, (_, own) in enumerate(asked) for pair in own]
        lengths = [len(after) for *_, after in pairs]
        for (number, *_), length in zip(pairs, lengths, strict=True):
            with _named(asked[number][0][0]):
                check_int("tokens of a continuation", length, 1, self.max_length)
        texts = [self._cut([*before, *after], self.max_length + 1) for _, before, after in pairs]
        rows = scored(self._model, texts, self.batch_size) if texts else iter(())
        left = [len(own) for _, own in asked]
        totals, are_best = [0.0] * len(asked), [True] * len(asked)
        for i, *row in tqdm(rows, "scoring", len(texts), disable=disable_tqdm):
            number, (log_probs, is_best) = pairs[i][0], (values[-lengths[i] :] for values in row)
            totals[number] += float(log_probs.sum())
            are_best[number] &= bool(is_best.all())
            left[number] -= 1
            if not left[number]:
                found = answer(totals[number], are_best[number])
                self.cache_hook.add_partial(kind, asked[number][0], found)
        return [*map(answer, totals, are_best)]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        every = enumerate(request.args for request in requests)
        lines = []
        for number, args in every:
            with _named(args[0]):
                lines.append(Line(number, {}, [self._request(number, *args)]))
        lines.sort(key=lambda line: len(line.requests[0].prompt), reverse=True)
        found = [""] * len(lines)
        texts = decoded(self._loaded, self._command, lines, self.batch_size)
        for line, new, error in tqdm(texts, "decoding", len(lines), disable=disable_tqdm):
            number, args = line.number, requests[line.number].args
            with _named(args[0]):
                require(not error, error)
            text, tokens, reason = new[0].text or "", new[0].tokens, new[0].finish_reason
            found[number] = self._texts.without_end(text, tokens, reason)
            self.cache_hook.add_partial("generate_until", args, found[number])
        return found

    def _request(self, number: int, context: str, given: dict[str, Any]) -> st.Request:
        own: dict[str, Any] = {**normalize_gen_kwargs(given, self.max_gen_toks)}
        del own["do_sample"]  # which the temperature says too
        stops = [stop for stop in own.pop("until") if stop is not None]
        require("" not in stops, "until has an empty text, which ends nothing; leave it out")
        most = check_int("max_gen_toks", own.pop("max_gen_toks"), 1, self.max_length - 1)
        _check_names("gen_kwargs", own, _TEXT - {"max_new_tokens", "stop", "n", "bos", "log_probs"})
        asked = wanted(self._command.settings(), own | {"max_new_tokens": most, "stop": stops})
        return st.Request(
            self._cut(self.tok_encode(context) or [self.prefix_token_id], self.max_length - most),
            key=jax.random.fold_in(typed_key(self._command.seed), number),
            tokenizer=self._texts.tokenizer(""),
            **self._loaded.options(asked),
        )

    def _cut(self, tokens: list[int], most: int) -> list[int]:
        if len(tokens) > most:
            logging.warning("a context of %d tokens was cut to the last %d", len(tokens), most)
        return tokens[-most:]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
