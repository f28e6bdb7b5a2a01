"""Format-only SFT for a pre-trained model: how to call Python, read the result and answer. It
teaches no mathematics.

Every request states what to run (an expression to evaluate, numbers to add, a word to reverse, a
list to sort); no request requires choosing an operation. Some first calls fail and are corrected,
so that the model sees how to recover. Tool responses come from running the code.

`answers` has the same requests without calls: the reason states the expression and its value. A
policy that starts from it is the control without a tool.

`conversations` and `answers` are pure functions of their arguments.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from rstar2.problems.arithmetic import (
    ANSWER_HEAD,
    ANSWER_TAIL,
    call_text,
    run_trusted,
)
from rstar2.tool_text import tool_text
from rstar2.types import Conversation, Message

NAME, ANSWERS_NAME = "toolformat", "answerformat"

SLIP_SHARE = 0.1
"""Share of conversations whose first call fails."""
STORY_SHARE = 0.7
"""Share of named operations that come after a story."""

CALL_REASONS = ("I will run Python.", "Use the tool.", "Run code.", "Python can do this.")
RETRY_REASONS = ("That failed. Try again.", "Fix the code.")
ANSWER_REASONS = ("Done.", "The output is the answer.", "The tool has it.")
REASON_END = "</reason>\n"

WORDS = (
    *("lamp", "river", "window", "garden", "pencil", "mountain", "basket", "orange", "silver"),
    *("letter", "planet", "button", "winter", "bridge", "candle", "pocket", "ladder", "forest"),
    *("guitar", "marble", "castle", "island", "rabbit", "pepper", "rocket", "saddle", "tunnel"),
)
NAMES = ("Anna", "Bill", "Carla", "Dan", "Emma", "Frank", "Gina", "Hugo", "Iris", "Jack")

Request = tuple[str, str]
"""The user's request and the expression that answers it."""


def _expression(rng: random.Random) -> Request:
    """An expression that the request contains literally."""
    numbers = [rng.randint(1, 999) for _ in range(rng.choice((2, 2, 3)))]
    text = str(numbers[0])
    for number in numbers[1:]:
        text += f" {rng.choice('+-*')} {number}"
    wording = rng.choice(
        ("Evaluate {}.", "What does Python print for {}?", "Run {} and tell me the result.")
    )
    return wording.format(text), text


def _named(rng: random.Random) -> Request:
    """An operation that the request names in words, or two in a row; often after a story.

    The story has numbers and things, as word problems have, but nothing follows from it.
    """
    largest = rng.choice((12, 99, 999))
    a, b, c = (rng.randint(2, largest) for _ in range(3))
    larger, smaller = max(a, b), min(a, b)
    request, expression = rng.choice(
        (
            (f"Add {a} and {b}.", f"{a} + {b}"),
            (f"How much is {a} plus {b}?", f"{a} + {b}"),
            (f"What is the sum of {a}, {b} and {c}?", f"{a} + {b} + {c}"),
            (f"Subtract {smaller} from {larger}.", f"{larger} - {smaller}"),
            (f"How much is {larger} minus {smaller}?", f"{larger} - {smaller}"),
            (f"What is the difference of {larger} and {smaller}?", f"{larger} - {smaller}"),
            (f"Multiply {a} by {b}.", f"{a} * {b}"),
            (f"How much is {a} times {b}?", f"{a} * {b}"),
            (f"Divide {a * b} by {b}.", f"{a * b} / {b}"),
            (f"How much is {a * b} divided by {a}?", f"{a * b} / {a}"),
            (f"Add {a} and {b}, then subtract {smaller}.", f"{a} + {b} - {smaller}"),
            (f"Add {a} and {b}, then multiply by {c}.", f"({a} + {b}) * {c}"),
        )
    )
    if rng.random() < STORY_SHARE:
        request = f"{_story(rng, (a, b, c))} {request}"
    return request, expression


def _story(rng: random.Random, numbers: tuple[int, ...]) -> str:
    """One to three sentences with some of the numbers and another one."""
    shown = [*numbers, rng.randint(2, 99)]
    rng.shuffle(shown)
    name, other = rng.sample(NAMES, 2)
    first, second = rng.sample(WORDS, 2)
    sentences = (
        f"{name} has {shown[0]} {first}s and {shown[1]} {second}s.",
        f"{other} sees {shown[2]} {first}s.",
        f"There are {shown[2]} {second}s at {other}'s house.",
        f"{name} and {other} like {first}s.",
        f"Each {first} costs {shown[3]} dollars.",
    )
    chosen = sorted(rng.sample(range(len(sentences)), rng.randint(1, 3)))
    return " ".join(sentences[i] for i in chosen)


def _word(rng: random.Random) -> Request:
    word = rng.choice(WORDS)
    return rng.choice(
        (
            (f"Write '{word}' backwards.", f"'{word}'[::-1]"),
            (f"Write '{word}' in capitals.", f"'{word}'.upper()"),
            (f"How many letters has the word '{word}'?", f"len('{word}')"),
            (f"How often is '{word[1]}' in '{word}'?", f"'{word}'.count('{word[1]}')"),
            (f"What is the first letter of '{word}'?", f"'{word}'[0]"),
            (f"Replace '{word[0]}' by 'z' in '{word}'.", f"'{word}'.replace('{word[0]}', 'z')"),
        )
    )


def _list(rng: random.Random) -> Request:
    numbers = [rng.randint(1, 99) for _ in range(rng.randint(3, 5))]
    shown = ", ".join(map(str, numbers))
    return rng.choice(
        (
            (f"Sort these numbers: {shown}.", f"sorted({numbers})"),
            (f"Which is the largest: {shown}?", f"max({numbers})"),
            (f"Which is the smallest: {shown}?", f"min({numbers})"),
            (f"How many numbers are these: {shown}?", f"len({numbers})"),
            (f"Reverse this list: {shown}.", f"{numbers}[::-1]"),
        )
    )


def _sentence(rng: random.Random) -> Request:
    text = " ".join(rng.sample(WORDS, rng.randint(3, 6)))
    return rng.choice(
        (
            (f"How many words are in this: {text}?", f"len('{text}'.split())"),
            (f"Put these words in order: {text}.", f"sorted('{text}'.split())"),
            (f"What is the last word of this: {text}?", f"'{text}'.split()[-1]"),
        )
    )


REQUESTS: dict[Callable[[random.Random], Request], float] = {
    _named: 0.65,
    _expression: 0.15,
    _word: 0.05,
    _list: 0.1,
    _sentence: 0.05,
}


def _code(expression: str, rng: random.Random) -> str:
    """A correct program."""
    return rng.choice(
        (
            f"print({expression})",
            f"print({expression})",
            f"x = {expression}\nprint(x)",
            f"result = {expression}\nprint(result)",
        )
    )


def _slip(expression: str, rng: random.Random) -> str:
    """A program with an error: it raises, or does not compile."""
    return rng.choice((f"print({expression}", f"x = {expression}\nprint(y)", f"print {expression}"))


def conversations(count: int, seed: int) -> Iterator[Conversation]:
    """Generate conversations of requests, calls, responses and answers."""
    return (conversation for _, conversation in _draw(count, seed))


def answers(count: int, seed: int) -> Iterator[Conversation]:
    """Generate the requests of `conversations`, each answered at once."""
    for index, ((question, expression), called) in enumerate(_draw(count, seed)):
        answer = called.messages[-1].content.partition(REASON_END)[2]
        value = answer.removeprefix(ANSWER_HEAD).removesuffix(ANSWER_TAIL)
        reply = f"<reason>{expression} = {value}{REASON_END}{answer}"
        messages = (Message("user", question), Message("assistant", reply))
        yield Conversation(f"{ANSWERS_NAME}-{index}", messages, source=ANSWERS_NAME)


def _draw(count: int, seed: int) -> Iterator[tuple[Request, Conversation]]:
    rng = random.Random(f"{NAME} {seed}")
    makers, weights = list(REQUESTS), list(REQUESTS.values())
    for index in range(count):
        request = rng.choices(makers, weights)[0](rng)
        yield request, _conversation(index, request, rng)


def _conversation(index: int, request: Request, rng: random.Random) -> Conversation:
    question, expression = request
    messages = [Message("user", question)]
    programs = [_code(expression, rng)]
    if rng.random() < SLIP_SHARE:
        programs.insert(0, _slip(expression, rng))
    output = ""
    for number, code in enumerate(programs):
        result = run_trusted(code)
        output = result.stdout.strip()
        reason = rng.choice(RETRY_REASONS if number else CALL_REASONS)
        messages += (
            Message("assistant", f"<reason>{reason}</reason>\n{call_text(code)}"),
            Message("tool", tool_text(result)),
        )
    answer = f"{ANSWER_HEAD}{output}{ANSWER_TAIL}"
    messages.append(
        Message("assistant", f"<reason>{rng.choice(ANSWER_REASONS)}{REASON_END}{answer}")
    )
    return Conversation(f"{NAME}-{index}", tuple(messages), source=NAME)
