"""Train the tiny agent on a task of your own. Demonstrations teach how to call a tool and choose it
at random; RL learns which tool a question needs. It takes two minutes on two cores."""

import random

import rstar2


@rstar2.tool
def double(n: int) -> int:
    """Twice a number."""
    return 2 * n


@rstar2.tool
def square(n: int) -> int:
    """A number times itself."""
    return n * n


def demonstrate(problem: rstar2.Problem, rng: random.Random) -> list[str]:
    n, chosen = problem.meta["n"], rng.choice([double, square])
    return [chosen.call_text(n=n), str(chosen(n)), str(chosen(n))]


numbers = range(10, 100)
env = rstar2.Environment(
    [{"prompt": f"Twice {n}?", "answer": 2 * n, "n": n} for n in numbers]
    + [{"prompt": f"The square of {n}?", "answer": n * n, "n": n} for n in numbers],
    reward=lambda episode: episode.answer == episode.problem.answer,
    tools=[double, square],
    demonstrations=demonstrate,
    name="own-task",
)
if __name__ == "__main__":
    run = rstar2.train(env, recipe="tiny", steps=20, settings=["sft.steps=300"])
    print([(e.stage, e.mode, e.accuracy.mean) for e in run.evaluations])
