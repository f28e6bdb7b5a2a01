"""A game that replies: the model guesses a number, and reads "higher" or "lower" after each guess.
The reward falls with the number of guesses. Demonstrations guess at random within the known range.
20 RL steps raise the mean reward of greedy rollouts from 41% to 57%; always guessing in the middle
would give 77%."""

import random

import rstar2

HIGHEST, MOST_GUESSES = 15, 4


def problems(split: str, seed: int) -> list[dict[str, object]]:
    """Every secret number many times; the splits differ in their ids only."""
    secrets = random.Random(f"{split} {seed}").choices(range(1, HIGHEST + 1), k=300)
    prompt = f"My number is between 1 and {HIGHEST}. Guess it."
    return [
        {"prompt": prompt, "answer": secret, "id": f"{split}-{number}"}
        for number, secret in enumerate(secrets)
    ]


def compare(guess: int, secret: int) -> str:
    return "higher" if guess < secret else "lower"


def reply(episode: rstar2.EpisodeView) -> str | None:
    """What the model reads after a guess; None ends the game."""
    if episode.answer == episode.problem.answer or len(episode.turns) == MOST_GUESSES:
        return None
    if not episode.answer.isdecimal():
        return "Write a number."
    return compare(int(episode.answer), int(episode.problem.answer))


def reward(episode: rstar2.EpisodeView) -> float:
    """1 for the first guess, less for each further one, 0 if the number was not guessed."""
    right = episode.answer == episode.problem.answer
    return 1 - 0.1 * (len(episode.turns) - 1) if right else 0.0


def demonstrate(problem: rstar2.Problem, rng: random.Random) -> list[str]:
    """Guess, reply, guess, ...: the right format, and guesses that use the replies badly."""
    secret, low, high = int(problem.answer), 1, HIGHEST
    texts: list[str] = []
    for _ in range(MOST_GUESSES):
        guess = rng.randint(low, high)
        texts += [str(guess), compare(guess, secret)]
        if guess == secret:
            break
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
    return texts[:-1]


env = rstar2.Environment(
    problems, reward, reply=reply, demonstrations=demonstrate, name="guessing-game"
)
if __name__ == "__main__":
    run = rstar2.train(env, recipe="tiny", steps=20, settings=["sft.steps=300"])
    print([(e.stage, e.mode, e.accuracy.mean, e.mean_turns) for e in run.evaluations])
