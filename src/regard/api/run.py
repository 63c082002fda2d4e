"""A trained run: load it, and what it can do."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from regard.accel.packed_decoder import pack
from regard.config import (
    Choice,
    RunConfig,
    kind_of,
)
from regard.data.images import as_pixels, image_pixels, resized
from regard.data.sources import Data, LabelledText, Pairs, Series, open_data
from regard.errors import ConfigError
from regard.explain import AttentionMap, Flow, attention_maps, gradient_flow
from regard.explain.neighbours import WordVectors, cosines, parse_terms, said
from regard.generate import (
    DEFAULT_SAMPLERS,
    BeamSearch,
    Chain,
    ContrastiveDecoding,
    Engine,
    PromptLookup,
    Search,
    parse_chain,
    parse_search,
    stream,
    stream_speculated,
)
from regard.generate.decode import text_of
from regard.generate.stop_text import until as ending
from regard.hub.external_checkpoint import is_external_checkpoint, open_checkpoint
from regard.models.base import Language
from regard.models.build import load_model, resolve
from regard.models.seq2seq import EncoderDecoder
from regard.models.transformer import Transformer
from regard.models.vision import Vision
from regard.nn.stack import Stack
from regard.nn.state import Source
from regard.pipelines import (
    data_fingerprint,
    evaluate,
    open_split,
    open_validation,
    pair_task,
    prepare_evaluation,
    tokenizer_fingerprint,
)
from regard.pipelines.base import Progress, Tokenizers
from regard.pipelines.by_length import ByLength
from regard.pipelines.images import classify, image_task
from regard.pipelines.labels import answers, label_task, rights_by_length
from regard.pipelines.series import forecast, series_task
from regard.tasks import TASKS
from regard.tasks.seq2seq import Seq2Seq
from regard.tasks.vocab_info import BLANK, framed
from regard.text import PairTokenizers, Tokenizer
from regard.training.import_export import ExportResult, export_run, run_config
from regard.training.setup.device import pick_device
from regard.training.storage.run_folder import RunFolder


def load(path: Path | str, device: str = "auto") -> "Run":
    """Open a run folder, or a folder of the Hugging Face world as if it were one."""
    folder = RunFolder(path)
    if is_external_checkpoint(folder.path):
        foreign = open_checkpoint(folder.path)
        config, tokenizers = run_config(foreign, folder.path.name), foreign.tokenizers
        model = foreign.load()
    else:
        config = folder.load_config()
        tokenizers = folder.load_tokenizers(config)
        folder.must_have(tokenizer_fingerprint(tokenizers))
        model = load_model(resolve(config.model), folder.kept_weights(), str(folder.model))
    where = torch.device("cpu") if hasattr(model, "fit") else pick_device(device)
    return Run(folder, config, model.to(where).eval(), tokenizers, where)


@dataclass(frozen=True)
class Run:
    """A trained model with its tokenizer and its settings, and what can be done with them."""

    folder: RunFolder
    config: RunConfig
    model: nn.Module
    tokenizers: Tokenizers | None  # None: of images
    device: torch.device
    _ready: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of what the model writes."""
        both = self.tokenizers
        if both is None:
            raise ConfigError(
                "this run has no tokenizer: its model reads no text, or came without one"
            )
        return both.target if isinstance(both, PairTokenizers) else both

    @property
    def metrics(self) -> dict[str, float]:
        """The validation metrics of the model that was kept; none of one from elsewhere."""
        return {} if is_external_checkpoint(self.folder.path) else self.folder.kept_metrics()

    def export(self, out: Path | str, *, family: str | None = None) -> ExportResult:
        """Write the run as a folder that Hugging Face's library opens."""
        return export_run(self.folder.path, Path(out), family)

    def generate(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        sampler: str | Sequence[str] | Chain = DEFAULT_SAMPLERS,
        seed: int | None = None,
        draft: "Run | PromptLookup | None" = None,
        amateur: "Run | None" = None,
        until: str | Sequence[str] = (),
        int8: bool = False,
    ) -> str:
        """Continue a prompt; the prompt is not repeated. The text ends before any of `until`.

        `draft` guesses ahead: a run with a smaller model, or `PromptLookup()`. Texts are drawn as likely as without, with fewer passes through the model; whether that is
        faster depends on how good and how cheap the guesses are. `amateur` is a run with a
        weaker model, which shows what not to say (contrastive decoding). With `int8` a decoder
        writes with weights of eight bits: faster where it is large, and almost as well. Without a
        prompt the text begins as one does after the end of another.
        """
        return "".join(
            self.stream(
                prompt,
                tokens=tokens,
                sampler=sampler,
                seed=seed,
                draft=draft,
                amateur=amateur,
                until=until,
                int8=int8,
            )
        )

    def stream(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        sampler: str | Sequence[str] | Chain = DEFAULT_SAMPLERS,
        seed: int | None = None,
        draft: "Run | PromptLookup | None" = None,
        amateur: "Run | None" = None,
        until: str | Sequence[str] = (),
        int8: bool = False,
    ) -> Iterator[str]:
        """Continue a prompt, piece by piece as it comes; see `generate`."""
        if int8 and (draft is not None or amateur is not None):
            raise ConfigError("int8 is for a model that writes alone; leave out draft and amateur")
        model = self._language(amateur)
        chain = sampler if isinstance(sampler, Chain) else self.chain(sampler)
        ids = self._prompt(prompt)
        stop = set(self.tokenizer.stop_ids)
        if draft is None:
            model = self._engine(int8) if amateur is None else model
            written = stream(model, ids, chain, tokens=tokens, stop=stop, seed=seed)
        else:
            guesser = draft if isinstance(draft, PromptLookup) else self._beside(draft, "draft")
            written = stream_speculated(
                model, ids, chain, draft=guesser, tokens=tokens, stop=stop, seed=seed
            )
        stops = [until] if isinstance(until, str) else until
        return ending(text_of(written, self.tokenizer, ids), stops)

    def chain(self, words: str | Sequence[str] | None = None, order: str | None = None) -> Chain:
        """A chain of samplers, in which tokens may be named by their text: `ban=["the"]`.

        A text names every token that reads so, with a space before it or without; what `force`
        is given is written as it stands.
        """

        def named(sampler: str, text: str) -> list[int]:
            tokenizer, plain = self.tokenizer, text.removeprefix(" ")
            if sampler == "force":
                if strange := tokenizer.unknown_parts(text):
                    raise ConfigError(f"force={text!r}: the run cannot write {strange[0]!r}")
                return tokenizer.encode(text)
            pieces = ((id, tokenizer.piece(id)) for id in range(tokenizer.size))
            return [id for id, piece in pieces if piece.removeprefix(" ") == plain]

        return parse_chain(words, order, named)

    def search(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        search: str | Search = "beam=5",
        amateur: "Run | None" = None,
    ) -> list[tuple[str, float]]:
        """The continuations of a prompt that a search finds with their scores, best first."""
        model, tokenizer = self._language(amateur), self.tokenizer
        ids = self._prompt(prompt)
        (found,) = _search(search)(model, [ids], tokens=tokens, stop=set(tokenizer.stop_ids))
        before = len(tokenizer.decode(ids))
        return [(tokenizer.decode([*ids, *each.ids])[before:], each.score) for each in found]

    def translate(
        self,
        text: str | Sequence[str],
        *,
        beam: int | None = None,
        length_penalty: float | None = None,
        search: str | Search | None = None,
    ) -> Any:
        """Write a sentence, or each of several, in the other language.

        By a `beam` of 5 with a `length_penalty` of 1 where nothing else is said, or by a `search`
        that says more: "beam={width=5, form='gnmt'}".
        """
        self._must("seq2seq", "translate")
        if search is None:
            penalty = 1.0 if length_penalty is None else length_penalty
            search = BeamSearch(5 if beam is None else beam, penalty)
        elif (beam, length_penalty) != (None, None):
            raise ConfigError("a search has a beam and a length penalty of its own; give either")
        chosen = _search(search)
        if isinstance(chosen, BeamSearch) and chosen.n_best > 1:
            raise ConfigError(f"n_best={chosen.n_best}: a translation is one text a sentence")
        many = [text] if isinstance(text, str) else list(text)
        many = [self._read(each) for each in many]
        tokenizers = cast(PairTokenizers, self.tokenizers)
        found = dict(
            evaluate.translate(
                self.model,
                self._task(),
                tokenizers,
                many,
                search=chosen,
            )
        )
        written = [found[i] for i in range(len(many))]
        return written[0] if isinstance(text, str) else written

    def predict(
        self, what: str | Path | NDArray[Any], *, top: int = 3
    ) -> list[list[tuple[str, float]]]:
        """What the run's task is about, best first: the likeliest classes of a text, of each of
        its words or of an image, or the likeliest pieces for each <mask> of a text."""
        kind = kind_of(self.config.task)[0]
        if kind == "classify":
            return [self.classify(what, top=top)]
        if kind in ("label", "tag"):
            task, text = label_task(self.config.task), self._read(str(what))
            return answers(self.model, task, self.tokenizer, text, top)
        return self.fill(str(what), top=top)

    def forecast(self, series: str | Path | None = None, *, steps: int = 24) -> list[float]:
        """The next numbers of a series, each made from those before it.

        A file or a built-in; None: the series that the run was made from, held-out end included.
        """
        self._must("forecast", "foretell a series")
        path = self.config.data.path if series is None else str(series)
        opened = open_data(path, kind="series")
        assert isinstance(opened, Series)
        return forecast(self.model, series_task(self.config.task), opened, steps)

    def classify(
        self, image: str | Path | NDArray[Any], *, top: int = 3
    ) -> list[tuple[str, float]]:
        """The likeliest classes of an image with their probabilities, best first.

        A file, or an array: height and width, with channels at one end or without.
        """
        self._must("classify", "tell classes apart")
        model, task = cast(Vision, self.model), image_task(self.config.task)
        size, channels = model.config.image_size, model.config.channels
        if isinstance(image, str | Path):
            pixels = image_pixels(Path(image), size, channels)
        else:
            pixels = resized(as_pixels(np.array(image)[None], "the image"), size)
        images = task.normal(torch.from_numpy(pixels)).to(self.device)
        (found,) = classify(model, images, task.names, top)
        return found

    def fill(self, text: str, *, top: int = 5) -> list[list[tuple[str, float]]]:
        """The likeliest pieces for each <mask> in a text with their probabilities, best first."""
        self._must("masked", "fill in blanks")
        ids, places = framed(self.tokenizer, self._read(text))
        if not places:
            raise ConfigError(f"nothing to fill in; write {BLANK} where a word is missing")
        with torch.no_grad():
            x = self.model(torch.tensor([ids], device=self.device))[0, places]
            chances = cast(Any, self.model.head)(x).float().softmax(-1)
        best = chances.topk(min(top, self.tokenizer.size))
        return [
            [(self.tokenizer.piece(id), p) for id, p in zip(row, shares, strict=True)]
            for row, shares in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def neighbours(
        self, words: str | Sequence[str], *, top: int = 10
    ) -> dict[str, list[tuple[str, float]]]:
        """The words with vectors most like those of others, and the cosines, best first.

        Each word is asked for itself, or as a sum: "war king - man + woman" asks twice.
        """
        vectors = WordVectors.of(self.model, self.tokenizer)
        split = words.split() if isinstance(words, str) else words
        sums = parse_terms(self._read(word) for word in split)
        return {said(terms): vectors.near(terms, top) for terms in sums}

    def alike(self, word: str, text: str) -> dict[str, Any]:
        """How alike the vectors of a word are wherever it stands in a text, as cosines.

        In the `table` they are the same; in the `last layer`, where there is one, they tell what
        the model has read. `places` counts the tokens of the text from 1.
        """
        if isinstance(self.tokenizers, PairTokenizers):
            raise ConfigError("a word is compared within one text, and this run learned from pairs")
        vectors = WordVectors.of(self.model, self.tokenizer)
        ids, id = self.tokenizer.encode(self._read(text)), vectors.id(self._read(word))
        places = [place for place, each in enumerate(ids) if each == id]
        if len(places) < 2:
            raise ConfigError(
                f"{word!r} stands {len(places)} times in the text; there must be two to compare"
            )
        result: dict[str, Any] = {"places": [place + 1 for place in places]}
        result["table"] = cosines(vectors.table[[id] * len(places)]).tolist()
        if kind_of(self.config.task)[0] != "cbow":
            before = self.tokenizer.prefix_ids
            if getattr(self.model.config, "shape", None) == "encoder":
                before = [self.tokenizer.cls_id]
                ids = [*ids, self.tokenizer.sep_id]
            with torch.no_grad():
                x = self.model(torch.tensor([[*before, *ids]], device=self.device))[0]
            result["last layer"] = cosines(x[[len(before) + each for each in places]]).tolist()
        return result

    def evaluate(
        self,
        *data: Choice,
        beam: int = 5,
        length_penalty: float = 1.0,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """All metrics of the run's task on its own held-out data, or on other data."""
        held = self._held_out(data)
        exam = prepare_evaluation(self.config, held, self.tokenizers, progress)
        result: dict[str, Any] = evaluate.losses(exam, self.model, self.device)
        if isinstance(held, Pairs):
            result["loss_own"] = evaluate.own_loss(exam, self.model, self.device)
            result |= evaluate.written(
                exam, self.model, held, width=beam, length_penalty=length_penalty
            )
        return result

    def evaluate_by_length(
        self, *data: Choice, beam: int = 5, length_penalty: float = 1.0
    ) -> ByLength:
        """What the run says or writes, judged apart for short and for long texts."""
        if kind_of(self.config.task)[0] not in ("label", "tag"):
            self._must("seq2seq", "be judged by the length of what is read")
        held = self._held_out(data)
        if isinstance(held, LabelledText):
            return rights_by_length(
                prepare_evaluation(self.config, held, self.tokenizers), self.model
            )
        assert isinstance(held, Pairs)
        exam = prepare_evaluation(self.config, held, self.tokenizers)
        return evaluate.written_by_length(
            exam, self.model, held, width=beam, length_penalty=length_penalty
        )

    def _held_out(self, data: Sequence[Choice]) -> Data:
        """The data to judge by: what is named, or else what the run held out."""
        config = self.config
        if kind_of(config.task)[0] not in TASKS:
            self._must("causal", "be judged")
        if data:
            learns = TASKS[kind_of(config.task)[0]].learns
            return open_validation(data, learns, lower=config.data.lower)
        if config.data.path is None and config.data.source is None:
            raise ConfigError("this run was not trained here; name data to judge it by")
        train, held = open_split(config)
        self.folder.must_be_of(data_fingerprint(train, held))
        return held

    def explain(
        self, text: str, *, layer: int | None = None, pattern: str | None = None
    ) -> dict[str, AttentionMap]:
        """What the model looks at: its alignment for a translation, its heads for a text.

        By default in the last layer; `pattern` names any others, as in "encoder.blocks.*".
        """
        if isinstance(self.model, Vision):
            raise ConfigError(
                "explain shows where words look; for images ask regard.explain.attention_maps(\n"
                "run.model, lambda: run.model(images), pattern='encoder.blocks.*')"
            )
        if isinstance(self.model, EncoderDecoder) and len(self.model.attention):
            hops = len(self.model.attention)
            number = hops - 1 if layer is None else layer
            if not 0 <= number < hops:
                raise ConfigError(f"layer {number}: there are {hops} hops, 0 to {hops - 1}")
            return self._explain_pair(text, pattern or f"attention.{number}")
        if not isinstance(self.model, Transformer):
            kind = type(self.model).__name__
            raise ConfigError(f"there is no attention to show: the model of this run is {kind}")
        side = "encoder" if self.model.decoder is None else "decoder"
        stack = cast(Stack, getattr(self.model, side))
        layers, shared = len(stack.layers), len(stack.blocks) == 1
        number = layers - 1 if layer is None else layer
        if not 0 <= number < layers:
            raise ConfigError(f"layer {number}: there are {layers} layers, 0 to {layers - 1}")
        if isinstance(self.tokenizers, PairTokenizers):
            return self._explain_pair(text, pattern or f"decoder.blocks.{number}.cross")
        if not text:
            raise ConfigError("nothing to explain: the text is empty")
        ids = [*self.tokenizer.prefix_ids, *self.tokenizer.encode(self._read(text))]
        if side == "encoder":
            ids, _ = framed(self.tokenizer, self._read(text))
        tensor = torch.tensor([ids], device=self.device)
        pieces = [self.tokenizer.piece(each) for each in ids]
        maps = attention_maps(
            self.model,
            lambda: self.model(tensor),
            pattern=pattern or f"{side}.blocks.{0 if shared else number}.attention",
            call=number if shared else -1,
        )
        return {name: AttentionMap(pieces, pieces, weights[0]) for name, weights in maps.items()}

    def gradients(self, text: str) -> Flow:
        """How strongly the loss of a text's last token pulls at all that was read before it.

        Of a run on pairs, that of the last token it writes for `text` itself, at each position of
        the source, in the order in which the encoder reads it.
        """
        if hasattr(self.model, "fit"):
            kind = type(self.model).__name__
            raise ConfigError(f"there are no gradients: the model of this run is {kind}, it counts")
        if isinstance(self.tokenizers, PairTokenizers):
            source, ids = self._read_and_written(text)
            pieces = list(map(self.tokenizers.source.piece, source.ids[0].tolist()))
            if getattr(self.model.config, "reversed_source", False):
                pieces = pieces[::-1]
            given, pattern = {"source": source}, "encoder.*"
        else:
            self._must("causal", "say what comes next")
            ids = [*self.tokenizer.prefix_ids, *self.tokenizer.encode(self._read(text))]
            if len(ids) < 2:
                raise ConfigError(
                    f"{text!r} is {len(ids)} token long; there must be one to predict, and one "
                    "before it"
                )
            pieces = list(map(self.tokenizer.piece, ids[:-1]))
            given, pattern = {}, "*"
        read = torch.tensor([ids[:-1]], device=self.device)
        last = torch.tensor(ids[-1:], device=self.device)

        def loss() -> torch.Tensor:
            logits = cast(Any, self.model.head)(self.model(read, **given)[:, -1])
            return F.cross_entropy(logits.float(), last)

        flow = gradient_flow(self.model, loss, pattern=pattern)
        return Flow(pieces, {name: norms[0].cpu() for name, norms in flow.items()})

    def unknown(self, text: str) -> list[str]:
        """What of a text the run cannot read, since its vocabulary does not have it."""
        both = self.tokenizers
        reads = both.source if isinstance(both, PairTokenizers) else both
        return [] if reads is None else reads.unknown_parts(self._read(text))

    def _read_and_written(self, text: str) -> tuple[Source, list[int]]:
        """A sentence as the encoder reads it, and what the decoder writes, from START to STOP."""
        tokenizers, task = cast(PairTokenizers, self.tokenizers), self._task()
        read = tokenizers.source.encode(self._read(text))
        source = task.source([np.asarray(read, dtype=np.int64)]).to(self.device)
        wrote = tokenizers.target.encode(self.translate(text))
        return source, [*task.prompt, *wrote, task.stop_id]

    def _explain_pair(self, text: str, pattern: str) -> dict[str, AttentionMap]:
        tokenizers = cast(PairTokenizers, self.tokenizers)
        source, written = self._read_and_written(text)
        ids = torch.tensor([written[:-1]], device=self.device)
        maps = attention_maps(self.model, lambda: self.model(ids, source=source), pattern=pattern)
        rows = list(map(tokenizers.target.piece, written[1:]))
        columns = list(map(tokenizers.source.piece, source.ids[0].tolist()))
        result = {}
        for name, weights in maps.items():
            across = ".cross" in name or isinstance(self.model, EncoderDecoder)
            inside = name.startswith("encoder")
            down, along = (
                (rows, columns) if across else (columns, columns) if inside else (rows, rows)
            )
            result[name] = AttentionMap(down, along, weights[0])
        return result

    def _task(self) -> Seq2Seq:
        task = pair_task(self.config, cast(PairTokenizers, self.tokenizers))
        assert isinstance(task, Seq2Seq)
        return task

    def _read(self, text: str) -> str:
        return text.lower() if self.config.data.lower else text

    def _prompt(self, text: str) -> list[int]:
        """The ids of a prompt behind those that begin every text, and never an empty list."""
        if not isinstance(text, str):
            raise ConfigError(f"a prompt is one text, not {text!r}")
        ids = [*self.tokenizer.prefix_ids, *self.tokenizer.encode(self._read(text))]
        return ids or [self._beginning()]

    def _beginning(self) -> int:
        """What an empty prompt begins with: a new line, as if after a finished one.

        A vocabulary from elsewhere has a token for it.
        """
        tokenizer = self.tokenizer
        start = tokenizer.special_id("start")
        if not tokenizer.is_native and start is not None:
            return start
        ids = tokenizer.encode("\n") if tokenizer.is_native else []
        return ids[0] if ids else tokenizer.stop_id

    def _engine(self, int8: bool = False) -> Engine:
        """The model made ready to write, and again when its weights have changed."""
        if self._ready.get("made of") != (int8, self._weights()):
            model = cast(Language, self.model)
            ready = pack(model, int8=int8)
            if int8 and ready is model:
                raise ConfigError("int8 is not for this kind of model; leave it out")
            made_of = (int8, self._weights())  # packing has moved them
            self._ready.update({"engine": Engine(ready), "made of": made_of})
        return cast(Engine, self._ready["engine"])

    def _weights(self) -> list[tuple[Any, ...]]:
        """Where the weights are, and how often they were changed there."""
        return [
            (each.data_ptr(), each.dtype, 0 if each.is_inference() else each._version)
            for each in self.model.parameters()
        ]

    def _language(self, amateur: "Run | None" = None) -> Language:
        """The model that writes, alone or against an amateur."""
        self._must("causal", "generate")
        model = cast(Language, self.model)
        if amateur is None:
            return model
        return ContrastiveDecoding(model, self._beside(amateur, "amateur"))

    def _beside(self, other: "Run", what: str) -> Language:
        """The model of another run, whose ids must mean the same."""
        if not isinstance(other, Run):
            raise ConfigError(f"the {what} must be a run, as regard.load gives, not {other!r}")
        other._must("causal", "generate")
        if other.tokenizer.fingerprint() != self.tokenizer.fingerprint():
            raise ConfigError(
                f"the {what} {other.folder.path} has another tokenizer than {self.folder.path};\n"
                "train it with the same data and data.tokenizer, or from the same run"
            )
        return cast(Language, other.model.to(self.device))

    def _must(self, needed: str, what: str) -> None:
        kind = kind_of(self.config.task)[0]
        if kind not in TASKS:
            raise ConfigError(
                f"no task trains a model with head={self.config.model['head']!r}, "
                f"and it cannot {what}; use run.model in Python"
            )
        if kind != needed:
            raise ConfigError(
                f"the task of {self.folder.path} is {kind!r}, which cannot {what}; "
                f"use `{TASKS[kind].verb}` instead"
            )


def _search(search: str | Search) -> Search:
    return parse_search(search) if isinstance(search, str) else search
