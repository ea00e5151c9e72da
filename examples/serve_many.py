"""Many clients of one scheduler, in asyncio: texts arrive in pieces, and clients may leave.

    python examples/serve_many.py

One task decodes, in a thread, and hands each event to its client. The lock keeps all others away
from the scheduler meanwhile, for at most one quantum. A client that leaves cancels its request.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import jax
import jax.numpy as jnp

import stree_jax as st

# What each client asks, and after how many tokens it leaves.
CLIENTS = (
    ("Question: Ann has 3 pens.", 99),
    ("The train", 5),
    ("def add(a, b):", 99),
    ("Once upon a time", 9),
)


class Server:
    """Streams requests from a scheduler."""

    def __init__(self, scheduler: st.Scheduler):
        self._scheduler = scheduler
        self._lock = asyncio.Lock()
        self._has_work = asyncio.Event()
        self._clients: dict[int, asyncio.Queue] = {}

    async def run(self) -> None:
        """Decodes until it is cancelled."""
        while await self._has_work.wait():
            async with self._lock:
                event = await asyncio.to_thread(next, self._scheduler.events(), None)
                if event is None:
                    self._has_work.clear()
                    continue
                completion = None
                if event.finish_reason:
                    completion = self._scheduler.pop(event.request_id)
            if client := self._clients.get(event.request_id):
                client.put_nowait((event.tokens, completion))

    async def stream(
        self, request: st.Request
    ) -> AsyncGenerator[tuple[list[int], st.Completion | None], None]:
        """Yields new tokens and None, and at the end the last ones and the completion."""
        async with self._lock:
            request_id = self._scheduler.submit(request)
            events = self._clients[request_id] = asyncio.Queue()
            self._has_work.set()
        completion = None
        try:
            while completion is None:
                tokens, completion = await events.get()
                yield tokens, completion
        finally:
            del self._clients[request_id]
            if completion is None:
                async with self._lock:
                    with contextlib.suppress(ValueError):  # it has just ended
                        self._scheduler.cancel(request_id)


async def ask(server: Server, request: st.Request, most: int) -> tuple[list[int], str]:
    """Listens until the text ends or has `most` tokens."""
    tokens: list[int] = []
    async with contextlib.aclosing(server.stream(request)) as events:
        async for new, completion in events:
            tokens += new
            if completion is not None:
                return tokens, f"ended, {completion.stats.tau:.2f} tokens per target call"
            if len(tokens) >= most:
                break
    return tokens, "left"


async def serve(model: st.HybridLM, requests: list[st.Request]) -> list[tuple[list[int], str]]:
    """Asks all at once."""
    drafter = st.NgramDrafter()
    server = Server(st.Scheduler(model, rows=2, max_length=96, drafter=drafter, quantum=3))
    async with asyncio.TaskGroup() as tasks:
        decoding = tasks.create_task(server.run())
        asked = [
            ask(server, request, most) for request, (_, most) in zip(requests, CLIENTS, strict=True)
        ]
        answers = await asyncio.gather(*asked)
        decoding.cancel()
    return answers


def main() -> None:
    """Serves the clients, and compares each text with `generate` of its prompt alone."""
    model = st.from_pretrained(st.demo_path("target"))
    tokenizer = st.load_tokenizer(st.demo_path("target"))
    requests = [
        st.Request(tokenizer.encode(text).ids, max_new_tokens=24, temperature=0.8, key=i)
        for i, (text, _) in enumerate(CLIENTS)
    ]
    answers = asyncio.run(serve(model, requests))
    alone = st.generate(
        model,
        [request.prompt for request in requests],
        max_new_tokens=24,
        temperature=0.8,
        key=jnp.stack([jax.random.key(i) for i in range(len(requests))]),
    )
    for i, (tokens, how) in enumerate(answers):
        same = tokens == alone.tokens[i, : len(tokens)].tolist()
        print(f"{i}: {len(tokens)} tokens, {how}, the text it has alone: {same}")


if __name__ == "__main__":
    main()
