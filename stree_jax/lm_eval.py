"""A model of lm-evaluation-harness: `python -m stree_jax.lm_eval --model stree-jax --tasks ...`."""

import contextlib
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
from stree_jax.decoding.prompts import MAX_TOKENS, typed_key
from stree_jax.decoding.score import scored
from stree_jax.loading import WORDS, load
from stree_jax.messages import shown

# Words of `gen_kwargs`, beside the harness's own.
_GENERATION = {
    *("eos_token", "json_schema", "min_new_tokens", "min_p", "regex", "temperature"),
    *("top_k", "top_p"),
}
_HERE = "\0here\0 "  # no template has it; the space is gone where contents are trimmed


def _check_names(argument: str, values: dict[str, Any], known: set[str]) -> None:
    if unknown := values.keys() - known:
        raise ValueError(f"{argument} has {sorted(unknown)} (commas need JSON), of {sorted(known)}")


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
        max_length: most tokens of a text, context included; None: the model's.
        seed: the key of sampled texts.
        **words: what is loaded, as by `stree-jax generate`, such as draft, tree or quantize.
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
        max_length: int | None = None,
        seed: int = 0,
        **words: Any,
    ):
        super().__init__()
        _check_names("model_args", words, WORDS - {"distributed", "lossy"})
        self.batch_size = check_int("batch_size", 8 if batch_size == "auto" else int(batch_size), 1)
        self._loaded = load(str(pretrained), **words)
        self._model, self._texts = self._loaded.model, self._loaded.texts
        self.max_length = max_length or self._model.config.max_length or MAX_TOKENS
        self.max_gen_toks, self._variables = max_gen_toks, chat_template_args or {}
        self._key = typed_key(seed)
        self.tokenizer_name = str(words.get("tokenizer") or pretrained).replace("/", "__")

    @property
    def prefix_token_id(self) -> int:
        named = map(self._texts.special_token, ("bos_token", "eos_token"))
        ends = self._texts.end_tokens(self._model.config)
        for token in (*named, *ends):
            if token is not None:
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
        *earlier, last = chat_history  # which goes on
        history = [*earlier, last | {"content": last["content"] + _HERE}]
        text = template.render(history, **self._variables | {"add_generation_prompt": False})
        prompt, mark, end = text.rpartition(_HERE.strip())
        if not mark or last["content"].strip() not in prompt:
            raise ValueError("the chat template does not write the last message, which goes on")
        return prompt if end.startswith(" ") else prompt.rstrip()

    def tok_encode(self, string: str, add_special_tokens: Any = None, **_: Any) -> list[int]:
        special = add_special_tokens is not False
        return self._texts.tokens(string, special=special) if string else []

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        continued = [request for request in requests if request.args[1]]
        answers = iter(super().loglikelihood(continued, disable_tqdm=disable_tqdm))
        return [next(answers) if request.args[1] else (0.0, True) for request in requests]

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, **_: Any) -> Any:
        pieces = [(args, [pair]) for args, *pair in requests]
        return self._scored("loglikelihood", pieces, lambda *answer: answer, disable_tqdm)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        windowed = []
        for args in (request.args for request in requests):
            tokens, first = self.tok_encode(args[0]), self.prefix_token_id
            windows = get_rolling_token_windows(tokens, first, self.max_length, 1)
            windowed.append((args, [*map(make_disjoint_window, windows)]))
        kind = "loglikelihood_rolling"
        return self._scored(kind, windowed, lambda total, _: total, disable_tqdm)

    def _scored(self, kind: str, requests: Sequence[Any], answer: Any, disable_tqdm: bool) -> Any:
        """Answers requests: the arguments of each, and its pairs of a context and what follows.

        `answer` makes an answer of the sum of log-probabilities, and of whether all tokens are the
        best.
        """
        pairs = [(number, *pair) for number, (_, pairs) in enumerate(requests) for pair in pairs]
        lengths = [len(after) for *_, after in pairs]
        for (number, *_), length in zip(pairs, lengths, strict=True):
            with _named(requests[number][0][0]):
                check_int("tokens of a continuation", length, 1, self.max_length)
        texts = [self._cut([*before, *after], self.max_length + 1) for _, before, after in pairs]
        rows = scored(self._model, texts, self.batch_size) if texts else iter(())
        num_left = [len(pairs) for _, pairs in requests]
        totals, are_best = [0.0] * len(requests), [True] * len(requests)
        for i, *row in tqdm(rows, "scoring", len(texts), disable=disable_tqdm):
            number, (log_probs, is_best) = pairs[i][0], (values[-lengths[i] :] for values in row)
            totals[number] += float(log_probs.sum())
            are_best[number] &= bool(is_best.all())
            num_left[number] -= 1
            if not num_left[number]:
                result = answer(totals[number], are_best[number])
                self.cache_hook.add_partial(kind, requests[number][0], result)
        return [*map(answer, totals, are_best)]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        texts = [""] * len(requests)
        decoded = self._decoded([request.args for request in requests])
        for number, text in tqdm(decoded, "decoding", len(requests), disable=disable_tqdm):
            texts[number] = text
            self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return texts

    def _decoded(self, arguments: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[Any]:
        """Yields the number and the text of each request, the longest contexts first."""
        waiting: list[tuple[int, st.Request]] = []
        for number, (context, options) in enumerate(arguments):
            with _named(context):
                waiting.append((number, self._request(number, context, options)))
        if not waiting:
            return
        waiting.sort(key=lambda pair: -len(pair[1].prompt))
        shards = self._model.partition.rows
        scheduler = st.Scheduler(
            self._model,
            rows=-(-min(self.batch_size, len(waiting)) // shards) * shards,
            max_length=max(len(r.prompt) + r.max_new_tokens for _, r in waiting),
            **self._loaded.way,
        )
        numbers = {}
        for number, request in waiting:
            with _named(arguments[number][0]):
                numbers[scheduler.submit(request)] = number
        for completion in scheduler.completions():
            number = numbers[completion.request_id]
            with _named(arguments[number][0]):
                require(not completion.error, str(completion.error))
            text, reason = completion.text or "", completion.finish_reason
            yield number, self._texts.without_end(text, completion.tokens, reason)

    def _request(self, number: int, context: str, gen_kwargs: dict[str, Any]) -> st.Request:
        options: dict[str, Any] = {**normalize_gen_kwargs(gen_kwargs, self.max_gen_toks)}
        del options["do_sample"]  # which the temperature says too
        stops = [stop for stop in options.pop("until") if stop is not None]
        require("" not in stops, "until has an empty text, which ends nothing; leave it out")
        most = check_int("max_gen_toks", options.pop("max_gen_toks"), 1, self.max_length - 1)
        _check_names("gen_kwargs", options, _GENERATION)
        context_tokens = self.tok_encode(context) or [self.prefix_token_id]
        return st.Request(
            self._cut(context_tokens, self.max_length - most),
            max_new_tokens=most,
            stop=stops,
            key=jax.random.fold_in(self._key, number),
            tokenizer=self._texts.tokenizer(""),
            **self._loaded.options(options),
        )

    def _cut(self, tokens: list[int], most: int) -> list[int]:
        if len(tokens) > most:
            logging.warning("a context of %d tokens was cut to the last %d", len(tokens), most)
        return tokens[-most:]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
