"""The simulator of Blocksworld."""

import collections
import json
from pathlib import Path

import pytest

from stree_jax.extensions.reasoning import World

DATA = Path(__file__).parents[3] / "shared" / "data" / "blocksworld"
START = World.read(
    "the red block is clear, the hand is empty, the red block is on top of the blue block, the blue"
    " block is on the table, the gray block is clear and the gray block is on the table"
)


def test_it_reads_a_state():
    assert World({"red": "blue", "blue": None, "gray": None}, None) == START
    assert START.is_clear("red")
    assert not START.is_clear("blue")
    assert not START.is_clear("pink")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "the hand is empty",
        "the red block is on the table and the red block is on top of the blue block",
    ],
)
def test_it_refuses_what_is_no_state(text):
    with pytest.raises(ValueError, match="not a state of blocks"):
        World.read(text)


def test_possible_actions():
    unstacked = START.after("unstack the red block from on top of the blue block")
    assert unstacked == World({"blue": None, "gray": None}, "red")
    assert START.after("Pick up the gray block.") == World({"red": "blue", "blue": None}, "gray")


@pytest.mark.parametrize(
    "action",
    [
        "pick up the red block",  # not on the table
        "pick up the blue block",  # not clear
        "pick up the pink block",
        "unstack the red block from on top of the gray block",
        "unstack the gray block from on top of the red block",
        "put down the red block",
        "stack the red block on top of the gray block",  # not in the hand
        "pick up the gray block and the red block",
        "",
    ],
)
def test_impossible_actions(action):
    assert START.after(action) is None


def test_a_full_hand_takes_nothing_and_a_block_never_stands_on_itself():
    world = START.after("pick up the gray block")
    assert world.after("unstack the red block from on top of the blue block") is None
    assert world.after("stack the gray block on top of the gray block") is None
    assert world.after("stack the gray block on top of the blue block") is None
    on_red = world.after("stack the gray block on top of the red block")
    assert on_red == World({"red": "blue", "blue": None, "gray": "red"}, None)
    assert world.after("put down the gray block") == START


def test_a_plan_must_be_possible_up_to_the_goal():
    goal = "the gray block is on top of the red block"
    plan = ["pick up the gray block", "stack the gray block on top of the red block"]
    assert START.reaches(goal, plan)
    assert START.reaches(goal, [*plan, "and then nothing"])  # already there
    assert not START.reaches(goal, plan[:1])
    assert not START.reaches(goal, ["pick up the red block", *plan])
    assert not START.has("nothing about blocks")


def shortest(world, goal):
    """Length of the shortest plan, by breadth-first search over all possible actions."""
    seen, queue = {repr(world)}, collections.deque([(world, 0)])
    while queue:
        world, steps = queue.popleft()
        if world.has(goal):
            return steps
        for action in world.actions():
            below = world.after(action)
            below = World(dict(sorted(below.below.items())), below.held)
            if repr(below) not in seen:
                seen.add(repr(below))
                queue.append((below, steps + 1))
    return None


@pytest.mark.skipif(not DATA.is_dir(), reason="the data set is not here")
def test_all_plans_of_the_data_set_are_possible_and_shortest():
    rows = [
        json.loads(line)
        for line in (DATA / "split_v2_step_6_selfcontained.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 145
    for number, row in enumerate(rows):
        world = World.read(row["init_text"])
        assert world.reaches(row["goal_text"], row["plan_text"])
        assert not world.reaches(row["goal_text"], row["plan_text"][:-1])
        if number % 10 == 0:
            assert shortest(world, row["goal_text"]) == 6
