"""`regard generate`."""

import itertools
import shlex
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from regard.cli.options import Folder, Json, Searched
from regard.cli.output import dim, print_json, say, shown, stdin_text, warn_of, working
from regard.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from regard.api import Run
    from regard.generate import PromptLookup

PROMPT_LOOKUP = "prompt-lookup"  # the draft that is no run
SMALL = 2e6  # parameters up to which one thread writes as fast as several, which would wait


def generate(
    run: Folder,
    prompt: Annotated[
        str,
        Argument(metavar="PROMPT", help="What to continue; '-' reads stdin.", show_default=False),
    ] = "",
    sampler: Annotated[
        list[str],
        Option(
            "-s",
            "--sampler",
            metavar="NAME=VALUE",
            help="One link of the chain; repeatable. By default temperature=0.8 and top_p=0.95; "
            "an unknown name gets the list of all.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 -- typer copies it
    order: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Let samplers act as in regard, hf, llama.cpp or textgen, with its defaults. "
            "Without, they act as written.",
        ),
    ] = None,
    tokens: Annotated[
        int, Option("-n", "--tokens", metavar="N", min=1, help="Stop after this many.")
    ] = 200,
    until: Annotated[
        list[str],
        Option(metavar="TEXT", help="End before this text; repeatable.", show_default=False),
    ] = [],  # noqa: B006 -- typer copies it
    seed: Annotated[int | None, Option(metavar="N", help="Same seed, same text.")] = None,
    beam: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Search for the likeliest text instead of drawing one."),
    ] = None,
    search: Searched = None,
    draft: Annotated[
        str | None,
        Option(
            metavar="RUN",
            help="Let a smaller model guess ahead, or prompt-lookup: fewer passes, drawn the same.",
        ),
    ] = None,
    amateur: Annotated[
        Path | None,
        Option(metavar="RUN", help="A weaker model, which shows what not to say."),
    ] = None,
    int8: Annotated[
        bool,
        Option("--int8", help="Weights of eight bits: faster for large models, almost as good."),
    ] = False,
    trace: Annotated[
        bool, Option("--trace", help="Show what each sampler did, token by token.")
    ] = False,
    json: Json = False,
) -> None:
    """Continue a prompt, printing each piece as it comes.

    \b
    regard generate runs/my 'Once upon a time'
    regard generate runs/my 'ROMEO:' -s temperature=0.7 -s top_k=40 --seed 3
    regard generate runs/my 'ROMEO:' --order llama.cpp -s min_p=0.1 --trace -n 5
    regard generate runs/my 'To be' --beam 5 -n 40
    regard generate runs/my 'To be' --search 'contrastive={k=4, alpha=0.6}'
    regard generate runs/my 'To be' --draft runs/small
    """
    drawn = {
        "--sampler": sampler,
        "--order": order,
        "--until": until,
        "--seed": seed is not None,
        "--draft": draft,
        "--int8": int8,
        "--trace": trace,
    }
    if beam is not None and search is not None:
        raise ConfigError("--beam is a search of its own; give --beam or --search")
    search = search if beam is None else f"beam={beam}"
    if search is not None and any(drawn.values()):
        given = " and ".join(name for name, value in drawn.items() if value)
        raise ConfigError(f"--beam and --search draw nothing; leave out {given}")
    text = stdin_text() if prompt == "-" else prompt
    with working(f"opening {run}"):
        from regard.api import load
        from regard.cli.sampler_trace import as_table, as_text
        from regard.generate import TracedChain
        from regard.training.setup.device import use_threads

        opened = load(run)
        size = sum(each.numel() for each in opened.model.parameters())
        use_threads(1 if size < SMALL else None)
        chain = opened.chain(sampler or None, order)
        traced = TracedChain(chain.stages)
        weaker = None if amateur is None else load(amateur)
        guesser = None if draft is None else _guesser(draft)
    warn_of(opened.unknown(text))
    texts = []
    if search is None:
        pieces: Iterable[str] = opened.stream(
            text,
            tokens=tokens,
            sampler=traced if trace else chain,
            seed=seed,
            draft=guesser,
            amateur=weaker,
            until=until,
            int8=int8,
        )
    else:
        texts = opened.search(text, tokens=tokens, search=search, amateur=weaker)
        context: int | None = getattr(opened.model, "context", None)
        if context is not None and len(opened.tokenizer.encode(text)) + tokens > context + 1:
            say(f"a search ends where the model's context of {context:,} ids does")
        pieces = [texts[0][0]]
    out = sys.stdout
    if json:
        found: dict[str, Any] = {"prompt": text, "text": "".join(pieces)}
        if search is None:
            found["chain"] = chain.specs()
        else:
            found["found"] = [{"text": each, "score": score} for each, score in texts]
        print_json(found | (as_table(traced, opened.tokenizer) if trace else {}))
    elif trace:
        for line in as_text(traced, pieces, opened.tokenizer, out):
            print(line, flush=True)
    elif len(texts) > 1:
        for each, score in texts:
            print(f"{score:9.4f}  {dim(shown(text, out), out)}{shown(each, out)}")
    else:
        pieces = iter(pieces)
        first = next(pieces, "")  # what is wrong is told before anything is written
        print(dim(shown(text, out), out), end="", flush=True)
        try:
            for piece in itertools.chain([first], pieces):
                print(shown(piece, out), end="", flush=True)
        finally:
            print()  # an error begins on a line of its own


def _guesser(draft: str) -> "Run | PromptLookup":
    from regard.api import load
    from regard.generate import PromptLookup

    if draft == PROMPT_LOOKUP:
        return PromptLookup()
    if not Path(draft).exists():
        close = get_close_matches(draft.lower(), [PROMPT_LOOKUP])
        hint = f"; did you mean {PROMPT_LOOKUP!r}?" if close else ""
        raise CheckpointError(
            f"no run at {draft}{hint}\n"
            f"--draft takes the folder of a smaller run, or {PROMPT_LOOKUP}"
        )
    return load(draft)


def as_sampler(option: str, words: Sequence[str]) -> str | None:
    """How to write a sampler that was given as an option; None where it is no sampler's name.

    >>> as_sampler("--top-k", ["generate", "runs/my", "--top-k", "40"])
    '-s top_k=40'
    """
    from regard.generate import SAMPLERS

    name = option.lstrip("-").replace("-", "_")
    if name == "greedy":
        return "-s greedy"
    if name not in SAMPLERS:
        return None
    parts = [part for word in words for part in word.split("=", 1)]
    after = parts[parts.index(option) + 1 :]
    value = after[0] if after and not after[0].startswith("--") else "VALUE"
    return f"-s {shlex.quote(f'{name}={value}')}"
