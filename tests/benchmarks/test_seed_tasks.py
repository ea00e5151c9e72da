"""The tasks of the SEED paper: their prompts, and the simulator of Blocksworld."""

import pytest

from benchmarks.seed_tasks import Arrangement, Blocksworld, Gsm8k, Question, World

QUESTION = Question("Ann has 3 pens and buys 4. How many has she?", "7")
START = (
    "the red block is clear, the hand is empty, the red block is on top of the blue block, the blue"
    " block is on the table, the gray block is clear and the gray block is on the table"
)
GOAL = "the gray block is on top of the red block"
PLAN = ("pick up the gray block", "stack the gray block on top of the red block")


def test_prompts_of_gsm8k_grow_with_the_state():
    task, state = Gsm8k(), (("How many pens?", "3"),)
    second = task.generator(QUESTION, state, ("And then?",))
    assert "Step 1: what should be asked next? How many pens?\nAnswer: 3\nStep 2" in second.prompt
    assert second.prompt.endswith("And then?\nAnswer:")
    assert task.generator(QUESTION, state, ("And then?", "7")) is None
    assert [task.value(t) for t in ("8", "it is 10.", "11", "-", "0")] == [8, 10, None, None, None]
    right = [task.solved(QUESTION, state, t) for t in ("7", "$7.00 of 7", "7 or 8", "")]
    assert right == [True, True, False, False]


def test_blocksworld_shows_good_and_bad_actions():
    demo = Arrangement(START, GOAL, PLAN)
    task = Blocksworld(demonstrations=(demo,))
    shown = task.evaluator(demo, (), ("put down the red block",)).prompt
    assert f"Action: {PLAN[0]}\nGood or bad? good" in shown
    assert f"Action: {PLAN[1]}\nGood or bad? bad" in shown
    assert [task.value(t) for t in ("Good", "it is bad", "goodness")] == [1, 0, None]
    assert task.solved(demo, ((PLAN[0],),), PLAN[1])
    assert not task.solved(demo, ((PLAN[0],),), "put down the gray block")


@pytest.mark.parametrize(
    ("actions", "below", "held"),
    [
        (("Pick up the gray block.",), {"red": "blue", "blue": None}, "gray"),
        (PLAN, {"red": "blue", "blue": None, "gray": "red"}, None),
        (
            ("unstack the red block from on top of the blue block", "put down the red block"),
            {"blue": None, "gray": None, "red": None},
            None,
        ),
        (("pick up the red block",), None, None),  # not on the table
        ((PLAN[0], "unstack the red block from on top of the blue block"), None, None),
        ((PLAN[0], "stack the gray block on top of the blue block"), None, None),
    ],
)
def test_actions(actions, below, held):
    world = World.read(START)
    for action in actions:
        world = world.after(action)
    assert world == (None if below is None else World(below, held))


def test_a_plan_must_be_possible_up_to_the_goal():
    world = World.read(START)
    assert world.reaches(GOAL, [*PLAN, "and then nothing"])  # already there
    assert not world.reaches(GOAL, PLAN[:1])
    assert not world.reaches(GOAL, ["pick up the red block", *PLAN])
