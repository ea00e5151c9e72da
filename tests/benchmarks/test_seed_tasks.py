"""The tasks of the SEED paper: their prompts, and how their values are read."""

from benchmarks.seed_tasks import Arrangement, Blocksworld, Gsm8k

QUESTION = "Ann has 3 pens and buys 4. How many has she?"
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


def test_blocksworld_shows_good_and_bad_actions():
    demo = Arrangement(START, GOAL, PLAN)
    task = Blocksworld(demonstrations=(demo,))
    shown = task.evaluator(demo, (), ("put down the red block",)).prompt
    assert f"Action: {PLAN[0]}\nGood or bad? good" in shown
    assert f"Action: {PLAN[1]}\nGood or bad? bad" in shown
    assert [task.value(t) for t in ("Good", "it is bad", "goodness")] == [1, 0, None]
