"""`regard quickstart`."""

import shlex
import sys

from regard import api
from regard.cli.arguments import Json, Out, Overrides
from regard.cli.output import (
    bold,
    dim,
    format_duration,
    is_interactive,
    print_json,
    print_status,
    spinner,
    terminal_width,
    text_for,
)

EVALUATED_EXAMPLES = 1000
SHOWN_EXAMPLES = 5


def quickstart(
    overrides: Overrides = [],  # noqa: B006 -- typer copies it
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Train a small model to write numbers in French.

    Translations and attention maps are shown at the end. It takes under a minute on two cores;
    nothing is downloaded.

    \b
    regard quickstart
    regard quickstart --out runs/numbers
    """
    with spinner("loading"):
        from regard.cli.report import print_suggestions, show_progress

        config = api.configure("quickstart", *overrides)
    print_status("A small encoder-decoder learns to write numbers in French, from examples only.\n")
    finished = show_progress(lambda progress: api.train_events(config, out=out, progress=progress))
    run = api.load(finished.folder)
    with spinner(f"evaluating on {EVALUATED_EXAMPLES:,} validation examples"):
        pairs = run.validation_pairs(EVALUATED_EXAMPLES)
        greedy = run.translate([source for source, _ in pairs], beam=1)
        correct = sum(
            translation == target for translation, (_, target) in zip(greedy, pairs, strict=True)
        )
        accuracy = correct / len(pairs)
        examples = pairs[:SHOWN_EXAMPLES]
        translations = run.translate([source for source, _ in examples])
    if as_json:
        print_json(
            {
                "run": str(finished.folder),
                "step": finished.step,
                "seconds": round(finished.seconds, 1),
                "examples": len(pairs),
                "exact_match": accuracy,
                **finished.metrics,
            }
        )
        return

    stream = sys.stdout
    percent = bold(f"{accuracy:.1%}", stream)
    print_status(f"\ntrained in {format_duration(finished.seconds)}")
    print(f"\n{percent} of {len(pairs):,} validation numbers are exactly right\n")
    for (source, target), translation in zip(examples, translations, strict=True):
        right = "✓" if translation == target else "✗"
        print(f"  {source}\n  {right} {text_for(stream, translation)}")
        if translation != target:
            print(dim(f"  = {target}", stream))
    shortest = min((source for source, _ in examples), key=len)
    ((_, attention),) = run.explain(shortest).items()
    print("\nattention from the French output to the English input\n")
    print(attention.text(width=terminal_width(), colour=is_interactive(sys.stdout)))

    folder = shlex.quote(str(finished.folder))
    print_suggestions(
        [
            (f"regard translate {folder} 'forty-two'", "any number up to a million"),
            (f"regard explain {folder} 'forty-two' --out heads.svg", "all heads, as a figure"),
            (f"regard evaluate {folder}", "BLEU, chrF, exact match"),
            ("regard train YOUR.txt minutes=5", "train a model on your own text"),
        ]
    )
