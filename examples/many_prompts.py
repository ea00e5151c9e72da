"""Many prompts of different lengths through a few rows, as a server would.

    python examples/many_prompts.py

A request takes the place of one that has ended, with its own limits, temperature and key. Its
text is the one that it has alone, whatever else is running. One text is prefilled once and
continued three times.
"""

import jax
import jax.numpy as jnp

import stree_jax as st

PROMPTS = (
    "Question: Ann has 3 pens.",
    "The train",
    "def add(a, b):",
    "Once upon a time",
    "Question: A bus ticket costs $3. Omar buys 4 tickets every week.",
)


def main() -> None:
    """Serves the prompts, three at a time, and compares each with `generate` of it alone."""
    model = st.from_pretrained(st.demo_path("target"))
    tokenizer = st.load_tokenizer(st.demo_path("target"))
    scheduler = st.Scheduler(model, rows=3, max_length=96, drafter=st.NgramDrafter())
    requests = {}
    for i, text in enumerate(PROMPTS):
        request = st.Request(
            tokenizer.encode(text).ids,
            max_new_tokens=12 + 6 * i,
            temperature=0.8 * (i % 2),
            key=jax.random.key(i),
        )
        requests[scheduler.submit(request)] = request
    for completion in scheduler.completions():
        request = requests[completion.request_id]
        alone = st.generate(
            model,
            [request.prompt],
            max_new_tokens=request.max_new_tokens,
            temperature=request.temperature,
            key=jnp.stack([request.key]),
        )
        same = completion.tokens == alone.tokens[0, : alone.lengths[0]].tolist()
        print(
            f"{completion.request_id}: {len(completion.tokens)} tokens,"
            f" {completion.stats.tau:.2f} tokens per target call, the text it has alone: {same}"
        )

    stem = scheduler.read(tokenizer.encode("Once upon a time there was").ids)
    for seed in range(3):
        key = jax.random.key(seed)
        scheduler.submit(st.Request([], after=stem, max_new_tokens=8, temperature=1.0, key=key))
    for completion in scheduler.completions():
        print("Once upon a time there was", tokenizer.decode(completion.tokens))


if __name__ == "__main__":
    main()
