"""`rstar2 data sft`: convert public function-calling and chat data sets to SFT conversations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rstar2.cli.data_shared import SOURCES_HELP, bar, evaluation_sets, named_source, show_card
from rstar2.errors import UserError

if TYPE_CHECKING:
    from rstar2.problems.card import DataFilter
    from rstar2.problems.sft.converters import ParsedConversation
    from rstar2.problems.sft.prepare import Measure


def sft(
    sources: Annotated[list[str], typer.Argument(help=SOURCES_HELP)],
    out: Annotated[Path, typer.Option(help="Directory to create.")],
    weight: Annotated[
        list[str] | None,
        typer.Option(
            help="Share of a source in the mixture, as NAME=SHARE. Repeat for every source."
        ),
    ] = None,
    total: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of conversations.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory of a tokenizer. Lengths are then in tokens.")
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=1, help="Drop longer conversations (tokens with --tokenizer, else characters)."
        ),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Drop conversations that share 8 words in a row with this evaluation set. Can be "
            "repeated."
        ),
    ] = None,
    keep_math: Annotated[
        bool,
        typer.Option("--keep-math", help="Keep conversations that contain worked mathematics."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Random seed for the mixture and its order.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the data card as JSON.")] = False,
) -> None:
    """Convert chat and function-calling data to SFT conversations.

    Also writes a data card.

    \b
    rstar2 data sft ToolACE.json apigen-mt_5k.json glaive-function-calling-v2.json \\
        magicoder.jsonl tulu.parquet nemotron=chat.jsonl --out sft --tokenizer MODEL \\
        --max-length 8192 --against math500.jsonl
    """
    from rstar2.problems.sft.converters import CONVERTERS
    from rstar2.problems.sft.prepare import (
        CONVERSATIONS,
        Mixture,
        SftSource,
        characters,
        prepare_sft,
    )

    listed = []
    for text in sources:
        name, where, converter = named_source(text, CONVERTERS)
        listed.append(SftSource(where, name, converter))
    measure = characters if tokenizer is None else token_counter(tokenizer)
    mixture = Mixture(_weights(weight or []), total, seed, max_length)
    with bar("conversations") as show:
        card = prepare_sft(
            listed,
            _checks(keep_math, against or []),
            out,
            mixture=mixture,
            measure=measure,
            unit="characters" if tokenizer is None else "tokens",
            progress=show,
        )
    show_card(card, out / CONVERSATIONS, as_json=json)


def _checks(keep_math: bool, against: list[str]) -> list[DataFilter[ParsedConversation]]:
    from rstar2.problems.sft import checks

    filters: list[DataFilter[ParsedConversation]] = [checks.OrderedTurns()]
    if not keep_math:
        filters.append(checks.NoMathReasoning())
    if against:
        filters.append(checks.decontaminated(evaluation_sets(against)))
    return [*filters, checks.UniqueConversations()]


def _weights(texts: list[str]) -> dict[str, float] | None:
    weights: dict[str, float] = {}
    for text in texts:
        name, _, share = text.partition("=")
        try:
            weights[name] = float(share)
        except ValueError:
            raise UserError(f"--weight {text!r}: expected NAME=SHARE, as toolace=0.3") from None
    return weights or None


def token_counter(directory: Path) -> Measure:
    """Return a function that measures conversations in tokens, exactly as SFT tokenizes them."""
    from rstar2.agent.template import Template, settings_of
    from rstar2.agent.tokenizer import load_tokenizer
    from rstar2.config import TemplateConfig
    from rstar2.paper_format import REASON_OPEN
    from rstar2.types import Conversation

    try:
        tokenizer = load_tokenizer(directory)
    except UserError as error:
        raise UserError(f"--tokenizer {error}") from error
    config = settings_of(tokenizer) or TemplateConfig()
    template = Template(tokenizer, config, REASON_OPEN if config.prefill_reason else "")

    def measure(conversation: Conversation) -> tuple[int, int]:
        ids, mask = template.conversation_ids(conversation)
        return len(ids), sum(mask)

    return measure
