"""What was measured of one way of decoding, as a typed record."""

import dataclasses
from typing import Any

from stree_jax.measuring.clock import Quartiles

_OF_CATEGORIES = "by_category", "mean_of_categories"


@dataclasses.dataclass(frozen=True)
class Record:
    """What one way of decoding reached at one temperature; `record["tau"]` is `record.tau`.

    Quartiles are dicts with "low", "median" and "high", over the rounds. None is what was not
    measured.

    Attributes:
        method: the name of the way.
        temperature: the temperature of the texts.
        rows: texts decoded at the same time.
        nodes: nodes of the tree, root included.
        tau: tokens per call of the target, its own token counted.
        tau_by_prompt: `tau` of each batch of prompts.
        accepted_per_call: drafts that were emitted, per call of the target.
        accepted_per_depth: of all calls, the share that accepted d drafts or more, from d = 1 on.
        accepted_of_reached: of the calls that could accept a d-th draft, the share that did.
        calls_by_tree: with `topology="auto"`, calls with each tree, by its name.
        identical: whether all tokens are those without drafts.
        seconds_by_prompt: seconds of each batch of prompts, median of the rounds.
        tokens_per_second: quartiles of new tokens by the time of whole texts.
        tokens_per_second_by_round: the same for each round.
        speed_up: quartiles of the speed relative to no drafts in the same round.
        milliseconds_of_call: quartiles of the time of a call of the target after the first.
        milliseconds_to_first_token: quartiles of the time to read a prompt and make one step.
        draft_share: quartiles of the drafter's part of the time of a call, from 0 to 1.
        memory_bytes: bytes of the compiled loop, on one device.
        by_category: a record for each category; empty if prompts have none.
        mean_of_categories: means of `tau`, `accepted_per_call`, `tokens_per_second` and `speed_up`
            over the categories, each of which counts the same.
    """

    method: str
    temperature: float
    rows: int
    nodes: int
    tau: float
    tau_by_prompt: list[float]
    accepted_per_call: float
    accepted_per_depth: list[float]
    accepted_of_reached: list[float | None]
    calls_by_tree: dict[str, int] | None
    identical: bool | None
    seconds_by_prompt: list[float]
    tokens_per_second: Quartiles
    tokens_per_second_by_round: list[float]
    speed_up: Quartiles
    milliseconds_of_call: Quartiles | None
    milliseconds_to_first_token: Quartiles | None
    draft_share: Quartiles | None
    memory_bytes: int | None
    by_category: dict[str, "Record"] = dataclasses.field(default_factory=dict)
    mean_of_categories: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __getitem__(self, field: str) -> Any:
        return getattr(self, field)

    def to_dict(self) -> dict[str, Any]:
        """The fields, as JSON can hold them; without categories, none about these."""
        return dataclasses.asdict(
            self,
            dict_factory=lambda fields: {
                name: value for name, value in fields if value or name not in _OF_CATEGORIES
            },
        )
