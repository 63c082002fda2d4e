"""Text generation with a run: continuations of prompts, chat responses, results of a search.

Also prompts as ids, chains of samplers, and the decoder of a run.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from regard.accel import ModelFingerprint, decoding_path
from regard.accel.packed_decoder import PackedDecoder
from regard.api.prediction import BATCH_SIZE
from regard.errors import ConfigError
from regard.generate import (
    BeamSearch,
    Chain,
    ContrastiveDecoding,
    CudaGraphDecoder,
    PromptLookup,
    Search,
    detokenize_stream,
    generate,
    parse_chain,
    parse_search,
    stream,
    stream_speculative,
)
from regard.models.base import Language
from regard.pipelines.dialogues import fit_prompt
from regard.pipelines.pairs import translate
from regard.text import PairTokenizers, Tokenizer
from regard.text.chat_encoding import response_end
from regard.text.tokenizer import check_text
from regard.training.setup.device import free_memory
from regard.training.storage.initial_weights import run_template

if TYPE_CHECKING:
    from regard.api.run import Run

SMALL_MODEL = 2e6  # parameters up to which one CPU thread decodes as fast as several


def generate_text(
    run: "Run",
    prompt: str | Sequence[str],
    *,
    sampler: str | Sequence[str] | Chain,
    seed: int | None,
    draft: "Run | PromptLookup | None",
    **options: Any,
) -> str | list[str]:
    """Continue a prompt, or each of a list; `options` are those of `stream_text`."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        chunks = stream_text(run, prompt, sampler=sampler, seed=seed, draft=draft, **options)
        return "".join(chunks)
    seeds = [None if seed is None else seed + index for index in range(len(prompt))]
    if draft is not None:  # speculative decoding generates one text at a time
        return [
            "".join(stream_text(run, text, sampler=sampler, seed=row_seed, draft=draft, **options))
            for text, row_seed in zip(prompt, seeds, strict=True)
        ]
    precisions = {name: options[name] for name in ("int8", "float16", "int4")}
    if options["amateur"] is not None:
        _check_full_precision(precisions)
    model = _language_model(run, options["amateur"])
    return generate_texts(
        run._decoder(**precisions) if options["amateur"] is None else model,
        run.tokenizer,
        [run._prompt(text) for text in prompt],
        _chain(run, sampler),
        max_new_tokens=options["max_new_tokens"],
        seeds=seeds,
        stop_strings=_as_list(options["stop_strings"]),
    )


def stream_text(
    run: "Run",
    prompt: str,
    *,
    max_new_tokens: int,
    sampler: str | Sequence[str] | Chain,
    seed: int | None,
    draft: "Run | PromptLookup | None",
    amateur: "Run | None",
    stop_strings: str | Sequence[str],
    int8: bool,
    float16: bool,
    int4: bool,
) -> Iterator[str]:
    """Continue a prompt, and yield the text in chunks."""
    precisions = {"int8": int8, "float16": float16, "int4": int4}
    if draft is not None or amateur is not None:
        _check_full_precision(precisions)
    model, chain = _language_model(run, amateur), _chain(run, sampler)
    ids, stop = run._prompt(prompt), set(run.tokenizer.stop_ids)
    if draft is None:
        model = run._decoder(**precisions) if amateur is None else model
        new_ids = stream(model, ids, chain, max_new_tokens=max_new_tokens, stop=stop, seed=seed)
    else:
        new_ids = stream_speculative(
            model,
            ids,
            chain,
            draft=draft
            if isinstance(draft, PromptLookup)
            else _compatible_model(run, draft, "draft"),
            max_new_tokens=max_new_tokens,
            stop=stop,
            seed=seed,
        )
    return detokenize_stream(new_ids, run.tokenizer, ids, _as_list(stop_strings))


def require_template(run: "Run") -> str:
    """The chat template of a run; raise `ConfigError` if it has none."""
    template = run_template(run.folder, run.config)
    if template is None:
        raise ConfigError(
            f"{run.folder.path} has no chat template: it was not trained on dialogues;\n"
            "train it: regard train dialogues.jsonl task=instruct "
            f"train.start={run.folder.path}"
        )
    return template


def stream_response(
    run: "Run",
    messages: str | Sequence[tuple[str, str]],
    *,
    max_new_tokens: int,
    sampler: str | Sequence[str] | Chain,
    seed: int | None,
) -> Iterator[str]:
    """Respond to the last message of a dialogue, and yield the response in chunks."""
    template = require_template(run)
    dialogue = [("user", messages)] if isinstance(messages, str) else list(messages)
    for message in dialogue:
        if not (isinstance(message, tuple | list) and len(message) == 2):
            raise ConfigError(f"a message must be a pair of a role and a text, not {message!r}")
    if not dialogue:
        raise ConfigError("there is no message to respond to; give at least one")
    dialogue = [(role, run._normalize(text)) for role, text in dialogue]
    tokenizer = run.tokenizer
    ids, max_new_tokens = fit_prompt(
        tokenizer, template, dialogue, cast(Language, run.model), max_new_tokens
    )
    chain = sampler if isinstance(sampler, Chain) else chain_for(tokenizer, sampler)
    stop, end = response_end(tokenizer, template)
    new_ids = stream(
        run._decoder(), ids, chain, max_new_tokens=max_new_tokens, stop=stop, seed=seed
    )
    return detokenize_stream(new_ids, tokenizer, ids, [end] if end else [])


def search_text(
    run: "Run", prompt: str, *, max_new_tokens: int, search: str | Search, amateur: "Run | None"
) -> list[tuple[str, float]]:
    """The continuations of a prompt that a search returns, with their scores, best first."""
    model, tokenizer = _language_model(run, amateur), run.tokenizer
    ids = run._prompt(prompt)
    method = parse_search(search) if isinstance(search, str) else search
    (hypotheses,) = method(
        model, [ids], max_new_tokens=max_new_tokens, stop=set(tokenizer.stop_ids)
    )
    start = len(tokenizer.decode(ids))
    return [
        (tokenizer.decode([*ids, *hypothesis.ids])[start:], hypothesis.score)
        for hypothesis in hypotheses
    ]


def translate_text(run: "Run", text: str | Sequence[str], search: Search) -> Any:
    """The translation of a sentence, or of each of a list."""
    run._require("translate", "translate")
    is_list = isinstance(text, Sequence) and not isinstance(text, str)
    sentences: Sequence[Any] = text if is_list else [text]
    translations = translate(
        run.model,
        run._pair_task(),
        cast(PairTokenizers, run.tokenizers),
        [run._normalize(check_text(sentence)) for sentence in sentences],
        search=search,
    )
    return translations if is_list else translations[0]


def translation_search(
    search: str | Search | None, beam: int | None, length_penalty: float | None
) -> Search:
    """The search method for translations, one per sentence; beam search by default."""
    if search is None:
        penalty = 1.0 if length_penalty is None else length_penalty
        return BeamSearch(5 if beam is None else beam, penalty)
    if (beam, length_penalty) != (None, None):
        raise ConfigError("give either `search` or `beam` and `length_penalty`, not both")
    method = parse_search(search) if isinstance(search, str) else search
    if isinstance(method, BeamSearch) and method.n_best > 1:
        raise ConfigError(
            f"n_best={method.n_best}: a translation is one text per sentence; use n_best=1"
        )
    return method


def _language_model(run: "Run", amateur: "Run | None" = None) -> Language:
    """The language model of a run, or its contrastive combination with an amateur."""
    run._require("generate", "generate")
    model = cast(Language, run.model)
    return model if amateur is None else ContrastiveDecoding(model, _compatible_model(run, amateur))


def _compatible_model(run: "Run", other: Any, role: str = "amateur") -> Language:
    """The language model of another run, which must have the same tokenizer."""
    if not hasattr(other, "tokenizers"):
        raise ConfigError(f"the {role} must be a run, as regard.load returns, not {other!r}")
    model = _language_model(other)
    if other.tokenizer.fingerprint() != run.tokenizer.fingerprint():
        raise ConfigError(
            f"the tokenizer of the {role} {other.folder.path} differs from that of "
            f"{run.folder.path};\n"
            "train it with the same data and data.tokenizer, or start both from the same run"
        )
    return cast(Language, cast(nn.Module, model).to(run.device))


def _chain(run: "Run", sampler: str | Sequence[str] | Chain) -> Chain:
    return sampler if isinstance(sampler, Chain) else run.chain(sampler)


def _as_list(texts: str | Sequence[str]) -> Sequence[str]:
    return [texts] if isinstance(texts, str) else texts


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a prompt, after the tokenizer's prefix ids; never empty.

    An empty prompt becomes a line break, as if a line had ended before it; with the vocabulary
    of another library, that library's BOS or EOS token.
    """
    ids = [*tokenizer.prefix_ids, *tokenizer.encode(text)]
    if ids:
        return ids
    bos = tokenizer.special_id("bos")
    if not tokenizer.is_native and bos is not None:
        return [bos]
    return (tokenizer.encode("\n") if tokenizer.is_native else [])[:1] or [tokenizer.eos_id]


def chain_for(
    tokenizer: Tokenizer, specs: str | Sequence[str] | None, order: str | None = None
) -> Chain:
    """A chain of samplers, in which tokens may be named by their text: `ban=["the"]`.

    A text selects every token with this text, with or without a leading space; the text of `force`
    is encoded as it is.
    """

    def token_ids(sampler: str, text: str) -> list[int]:
        if sampler == "force":
            if unknown := tokenizer.unknown_parts(text):
                raise ConfigError(f"force={text!r}: {unknown[0]!r} is not in the vocabulary")
            return tokenizer.encode(text)
        word = text.removeprefix(" ")
        pieces = ((id, tokenizer.piece(id)) for id in range(tokenizer.vocab_size))
        return [id for id, piece in pieces if piece.removeprefix(" ") == word]

    return parse_chain(specs, order, token_ids)


def generate_texts(
    model: Language,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    chain: Chain,
    *,
    max_new_tokens: int,
    seeds: Sequence[int | None],
    stop_strings: Sequence[str] = (),
) -> list[str]:
    """Continue prompts, `BATCH_SIZE` at a time; a text ends before the first stop string."""
    texts: list[str] = []
    for start in range(0, len(prompts), BATCH_SIZE):
        rows, row_seeds = prompts[start : start + BATCH_SIZE], seeds[start : start + BATCH_SIZE]
        stop = set(tokenizer.stop_ids)
        seed = [seed for seed in row_seeds if seed is not None] or None
        for prompt, ids in zip(
            rows,
            generate(model, rows, chain, max_new_tokens=max_new_tokens, stop=stop, seed=seed),
            strict=True,
        ):
            texts.append("".join(detokenize_stream(ids, tokenizer, prompt, stop_strings)))
    return texts


def _check_full_precision(precisions: Mapping[str, bool], other: str = "draft or amateur") -> None:
    for name, requested in precisions.items():
        if requested:
            raise ConfigError(f"{name} cannot be combined with {other}; leave one of them out")


class DecoderCache:
    """Caches the decoder of a model, until the model changes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._decoder: CudaGraphDecoder | None = None
        self._precisions: dict[str, bool] = {}
        self._fingerprint: ModelFingerprint | None = None

    def decoder(
        self, int8: bool = False, float16: bool = False, int4: bool = False
    ) -> CudaGraphDecoder:
        """The fastest decoder of the model, with quantized or float16 weights on request.

        While a forward hook is registered, as inside `explain.trace`, the model itself decodes.
        """
        precisions = {"int8": int8, "float16": float16, "int4": int4}
        if any(module._forward_hooks for module in self.model.modules()):
            _check_full_precision(precisions, "trace or forward hooks")
            return CudaGraphDecoder(cast(Language, self.model), capture=False)
        unchanged = self._fingerprint is not None and self._fingerprint.find_change() is None
        if self._decoder is None or self._precisions != precisions or not unchanged:
            requested = [name for name, value in precisions.items() if value]
            if len(requested) > 1:
                raise ConfigError(f"{' and '.join(requested)} cannot be combined; give one of them")
            if float16:
                self._check_float16()
            model = cast(Language, self.model)
            path = decoding_path(model, **precisions, free_memory=free_memory(model.device))
            if requested and path.name == "plain":
                raise ConfigError(
                    f"{requested[0]} is not supported by this model: "
                    f"{path.unsupported_reasons['packed']}; leave it out"
                )
            self._decoder, self._precisions = CudaGraphDecoder(path.language), precisions
            if isinstance(path.language, PackedDecoder):
                self._fingerprint = path.language.fingerprint
                path.language.checks_contents = False  # `find_change` above checks them
            else:
                self._fingerprint = ModelFingerprint(self.model)
        return self._decoder

    def _check_float16(self) -> None:
        weight = next(self.model.parameters(), torch.empty(0))
        if weight.is_cuda or weight.dtype != torch.float32:
            raise ConfigError(
                f"float16 converts float32 weights on a CPU; these are {str(weight.dtype)[6:]} on "
                f"{weight.device.type}: leave it out"
            )
