"""The examples of this page work: recipe, problems, demonstrations, and a rollout of each agent.

`mcp_calculator` and `verifiers_reverse` name a server and a taskset that other projects publish.
Here a server and a taskset of the tests take their places.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import pytest

from rstar2.agent.loop import AgentLoop, RolloutSpec
from rstar2.config import AgentConfig, Recipe, SamplingConfig, load_recipe
from rstar2.environments.environment import Environment
from rstar2.environments.load import load_environment, recipe_problems
from rstar2.rollout.groups import GroupRunner
from tests.endpoint.scripted import ScriptedGenerator
from tests.tiny import tiny_template

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve()
EXAMPLES = HERE.parents[2] / "examples"
SERVER = f"stdio:{sys.executable} {HERE.parents[1] / 'environments' / 'mcp_server.py'}"
REPLACED = {
    "mcp_calculator": [f"environment.args.server={SERVER}"],
    "verifiers_reverse": ["environment.args.id=letters_taskset"],
}


@pytest.fixture(autouse=True)
def _modules_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE.parent))


def example(name: str) -> Recipe:
    return load_recipe(EXAMPLES / f"{name}.yaml", REPLACED.get(name, ())).recipe


@pytest.mark.parametrize(
    "name",
    ["openai_agent", "verifiers_reverse", "mcp_calculator", "reasoning_gym", "reasoning_gym_tools"],
)
async def test_an_example_has_problems_and_demonstrations_that_fit(name: str) -> None:
    recipe = example(name)
    environment = load_environment(recipe.environment, recipe.template)
    train = recipe_problems(recipe, environment, "train")
    heldout = recipe_problems(recipe, environment, "heldout")
    assert not {p.prompt for p in train} & {p.prompt for p in heldout}
    assert recipe.sft is not None
    for conversation in islice(environment.demonstrations(20, 0), 20):
        ids, mask = tiny_template().conversation_ids(conversation)
        assert any(mask)
        if not isinstance(environment, Environment):  # those have a system message, left out here
            assert len(ids) <= recipe.sft.max_length
    await environment.close()


def say(prompt: str) -> str:
    """What a perfect model answers in the examples."""
    question = prompt.rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>")[0]
    if question.startswith("Which is larger"):
        return max(word.strip("?") for word in question.split() if word.strip("?").isdecimal())
    if question.startswith("What is"):
        a, b = (word.strip("?") for word in question.split() if word.strip("?").isdecimal())
        signs = {"sum": "+", "minus": "-", "remainder": "%"}
        sign = next(sign for word, sign in signs.items() if word in question)
        call = f'{{"name": "calculate", "arguments": {{"expression": "{a}{sign}{b}"}}}}'
        return f"<tool_call>\n{call}\n</tool_call>"
    if question.startswith("<tool_response>"):
        return question.split("\n")[1]
    return f"<reversed_text>{question[::-1]}</reversed_text>"


@pytest.mark.parametrize("name", ["openai_agent", "verifiers_reverse", "mcp_calculator"])
async def test_the_agents_of_the_examples_are_rewarded_for_the_right_answer(name: str) -> None:
    recipe = example(name)
    environment = load_environment(recipe.environment, recipe.template)
    loop = AgentLoop(
        environment, ScriptedGenerator(tiny_template(), say), None, tiny_template(), AgentConfig()
    )
    problem = recipe_problems(recipe, environment, "train")[0]
    spec = RolloutSpec(SamplingConfig(), 256, 3)
    group = await GroupRunner(loop).run(problem, group_id="g", step=1, seeds=[1, 2, 3], spec=spec)
    assert group.dropped == {}
    assert group.rewards == (1.0, 1.0, 1.0)
    await environment.close()
