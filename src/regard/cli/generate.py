"""`regard generate`."""

import itertools
import shlex
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from regard import api
from regard.cli.arguments import AdapterOption, Folder, Json, SearchOption
from regard.cli.output import (
    check_output_file,
    dim,
    print_json,
    print_status,
    spinner,
    stdin_lines,
    text_for,
    warn_unknown,
    write_file,
)
from regard.errors import CheckpointError, ConfigError, reject_options

if TYPE_CHECKING:
    from regard.api import PromptLookup, Run

    Completions = Sequence[tuple[str, float | None]]  # texts, and their scores in a search

DRAWINGS_ACROSS = 4  # drawings side by side in a terminal
DEFAULT_COUNT = 16  # drawings
DEFAULT_TOKENS = 200
PROMPT_LOOKUP = "prompt-lookup"  # the draft that is not a run


def generate(
    run: Folder,
    prompt: Annotated[
        str,
        Argument(
            metavar="PROMPT",
            help="The text to continue; '-' reads prompts from stdin, one per line.",
            show_default=False,
        ),
    ] = "",
    sampler: Annotated[
        list[str],
        Option(
            "-s",
            "--sampler",
            metavar="NAME=VALUE",
            help="One sampler of the chain; repeatable. By default temperature=0.8 and top_p=0.95; "
            "an unknown name prints the list of all.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 -- typer copies it
    order: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Apply samplers in the order of regard, hf, llama.cpp or textgen, with its "
            "defaults. By default in the order given.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        Option(
            "-n",
            "--max-new-tokens",
            metavar="N",
            min=1,
            help=f"Generate at most this many tokens; {DEFAULT_TOKENS} by default.",
        ),
    ] = None,
    stop: Annotated[
        list[str],
        Option(
            metavar="TEXT",
            help="Stop string: the text ends before it; repeatable.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 -- typer copies it
    seed: Annotated[
        int | None, Option(metavar="N", help="Random seed; the same seed gives the same text.")
    ] = None,
    beam: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Beam search of this width instead of sampling."),
    ] = None,
    search: SearchOption = None,
    draft: Annotated[
        str | None,
        Option(
            metavar="RUN",
            help="Speculative decoding with a smaller run as draft, or with prompt-lookup.",
        ),
    ] = None,
    amateur: Annotated[
        Path | None,
        Option(metavar="RUN", help="Contrastive decoding with this weaker run as amateur."),
    ] = None,
    int8: Annotated[
        bool,
        Option("--int8", help="8-bit weights: faster for large models, slightly less accurate."),
    ] = False,
    int4: Annotated[
        bool, Option("--int4", help="4-bit weights on a GPU: faster still, and less accurate.")
    ] = False,
    float16: Annotated[
        bool, Option("--float16", help="16-bit weights on a CPU: faster for large models.")
    ] = False,
    trace: Annotated[
        bool, Option("--trace", help="Show the effect of each sampler on every token.")
    ] = False,
    count: Annotated[
        int | None,
        Option(
            metavar="N",
            min=1,
            help=f"Handwriting: how many drawings; {DEFAULT_COUNT} by default.",
        ),
    ] = None,
    bias: Annotated[
        float | None,
        Option(
            metavar="B", min=0.0, help="Handwriting: a larger bias draws more neatly; 0 by default."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Option("--out", metavar="FILE", help="Handwriting: write the drawings as .svg or .png."),
    ] = None,
    force: Annotated[bool, Option("--force", help="Overwrite an existing FILE.")] = False,
    as_json: Json = False,
    adapter: AdapterOption = None,
) -> None:
    """Continue a prompt, or draw handwriting.

    The text is printed as it is generated.

    \b
    regard generate runs/my 'Once upon a time'
    regard generate runs/my 'ROMEO:' -s temperature=0.7 -s top_k=40 --seed 3
    regard generate runs/my 'ROMEO:' --order llama.cpp -s min_p=0.1 --trace -n 5
    regard generate runs/my 'To be' --beam 5 -n 40
    regard generate runs/my 'To be' --search 'contrastive={k=4, alpha=0.6}'
    regard generate runs/my 'To be' --draft runs/small
    regard generate runs/my - --json < prompts.txt
    regard generate runs/strokes --count 16 --bias 0.5 --out drawings.svg

    Several prompts are continued together, with the seeds --seed, --seed + 1, …; --json prints
    an object per line.
    """
    sampling_options = {
        "--sampler": sampler or None,
        "--order": order,
        "--stop": stop or None,
        "--draft": draft,
        "--int8": int8,
        "--int4": int4,
        "--float16": float16,
        "--trace": trace,
    }
    if beam is not None and search is not None:
        raise ConfigError("--beam is a search; give either --beam or --search")
    text_options = sampling_options | {
        "--max-new-tokens": max_new_tokens,
        "--beam": beam,
        "--search": search,
        "--amateur": amateur,
        "--json": as_json,
    }
    search = search if beam is None else f"beam={beam}"
    if search is not None:
        reject_options("--beam and --search do not sample", sampling_options | {"--seed": seed})
    prompts = list(stdin_lines()) or [""] if prompt == "-" else [prompt]
    if trace and len(prompts) > 1:
        raise ConfigError(f"--trace shows one prompt, and stdin has {len(prompts)}; give one")
    text = prompts[0]
    with spinner(f"opening {run}"):
        loaded_run = api.load(run, adapter=adapter)
        loaded_run.limit_threads()
    if "draw" in loaded_run.methods:
        reject_options(
            f"{run} draws handwriting, which takes --count, --bias, --seed and --out", text_options
        )
        if len(prompts) > 1:
            raise ConfigError(f"{run} draws one text, and stdin has {len(prompts)}; give one")
        _draw(loaded_run, text, count, bias, seed, out, force)
        return
    max_new_tokens = DEFAULT_TOKENS if max_new_tokens is None else max_new_tokens
    with spinner(f"opening {run}"):
        from regard.cli.sampler_trace import as_table, as_text

        chain = loaded_run.chain(sampler or None, order)
        reject_options(
            f"{run} generates text; --count and --bias are for handwriting",
            {"--count": count, "--bias": bias},
        )
        if out is not None:
            raise ConfigError("--out writes drawings; redirect text to a file with >")
        check_output_file(out, force)
        traced = api.TracedChain(chain.samplers)
        options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "amateur": None if amateur is None else api.load(amateur),
        }
        sampling = options | {
            "seed": seed,
            "draft": None if draft is None else _open_draft(draft),
            "stop_strings": stop,
            "int8": int8,
            "float16": float16,
            "int4": int4,
        }
    warn_unknown([part for line in prompts for part in loaded_run.unknown_parts(line)])
    if len(prompts) > 1:
        results: list[Completions]
        if search is None:
            texts = loaded_run.generate(prompts, sampler=chain, **sampling)
            results = [[(continuation, None)] for continuation in texts]
        else:
            results = [loaded_run.search(line, search=search, **options) for line in prompts]
        for index, (line, completions) in enumerate(zip(prompts, results, strict=True)):
            if as_json:
                print_json(_as_table(line, completions, chain.specs()))
            else:
                print("\n" if index else "", end="")
                _print_completions(line, completions)
        return
    hypotheses = []
    if search is None:
        chunks: Iterable[str] = loaded_run.stream(
            text, sampler=traced if trace else chain, **sampling
        )
    else:
        hypotheses = loaded_run.search(text, search=search, **options)
        context: int | None = getattr(loaded_run.model, "context", None)
        if (
            context is not None
            and len(loaded_run.tokenizer.encode(text)) + max_new_tokens > context + 1
        ):
            print_status(f"a search ends at the model's context of {context:,} tokens")
        chunks = [hypotheses[0][0]]
    if as_json:
        result = _as_table(text, hypotheses or [("".join(chunks), None)], chain.specs())
        print_json(result | (as_table(traced, loaded_run.tokenizer) if trace else {}))
    elif trace:
        for line in as_text(traced, chunks, loaded_run.tokenizer, sys.stdout):
            print(line, flush=True)
    elif len(hypotheses) > 1:
        _print_completions(text, hypotheses)
    else:
        _print_stream(text, chunks)


def _print_stream(prompt: str, chunks: Iterable[str]) -> None:
    """Print a prompt and the chunks of its continuation as they come."""
    out = sys.stdout
    chunks = iter(chunks)
    first = next(chunks, "")  # errors are raised before anything is printed
    print(dim(text_for(out, prompt), out), end="", flush=True)
    try:
        for chunk in itertools.chain([first], chunks):
            print(text_for(out, chunk), end="", flush=True)
    finally:
        print()  # an error message starts on its own line


def _draw(
    run: "Run",
    label: str,
    count: int | None,
    bias: float | None,
    seed: int | None,
    out: Path | None,
    force: bool,
) -> None:
    """Print the drawings of a handwriting run, or write them to a file."""
    check_output_file(out, force, (".svg", ".png"))
    count = DEFAULT_COUNT if count is None else count
    with spinner("drawing"):
        drawings = run.draw(label or None, count=count, bias=bias or 0.0, seed=seed)
    if out is None:
        for start in range(0, count, DRAWINGS_ACROSS):
            row = drawings[start : start + DRAWINGS_ACROSS]
            print(text_for(sys.stdout, api.drawings_text(row)))
        return
    write_file(out, api.encode_drawings(drawings, out.suffix))
    print(out)


def _as_table(prompt: str, completions: "Completions", chain: list[Any]) -> dict[str, Any]:
    """The JSON object of a prompt, with the hypotheses of a search or the chain of samplers."""
    table: dict[str, Any] = {"prompt": prompt, "text": completions[0][0]}
    if completions[0][1] is None:
        return table | {"chain": chain}
    return table | {"hypotheses": [{"text": text, "score": score} for text, score in completions]}


def _print_completions(prompt: str, completions: "Completions") -> None:
    """Print a prompt with each of its continuations; with their scores if there are several."""
    out = sys.stdout
    for text, score in completions:
        score_text = f"{score:9.4f}  " if len(completions) > 1 else ""
        print(f"{score_text}{dim(text_for(out, prompt), out)}{text_for(out, text)}")


def _open_draft(draft: str) -> "Run | PromptLookup":
    if draft == PROMPT_LOOKUP:
        return api.PromptLookup()
    if not Path(draft).exists():
        close = get_close_matches(draft.lower(), [PROMPT_LOOKUP])
        hint = f"; did you mean {PROMPT_LOOKUP!r}?" if close else ""
        raise CheckpointError(
            f"no run at {draft}{hint}\n"
            f"--draft takes the folder of a smaller run, or {PROMPT_LOOKUP}"
        )
    return api.load(draft)


def as_sampler(option: str, arguments: Sequence[str]) -> str | None:
    """The `-s` word for a sampler that was given as an option; None if it is not a sampler.

    >>> as_sampler("--top-k", ["generate", "runs/my", "--top-k", "40"])
    '-s top_k=40'
    >>> as_sampler("--temperatur", ["generate", "runs/my", "--temperatur", "2"])
    '-s temperature=2'
    """
    name = option.lstrip("-").replace("-", "_")
    names = get_close_matches(name, [*api.SAMPLERS, "greedy"], n=1, cutoff=0.75)
    if not names:
        return None
    (name,) = names
    if name == "greedy":
        return "-s greedy"
    return f"-s {shlex.quote(f'{name}={value_of(option, arguments)}')}"


def value_of(option: str, arguments: Sequence[str]) -> str:
    """The word after an option, or after its equals sign."""
    parts = [part for word in arguments for part in word.split("=", 1)]
    after = parts[parts.index(option) + 1 :]
    return after[0] if after and not after[0].startswith("--") else "VALUE"
