"""`regard quickstart`."""

import shlex
import sys
from itertools import islice

from regard.cli.options import Json, Out, Overrides
from regard.cli.output import bold, clock, dim, print_json, say, shown, working

JUDGED = 1000  # numbers it never saw
SHOWN = 5


def quickstart(
    words: Overrides = [],  # noqa: B006 -- typer copies it
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Teach a small model numbers in French; see what it learned.

    It takes under a minute on two cores; nothing is downloaded.
    """
    with working("getting ready"):
        from regard.api import load
        from regard.cli.explain import picture
        from regard.cli.report import follow, suggest
        from regard.config import parse_overrides
        from regard.data.sources import Pairs
        from regard.pipelines import open_split, prepare_evaluation
        from regard.pipelines.evaluate import written
        from regard.training.run import begin
        from regard.training.setup.configure import configure
        from regard.training.storage.run_folder import new_folder

    say("A small encoder–decoder learns to write numbers in French, from examples alone.\n")
    config = configure("quickstart", parse_overrides(words))
    folder = new_folder(config.name) if out is None else out
    ended = follow(lambda progress: begin(config, folder, progress))

    run = load(folder)
    with working(f"asking it for {JUDGED:,} numbers it never saw"):
        _, held = open_split(run.config)
        assert isinstance(held, Pairs)
        exam = prepare_evaluation(run.config, held, run.tokenizers)
        judged = min(JUDGED, held.count)
        share = written(exam, run.model, held, width=1, limit=judged)["exact_match"]
        pairs = list(islice(held.rows(), SHOWN))
        answers = run.translate([source for source, _ in pairs])
    if as_json:
        print_json(
            {
                "run": str(folder),
                "step": ended.step,
                "seconds": round(ended.seconds, 1),
                "judged": judged,
                "exact_match": share,
                **ended.metrics,
            }
        )
        return

    stream = sys.stdout
    percent = bold(f"{share:.1%}", stream)
    say(f"\ntrained in {clock(ended.seconds)}")
    print(f"\n{percent} of {judged:,} numbers it never saw are right to the last letter\n")
    for (source, target), answer in zip(pairs, answers, strict=True):
        right = "✓" if answer == target else "✗"
        print(f"  {source}\n  {right} {shown(answer, stream)}")
        if answer != target:
            print(dim(f"  = {target}", stream))
    shortest = min((source for source, _ in pairs), key=len)
    ((_, seen),) = run.explain(shortest).items()
    print("\nwhere it looks in the English while it writes the French\n")
    print(picture(seen, None, alignment=True))

    place = shlex.quote(str(folder))
    suggest(
        [
            (f"regard translate {place} 'forty-two'", "any number up to a million"),
            (f"regard explain {place} 'forty-two' --out heads.svg", "all heads, as a picture"),
            (f"regard evaluate {place}", "BLEU, chrF, exact match"),
            ("regard train YOUR.txt minutes=5", "a model of your own text"),
        ]
    )
