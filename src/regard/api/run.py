"""A trained run: load it, generate, predict, evaluate, explain, export."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.accel.cpu_memory import keep_freed_memory
from regard.api.decoding import (
    SMALL_MODEL,
    EngineCache,
    chain_for,
    generate_texts,
    prompt_ids,
)
from regard.api.formatting import format_number
from regard.api.pictures import forecast_figure
from regard.api.prediction import predict_rows, read_inputs
from regard.config import (
    Choice,
    RunConfig,
    kind_of,
    make,
)
from regard.errors import CheckpointError, ConfigError, unknown
from regard.explain.attention import (
    NEEDS_ATTENTION,
    cross_attention_path,
    has_attention,
    image_attention,
    pair_attention,
    read_ids,
    recurrent_states,
    self_attention,
    text_stack,
)
from regard.explain.attention_map import AttentionMaps, ShownImage
from regard.explain.attribution import Attribution, integrated_gradients
from regard.explain.effects import head_effects
from regard.explain.gradient import GradientFlow, last_token_gradients, require_gradients
from regard.explain.heads import HeadScores, find_heads
from regard.explain.image_attention import ImageAttentionMap
from regard.explain.lens import Lens, logit_lens
from regard.explain.neighbours import WordVectors, compare_occurrences, format_terms, parse_terms
from regard.generate import (
    DEFAULT_SAMPLERS,
    BeamSearch,
    Chain,
    ContrastiveDecoding,
    Engine,
    PromptLookup,
    Search,
    parse_search,
    stream,
    stream_speculative,
)
from regard.generate.decode import detokenize_stream
from regard.generate.stop_text import truncate_at_stop
from regard.html import html_table
from regard.hub.external_checkpoint import is_external_checkpoint, open_checkpoint
from regard.models.base import Language
from regard.models.build import check_weights, load_model, resolve, weights
from regard.nn.state import Source
from regard.pipelines import (
    Data,
    Pipeline,
    column_settings,
    data_fingerprint,
    open_data,
    open_split,
    open_validation,
    pipeline_of,
    prepare_evaluation,
    tokenizer_fingerprint,
    validation_metrics,
)
from regard.pipelines.base import EvalData, Progress, Tokenizers
from regard.pipelines.by_length import ByLength
from regard.pipelines.captions import (
    caption_attention,
    caption_task,
    image_source,
    write_captions,
)
from regard.pipelines.dialogues import fit_prompt, special_end, specials
from regard.pipelines.images import image_task, input_pixels
from regard.pipelines.pairs import pair_task, translate
from regard.pipelines.sentences import contrastive_task, embed_texts
from regard.pipelines.series import (
    ForecastEnd,
    by_column,
    forecast,
    forecast_end,
    forecast_future,
    series_task,
)
from regard.pipelines.strokes import stroke_task
from regard.tasks import TASKS, Forecast, Instruct, Seq2Seq, Task
from regard.tasks.vocab_info import MASK
from regard.text import PairTokenizers, Tokenizer
from regard.text.chat_template import turn_end
from regard.training.import_export import ExportResult, export_as
from regard.training.setup.device import pick_device, use_threads
from regard.training.storage.evaluation import Evaluation, evaluation_of
from regard.training.storage.imported import imported_run_config
from regard.training.storage.run_folder import RunFolder
from regard.training.storage.start import open_adapter, run_template, run_weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def load(path: Path | str, device: str = "auto", *, adapter: Path | str | None = None) -> "Run":
    """Open a run folder, or a Hugging Face checkpoint folder as if it were one.

    `adapter` is merged into the weights: a run with LoRA or a folder of PEFT, by its path, or by
    its name in the folder `adapters` of the run.

    >>> regard.load(run.folder.path).config.name
    'cats'
    """
    folder = RunFolder(path)
    if is_external_checkpoint(folder.path):
        checkpoint = open_checkpoint(folder.path)
        config = imported_run_config(checkpoint, folder.path.name)
        tokenizers, model = checkpoint.tokenizers, checkpoint.load()
    else:
        config = folder.load_config()
        tokenizers = folder.load_tokenizers(config)
        folder.check_tokenizer(tokenizer_fingerprint(tokenizers))
        model = load_model(resolve(config.model), run_weights(folder, config), str(folder.model))
    if adapter is not None:
        merged = open_adapter(path, adapter, resolve(config.model)).merge(weights(model))
        check_weights(model, merged, str(adapter))
        model.load_state_dict(merged, strict=False, assign=True)
    target = torch.device("cpu") if hasattr(model, "fit") else pick_device(device)
    return Run(folder, config, model.to(target).eval(), tokenizers, target)


@dataclass(frozen=True, repr=False)
class Run:
    """A trained model with its tokenizer and its settings.

    >>> run  # doctest: +ELLIPSIS
    Run('.../runs/cats': transformer, 4,080 parameters, causal, validation loss 3...)
    >>> run.verbs
    ('generate', 'search', 'gradients')
    """

    folder: RunFolder
    config: RunConfig
    model: nn.Module
    tokenizers: Tokenizers | None  # None: the model does not read text
    device: torch.device
    _engines: EngineCache = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_engines", EngineCache(self.model))

    def __repr__(self) -> str:
        loss = self.metrics.get("loss")
        parts = [
            self.config.model["family"],
            f"{self.parameters:,} parameters",
            kind_of(self.config.task)[0],
            *([] if loss is None else [f"validation loss {format_number(loss)}"]),
        ]
        return f"Run({str(self.folder.path)!r}: {', '.join(parts)})"

    def _repr_html_(self) -> str:
        data = self.config.data
        rows = {
            "run": self.folder.path,
            "task": kind_of(self.config.task)[0],
            "model": f"{self.config.model['family']}, {self.parameters:,} parameters",
            "data": data.path or data.source,
            "device": self.device.type,
            **{f"validation {key}": format_number(v) for key, v in self.metrics.items()},
        }
        return html_table(rows.items())

    @property
    def parameters(self) -> int:
        """The number of parameters; of a closed-form model, the values that it stores."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return parameters or sum(buffer.numel() for buffer in self.model.buffers())

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the generated text; for pairs, of the target."""
        tokenizers = self.tokenizers
        if tokenizers is None:
            raise ConfigError(
                "this run has no tokenizer: its model reads no text, or was imported without one"
            )
        return tokenizers.target if isinstance(tokenizers, PairTokenizers) else tokenizers

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of the kind of data that the run was trained on."""
        return pipeline_of(self.config)

    @property
    def verbs(self) -> tuple[str, ...]:
        """The methods of this class that apply to the run's task, the main one first."""
        task = TASKS.get(kind_of(self.config.task)[0])
        return () if task is None else task.verbs

    @property
    def unit(self) -> str:
        """The unit of the metrics, where it is not obvious."""
        task = TASKS.get(kind_of(self.config.task)[0])
        return "" if task is None else task.unit

    @property
    def predicts_words(self) -> bool:
        """Whether `predict` gives one answer for each word of a text."""
        task = TASKS.get(kind_of(self.config.task)[0])
        return task is not None and task.predicts_words

    @property
    def inputs(self) -> tuple[str, ...]:
        """What `predict` takes, by name: ("text",), or both of two texts.

        >>> labels.inputs
        ('text',)
        """
        known = kind_of(self.config.task)[0] in TASKS  # an imported model may have another head
        return self.pipeline.inputs(self.config) if known else ("text",)

    @property
    def metrics(self) -> dict[str, float]:
        """The validation metrics of the saved model; empty for an external checkpoint."""
        return {} if is_external_checkpoint(self.folder.path) else self.folder.best_metrics()

    def export(
        self,
        out: Path | str,
        *,
        family: str | None = None,
        format: Literal["transformers", "onnx"] = "transformers",
    ) -> ExportResult:
        """Write the run as a folder that Hugging Face transformers opens, or with an ONNX file.

        `family` is the `model_type` to write for transformers. The outputs are compared.

        >>> run.export("exported").family
        'gpt2'
        """
        return export_as(self.folder.path, Path(out), format, family)

    def generate(
        self,
        prompt: str | Sequence[str] = "",
        *,
        tokens: int = 200,
        sampler: str | Sequence[str] | Chain = DEFAULT_SAMPLERS,
        seed: int | None = None,
        draft: "Run | PromptLookup | None" = None,
        amateur: "Run | None" = None,
        until: str | Sequence[str] = (),
        int8: bool = False,
    ) -> Any:
        """Continue a prompt, or each of a list; prompts are not repeated.

        The text ends before any of `until`. A list gives a list; prompt n of it has the seed
        `seed` + n, so that its text is that of the prompt alone with this seed.

        `draft` is the draft of speculative decoding: a run with a smaller model, or
        `PromptLookup()`. The distribution of texts does not change; whether it is faster depends
        on the draft's acceptance rate and cost. `amateur` is a run with a weaker model for
        contrastive decoding. With `int8` a decoder uses 8-bit weights: faster where it is large,
        at a small loss of accuracy. An empty prompt starts a new line of text.

        >>> settings = {"tokens": 20, "sampler": ["temperature=0.7", "top_k=5"], "seed": 1}
        >>> run.generate("the ", **settings) == run.generate("the ", **settings)
        True
        """
        options: dict[str, Any] = {
            "tokens": tokens,
            "amateur": amateur,
            "until": until,
            "int8": int8,
        }
        if isinstance(prompt, str) or not isinstance(prompt, Sequence):
            pieces = self.stream(prompt, sampler=sampler, seed=seed, draft=draft, **options)
            return "".join(pieces)
        seeds = [None if seed is None else seed + number for number in range(len(prompt))]
        if draft is not None:  # of one text at a time
            settings: dict[str, Any] = {"sampler": sampler, "draft": draft, **options}
            return [
                self.generate(each, seed=row_seed, **settings)
                for each, row_seed in zip(prompt, seeds, strict=True)
            ]
        if int8 and amateur is not None:
            raise ConfigError("int8 cannot be combined with draft or amateur")
        model = self._language(amateur)
        return generate_texts(
            self._engine(int8) if amateur is None else model,
            self.tokenizer,
            [self._prompt(each) for each in prompt],
            sampler if isinstance(sampler, Chain) else self.chain(sampler),
            tokens=tokens,
            seeds=seeds,
            until=[until] if isinstance(until, str) else until,
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
        """Continue a prompt and yield the text in pieces; see `generate`.

        >>> pieces = run.stream("the ", tokens=20, seed=1)
        >>> "".join(pieces) == run.generate("the ", tokens=20, seed=1)
        True
        """
        if int8 and (draft is not None or amateur is not None):
            raise ConfigError("int8 cannot be combined with draft or amateur")
        model = self._language(amateur)
        chain = sampler if isinstance(sampler, Chain) else self.chain(sampler)
        ids = self._prompt(prompt)
        stop = set(self.tokenizer.stop_ids)
        if draft is None:
            model = self._engine(int8) if amateur is None else model
            new_ids = stream(model, ids, chain, tokens=tokens, stop=stop, seed=seed)
        else:
            proposer: Language | PromptLookup
            if isinstance(draft, PromptLookup):
                proposer = draft
            else:
                proposer = self._compatible_model(draft, "draft")
            new_ids = stream_speculative(
                model, ids, chain, draft=proposer, tokens=tokens, stop=stop, seed=seed
            )
        stops = [until] if isinstance(until, str) else until
        return truncate_at_stop(detokenize_stream(new_ids, self.tokenizer, ids), stops)

    def chat(
        self,
        messages: str | Sequence[tuple[str, str]],
        *,
        tokens: int = 400,
        sampler: str | Sequence[str] | Chain = DEFAULT_SAMPLERS,
        seed: int | None = None,
    ) -> Iterator[str]:
        """Answer the last message of a dialogue, and yield the answer in pieces.

        `messages` is a question, or pairs of a role (system, user, assistant) and a text. The
        oldest messages are left out where the dialogue does not fit the context.

        >>> "".join(talk.chat("101?", tokens=5, seed=1)) == "".join(
        ...     talk.chat([("user", "101?")], tokens=5, seed=1)
        ... )
        True
        """
        template = run_template(self.folder, self.config)
        if template is None:
            raise ConfigError(
                f"{self.folder.path} has no chat template: it is not trained on dialogues;\n"
                f"train it: regard train dialogues.jsonl task=instruct "
                f"train.start={self.folder.path}"
            )
        dialogue = [("user", messages)] if isinstance(messages, str) else list(messages)
        dialogue = [(role, self._normalize(text)) for role, text in dialogue]
        task, tokenizer = Instruct(template=template), self.tokenizer
        ids, tokens = fit_prompt(task, tokenizer, dialogue, cast(Language, self.model), tokens)
        chain = sampler if isinstance(sampler, Chain) else chain_for(tokenizer, sampler, None)
        end = turn_end(template, specials(tokenizer))
        stop = {*tokenizer.stop_ids, *tokenizer.encode(end)[:1]}
        if tokenizer.decode(tokenizer.encode(end)[:1]).strip() != end.strip():
            stop = set(tokenizer.stop_ids)  # the end is several tokens, and found as a text
        stop |= special_end(tokenizer, end.strip())
        new_ids = stream(self._engine(False), ids, chain, tokens=tokens, stop=stop, seed=seed)
        stops = [end.strip()] if end.strip() else []
        return truncate_at_stop(detokenize_stream(new_ids, tokenizer, ids), stops)

    def chain(self, words: str | Sequence[str] | None = None, order: str | None = None) -> Chain:
        """A chain of samplers, in which tokens may be named by their text: `ban=["the"]`.

        `order` names the library whose order and defaults apply: hf, llama.cpp, textgen.

        >>> print(run.chain(["temperature=0.7", "top_p=0.9"]))
        temperature=0.7 → top_p=0.9 → draw
        """
        self._require("generate", "generate")
        return chain_for(self.tokenizer, words, order)

    def search(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        search: str | Search = "beam=5",
        amateur: "Run | None" = None,
    ) -> list[tuple[str, float]]:
        """The continuations of a prompt that a search returns, with their scores, best first.

        >>> best, second = run.search("the ", tokens=5, search="beam={width=2, n_best=2}")
        >>> best[1] >= second[1]
        True
        """
        model, tokenizer = self._language(amateur), self.tokenizer
        ids = self._prompt(prompt)
        (hypotheses,) = _search(search)(model, [ids], tokens=tokens, stop=set(tokenizer.stop_ids))
        start = len(tokenizer.decode(ids))
        return [
            (tokenizer.decode([*ids, *hypothesis.ids])[start:], hypothesis.score)
            for hypothesis in hypotheses
        ]

    def translate(
        self,
        text: str | Sequence[str],
        *,
        beam: int | None = None,
        length_penalty: float | None = None,
        search: str | Search | None = None,
    ) -> Any:
        """Translate a sentence, or a list of sentences.

        With beam search, by default `beam=5` and `length_penalty=1`, or with a `search`:
        "beam={width=5, normalization='gnmt'}".

        >>> len(translator.translate(["117 cats", "118 cats"], beam=2))
        2
        """
        self._require("translate", "translate")
        if search is None:
            penalty = 1.0 if length_penalty is None else length_penalty
            search = BeamSearch(5 if beam is None else beam, penalty)
        elif (beam, length_penalty) != (None, None):
            raise ConfigError("give either `search` or `beam` and `length_penalty`, not both")
        chosen = _search(search)
        if isinstance(chosen, BeamSearch) and chosen.n_best > 1:
            raise ConfigError(
                f"n_best={chosen.n_best}: a translation is one text per sentence; use n_best=1"
            )
        sentences = [text] if isinstance(text, str) else list(text)
        translations = translate(
            self.model,
            self._pair_task(),
            cast(PairTokenizers, self.tokenizers),
            [self._normalize(sentence) for sentence in sentences],
            search=chosen,
        )
        return translations[0] if isinstance(text, str) else translations

    def predict(self, what: Any, *, top: int = 3) -> Any:
        """The prediction of the run's task for one input, or for each of a list.

        For a text: the likeliest classes of it or of each of its words, or the likeliest tokens
        for each <mask>. For an image: its likeliest classes. For a series: its next values.
        Classes and tokens come with their probabilities, best first. For a run trained on pairs:
        the translation of a sentence. Where the task reads two texts, an input is a tuple of both,
        as in `run.predict(("Who wrote it?", "Ada wrote it."))`.

        >>> [[(best, probability), second]] = labels.predict("a good film", top=2)
        >>> best in ("good", "bad") and probability >= second[1]
        True
        """
        self._require("predict", "predict")
        texts = isinstance(what, tuple) and all(isinstance(part, str) for part in what)
        if isinstance(what, list | tuple) and not (texts and len(self.inputs) == len(what) > 1):
            inputs = [self._normalize_input(item) for item in what]
            return self.pipeline.predict_batch(self, inputs, top=top) if inputs else []
        return self.pipeline.predict(self, self._normalize_input(what), top=top)

    def predict_file(
        self, path: Path | str, *, column: str | None = None, top: int = 1
    ) -> Iterator[dict[str, Any]]:
        """The rows of a file with a `prediction` each, and for classes a `probability`.

        A table with the inputs in a `column` (by default found as in training), a file with a
        text on each line, a CoNLL file, or a folder of images.

        >>> row = next(iter(labels.predict_file(labelled)))
        >>> row["text"], row["prediction"] in ("good", "bad")
        ('a good film 0', True)
        """
        self._require("predict", "predict")
        return predict_rows(self, read_inputs(self, path, column).rows, top=top)

    def forecast(self, series: str | Path | None = None, *, steps: int = 24) -> Any:
        """The next values of a series: a list, or for several columns a dict of lists.

        `series` is a file or a built-in; without it, the data of the run, validation included. What
        the model forecasts at once is fed back until there are `steps` values.

        >>> len(series.forecast(steps=3))
        3
        """
        task = self._series_task()
        return by_column(task, forecast(self.model, task, self._series(series), steps))

    def forecast_dates(self, series: str | Path | None = None, *, steps: int = 24) -> list[str]:
        """The dates of the next rows of a series; empty if its rows have no dates.

        >>> series.forecast_dates(steps=3)
        []
        """
        dates = self._series(series).dates
        return [] if dates is None else dates.after(steps)

    def draw_forecast(
        self, series: str | Path | None = None, *, steps: int = 24, column: str | None = None
    ) -> "Figure":
        """The next values of a column after the last true ones, which are also forecast each.

        >>> len(series.draw_forecast(steps=3).axes)
        2
        """
        task = self._series_task()
        end = forecast_future(self.model, task, self._series(series), steps, column)
        return forecast_figure(end, self.metrics, task.how(self.model, steps))

    def draw_evaluation(
        self, *data: Choice, test: bool = False, column: str | None = None
    ) -> "Figure":
        """The last values of a column of the validation data with its forecasts, and the errors.

        >>> len(series.draw_evaluation().axes)
        2
        """
        task = self._series_task()
        opened = cast(Any, self._validation_data(data, test=test))
        metrics = self.evaluate(*data, test=test)
        end = forecast_end(self.model, task, opened, column)
        return forecast_figure(end, metrics, task.how(self.model, task.horizon))

    def forecast_end(self) -> ForecastEnd:
        """The end of the validation series, in its first column, and its forecasts.

        >>> end = series.forecast_end()
        >>> len(end.truth) == len(end.forecast) == len(end.one_step)
        True
        """
        data = cast(Any, self._validation_data(()))
        return forecast_end(self.model, self._series_task(), data)

    def _series_task(self) -> Forecast:
        self._require("forecast", "forecast a series")
        return series_task(self.config.task)

    def _series(self, series: str | Path | None) -> Any:
        self._require("forecast", "forecast a series")
        path = self.config.data.path if series is None else str(series)
        return open_data(path, kind="series")

    def forecast_validation(self) -> tuple[list[float], list[float], list[float]]:
        """The end of the validation series, and its forecast; see `forecast_end`.

        Returns the values before the forecast, the true values, and the forecast ones.

        >>> before, truth, forecast = series.forecast_validation()
        >>> len(truth) == len(forecast)
        True
        """
        end = self.forecast_end()
        return end.before, end.truth, end.forecast

    def classify(
        self, image: str | Path | NDArray[Any], *, top: int = 3
    ) -> list[tuple[str, float]]:
        """The likeliest classes of an image with their probabilities, best first.

        A file, or an array: height and width, with channels first, last or without.

        >>> (best, probability), second = images.classify(image, top=2)
        >>> best in ("dark", "light") and probability >= second[1]
        True
        """
        self._require("classify", "classify images")
        (classes,) = self.pipeline.predict(self, image, top=top)
        return cast(list[tuple[str, float]], classes)

    def draw(
        self,
        label: str | None = None,
        *,
        count: int = 1,
        bias: float = 0.0,
        seed: int | None = None,
    ) -> list[NDArray[np.float32]]:
        """Drawings of a handwriting model: points (dx, dy, lift) of each, in the data's unit.

        `label` is the class to draw, for a model with classes; a larger `bias` draws more neatly.
        `explain.render.strokes.to_svg` makes a picture of them.

        >>> drawings.draw(count=2, seed=0)[0].shape[1]
        3
        """
        self._require("draw", "draw")
        task = stroke_task(self.config.task)
        return task.draw(self.model, count, label=task.class_of(label), bias=bias, seed=seed)

    def fill(self, text: str, *, top: int = 5) -> list[list[tuple[str, float]]]:
        """The likeliest tokens for each <mask> in a text with their probabilities, best first.

        >>> (candidates,) = masked.fill("the <mask> sat on the mat", top=2)
        >>> len(candidates)
        2
        """
        self._require("fill", "fill in masked tokens")
        filled = self.pipeline.predict(self, self._normalize(text), top=top)
        return cast(list[list[tuple[str, float]]], filled)

    def neighbours(
        self, words: str | Sequence[str], *, top: int = 10
    ) -> dict[str, list[tuple[str, float]]]:
        """The words with the most similar embedding vectors and their cosines, best first.

        Single words or signed sums: "war king - man + woman" is two queries.

        >>> near = run.neighbours("c", top=2)
        >>> [word for word in near], len(near["c"])
        (['c'], 2)
        """
        vectors = WordVectors.from_model(self.model, self.tokenizer)
        split = words.split() if isinstance(words, str) else words
        queries = parse_terms(self._normalize(word) for word in split)
        return {format_terms(terms): vectors.nearest(terms, top) for terms in queries}

    def embed(self, texts: str | Sequence[str]) -> torch.Tensor:
        """The embeddings of texts, of length 1: a vector, or a row for each of a list.

        >>> near.embed(["12 cats", "13 cats"]).shape
        torch.Size([2, 16])
        """
        self._require("embed", "embed texts")
        task, tokenizer = contrastive_task(self.config.task), cast(Tokenizer, self.tokenizers)
        listed = [texts] if isinstance(texts, str) else list(texts)
        vectors = embed_texts(self.model, task, tokenizer, list(map(self._normalize, listed)))
        return vectors[0] if isinstance(texts, str) else vectors

    def similar(
        self, texts: str | Sequence[str], among: Sequence[str] | None = None, *, top: int = 10
    ) -> dict[str, list[tuple[str, float]]]:
        """The texts with the most similar embeddings and their cosines, best first.

        `among` are the texts to search; by default those of the validation data.

        >>> [(best, cosine), _] = near.similar("12 cats", ["12 cats", "no dog"], top=2)["12 cats"]
        >>> best, round(cosine, 4)
        ('12 cats', 1.0)
        """
        queries = [texts] if isinstance(texts, str) else list(texts)
        if among is None:
            rows = cast(Any, self._validation_data(())).rows
            among = [text for row in rows for text in row]
        among = list(dict.fromkeys(among))
        cosines = self.embed(queries) @ self.embed(among).T
        best = cosines.topk(min(top, len(among)))
        pairs = zip(queries, best.indices.tolist(), best.values.tolist(), strict=True)
        return {
            query: [(among[n], cosine) for n, cosine in zip(*found, strict=True)]
            for query, *found in pairs
        }

    def compare_occurrences(self, word: str, text: str) -> dict[str, Any]:
        """Cosines between the vectors of a word at all its positions in a text.

        See `explain.neighbours.compare_occurrences`.

        >>> run.compare_occurrences("c", "cat, cat")["positions"]
        [1, 6]
        """
        if isinstance(self.tokenizers, PairTokenizers):
            raise ConfigError(
                "compare_occurrences needs a run on text; this one is trained on pairs"
            )
        return compare_occurrences(
            self.model,
            self.tokenizer,
            self._normalize(word),
            self._normalize(text),
            contextual=getattr(self.model.config, "shape", None) != "cbow",
        )

    def evaluate(
        self,
        *data: Choice,
        beam: int = 5,
        length_penalty: float = 1.0,
        stride: int | None = None,
        test: bool = False,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """All metrics of the run's task on its own validation data, or on other data.

        >>> sorted(run.evaluate())
        ['bits_per_byte', 'loss', 'perplexity']

        A language model predicts each token from a window of its context; windows advance by
        `stride` tokens (by default `train.evaluate_stride`). A smaller stride gives every token
        more context, and takes longer. `test` evaluates on the test part of `data.split`.
        """
        return self.evaluation(
            *data,
            beam=beam,
            length_penalty=length_penalty,
            stride=stride,
            test=test,
            progress=progress,
        ).metrics

    def evaluation(
        self,
        *data: Choice,
        beam: int = 5,
        length_penalty: float = 1.0,
        stride: int | None = None,
        test: bool = False,
        progress: Progress | None = None,
    ) -> Evaluation:
        """The metrics of `evaluate`, with what they were computed on.

        >>> run.evaluation().is_whole
        True

        The metrics of the run's own validation data are stored in its folder, where `info` and
        `compare` find them.
        """
        prepared = self._prepared(data, stride, progress, test=test)
        search = BeamSearch(beam, length_penalty)
        metrics = self.pipeline.evaluate(
            prepared, self.model, self.device, search=search, progress=progress
        )
        evaluation = evaluation_of(prepared, metrics, None)
        if not data and stride is None and not test:
            self._store(evaluation)
        return evaluation

    def validation_evaluation(
        self, *, stride: int | None = None, progress: Progress | None = None
    ) -> Evaluation:
        """The metrics that training logs, on all validation data of the run; stored as well.

        >>> run.validation_evaluation().metrics == run.metrics
        True
        """
        prepared = self._prepared((), stride, progress)
        metrics = validation_metrics(prepared, self.model, self.device, None, progress)
        evaluation = evaluation_of(prepared, metrics, None)
        if stride is None:
            self._store(evaluation)
        return evaluation

    def _prepared(
        self,
        data: Sequence[Choice],
        stride: int | None,
        progress: Progress | None,
        *,
        test: bool = False,
    ) -> EvalData:
        config = self.config
        if stride is not None:
            config = replace(config, train=replace(config.train, evaluate_stride=stride))
        opened = self._validation_data(data, test=test)
        prepared = prepare_evaluation(config, opened, self.tokenizers, progress)
        if stride is not None and prepared.stride is None:
            kind = kind_of(config.task)[0]
            raise ConfigError(
                f"a stride is for the windows of a language model; task={kind!r} has none"
            )
        if self.device.type == "cpu":
            keep_freed_memory()
        return prepared

    def _store(self, evaluation: Evaluation) -> None:
        """Store an evaluation in the folder of the run, with the metrics that training logs."""
        logged = self.folder.best_metrics().keys()  # without those of translations
        if not logged:  # an imported run, say: nothing says which belong there
            return
        metrics = {name: value for name, value in evaluation.metrics.items() if name in logged}
        with suppress(OSError, CheckpointError):  # a folder that cannot be written
            self.folder.save_evaluation(replace(evaluation, metrics=metrics))

    def evaluate_by_length(
        self, *data: Choice, beam: int = 5, length_penalty: float = 1.0
    ) -> ByLength:
        """The metrics of predictions or translations, for short and for long texts separately.

        >>> translator.evaluate_by_length(beam=1).unit
        'words'
        """
        self._require("evaluate_by_length", "be evaluated by length")
        prepared = prepare_evaluation(self.config, self._validation_data(data), self.tokenizers)
        search = BeamSearch(beam, length_penalty)
        return self.pipeline.evaluate_by_length(prepared, self.model, search=search)

    def _validation_data(self, data: Sequence[Choice], *, test: bool = False) -> Data:
        """The data at the given paths, or else the validation or the test data of the run."""
        config = self.config
        if test and data:
            raise ConfigError("give other data, or `test` for the test part of the run's, not both")
        kind = self._task_class("be evaluated").data_kind
        if data:
            opened: Data = open_validation(
                data, kind, lower=config.data.lower, columns=column_settings(config.data)
            )
            return opened
        if config.data.path is None and config.data.source is None:
            raise ConfigError(
                "this run was imported and has no validation data; give the data to evaluate on"
            )
        training, validation = open_split(config)
        self.folder.check_data(data_fingerprint(training, validation))
        if not test:
            return cast(Data, validation)
        if getattr(validation, "test", None) is None:
            raise ConfigError(
                "the data of this run has no test part; data.split=[…, …, …] of a series gives "
                "one, other data is evaluated as regard evaluate RUN DATA"
            )
        return cast(Data, validation.test)

    def validation_pairs(self, limit: int | None = None) -> list[tuple[str, str]]:
        """The first source and target sentences of the run's validation data.

        >>> [(source, target)] = translator.validation_pairs(1)
        >>> source.endswith("cats"), target.endswith("chats")
        (True, True)
        """
        self._require("translate", "translate")
        return list(islice(cast(Any, self._validation_data(())).rows(), limit))

    def explain(
        self,
        text: str,
        *,
        layer: int | None = None,
        pattern: str | None = None,
        words: bool = False,
    ) -> AttentionMaps:
        """Attention maps of one layer, by default the last; for pairs, its cross-attention.

        `pattern` selects others by path, as in "encoder.blocks.*". See `attention` for all layers.
        Of a captioning run, `text` is an image file: the attention of each token of its caption
        over the cells of the image.

        >>> run.explain("the cat")
        {'decoder.blocks.0.attention': AttentionMap(2 heads, 7 × 7 tokens)}
        """
        self._require_attention()
        if "file" in self.inputs:
            return self._explain_caption(text, [layer])
        if isinstance(self.tokenizers, PairTokenizers):
            path = cross_attention_path(self.model, layer)
            return self.attention(text, pattern=pattern or path, words=words)
        last = len(text_stack(self.model)[1].layers) - 1
        layers = [last if layer is None else layer]
        return self.attention(text, layers=layers, pattern=pattern, words=words)

    def attention(
        self,
        what: Any,
        *,
        target: str | None = None,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
        pattern: str | None = None,
        words: bool = False,
    ) -> AttentionMaps:
        """All attention of the model while it reads a text or an image, with tokens as labels.

        For pairs the encoder, the decoder and the attention between them, for the model's own
        translation or a given `target`. `layers`, `heads` and `rows` (numbers of queries) choose
        some of it, so that a long text needs little memory; `pattern` chooses by path. With `words`
        tokens are merged into words.

        >>> run.attention("the cat", heads=[1], words=True)
        {'decoder.blocks.0.attention': AttentionMap(1 heads, 2 × 2 tokens)}
        """
        self._require_attention()
        if "file" in self.inputs:
            if (target, heads, rows, pattern, words) != (None, None, None, None, False):
                raise ConfigError("of a captioning run only `layers` can be chosen")
            return self._explain_caption(what, layers or cast(Any, self.model).attention_layers)
        options: dict[str, Any] = {"heads": heads, "rows": rows}
        if self.config.model["family"] == "vision":
            pixels = torch.from_numpy(input_pixels(self.model, what))
            image = image_task(self.config.task).normalize(pixels).to(self.device)
            return image_attention(self.model, image[0], pixels[0], layers=layers, **options)
        if isinstance(self.tokenizers, PairTokenizers):
            source, ids = self._source_and_translation(what, target)
            paths = [f"*.{n}.*" for n in layers or ()] + [f"attention.{n}" for n in layers or ()]
            names = [name for name, _ in self.model.named_modules()]
            matching = [p for p in paths if any(fnmatchcase(name, p) for name in names)]
            chosen = pattern or (matching if layers and matching else paths or "*")
            return pair_attention(
                self.model, self.tokenizers, source, ids, pattern=chosen, words=words, **options
            )
        tokenizer = self.tokenizer
        ids = read_ids(self.model, tokenizer, self._normalize(what))
        return self_attention(
            self.model, tokenizer, ids, layers=layers, pattern=pattern, words=words, **options
        )

    def states(self, text: str, *, pattern: str = "*") -> AttentionMaps:
        """The gates and the hidden state of each recurrent layer at each token of a text.

        For pairs, of the encoder.

        >>> run.states("the cat")
        Traceback (most recent call last):
        regard.errors.RegardError: no recurrent layer matches '*'; this model has none
        """
        if isinstance(self.tokenizers, PairTokenizers):
            tokenizers, task = self.tokenizers, self._pair_task()
            ids = tokenizers.source.encode(self._normalize(text))
            source = task.source([np.asarray(ids, dtype=np.int64)]).to(self.device)
            order = source.ids[0].tolist()
            if getattr(self.model.config, "reversed_source", False):
                order = order[::-1]
            start = torch.tensor([task.prompt], device=self.device)
            pattern = "encoder.*" if pattern == "*" else pattern
            return recurrent_states(
                self.model,
                tokenizers.source,
                order,
                lambda: self.model(start, source=source),
                pattern=pattern,
            )
        ids = read_ids(self.model, self.tokenizer, self._normalize(text))
        batch = torch.tensor([ids], device=self.device)
        return recurrent_states(
            self.model, self.tokenizer, ids, lambda: self.model(batch), pattern=pattern
        )

    def find_heads(self, *, seed: int = 0) -> HeadScores:
        """Scores of every head of a decoder: previous token, induction, duplicate token, copying.

        See `explain.find_heads`; special tokens are left out of its random sequences.

        >>> run.find_heads().scores["induction"].shape  # (layers, heads)
        torch.Size([1, 2])
        """
        self._require("gradients", "predict the next token")
        self._require_attention()
        special = set(self.tokenizer.special_ids)
        tokens = [id for id in range(self.tokenizer.size) if id not in special]
        return find_heads(self.model, tokens=tokens, seed=seed)

    def head_effects(self, text: str, *, mean: bool = False) -> dict[str, Tensor]:
        """How much the loss of a text grows without each head, in nats per token.

        >>> run.head_effects("the cat sat")["decoder.blocks.0.attention"].shape
        torch.Size([2])
        """
        self._require("gradients", "predict the next token")
        self._require_attention()
        ids = torch.tensor([self._context_ids(text)], device=self.device)
        targets = ids[0, 1:]

        def loss() -> Tensor:
            logits = cast(Any, self.model.head)(self.model(ids[:, :-1])[0])
            return torch.nn.functional.cross_entropy(logits.float(), targets)

        return head_effects(self.model, loss, mean=mean)

    def logit_lens(self, text: str) -> Lens:
        """The next token that each layer would predict at each position of a text.

        >>> run.logit_lens("the cat")
        Lens(2 layers, 7 tokens)
        """
        self._require("gradients", "predict the next token")
        self._require_attention()
        ids = self._context_ids(text)
        logits = logit_lens(self.model, torch.tensor([ids], device=self.device))
        return Lens.of(logits, self.tokenizer, ids)

    def attribution(self, text: str, output: str | None = None) -> Attribution:
        """The contribution of each token to the likeliest class or next token, or to `output`.

        By integrated gradients of its logit, from embeddings of 0.

        >>> len(run.attribution("the cat").values)
        7
        """
        if self.tokenizers is None or isinstance(self.tokenizers, PairTokenizers):
            raise ConfigError("attribution is for runs that read one text")
        require_gradients(self.model)
        task = make(self.config.task, TASKS, "task")
        names: list[str] | None = getattr(task, "names", None)
        if names is None:
            self._require("gradients", "predict the next token or the class of a text")
            ids = self._context_ids(text)
        else:
            ids = read_ids(self.model, self.tokenizer, self._normalize(text))
        batch, head = torch.tensor([ids], device=self.device), cast(Any, self.model.head)

        def logits(hidden: Tensor) -> Tensor:
            return cast(Tensor, head(hidden[:, -1] if names is None else hidden)).float()

        with torch.no_grad():
            chosen = int(logits(self.model(batch))[0].argmax())
        if output is not None and names is None:
            chosen = self.tokenizer.encode(output)[0]
        elif output is not None and names is not None:
            if output not in names:
                raise ConfigError(unknown("class", output, names))
            chosen = names.index(output)
        values, missing = integrated_gradients(
            self.model, batch, lambda hidden: logits(hidden)[:, chosen]
        )
        label = self.tokenizer.piece(chosen) if names is None else names[chosen]
        pieces = [self.tokenizer.piece(id) for id in ids]
        return Attribution(pieces, values.tolist(), label, missing)

    def _context_ids(self, text: str) -> list[int]:
        ids = [*self.tokenizer.prefix_ids, *self.tokenizer.encode(self._normalize(text))]
        if not ids:
            raise ConfigError("the text is empty; give at least one token")
        return ids

    def _require_attention(self) -> None:
        family = self.config.model["family"]
        if not has_attention(self.model):
            gradients = "" if hasattr(self.model, "fit") else "; --gradients shows gradient norms"
            raise ConfigError(
                f"{self.folder.path} is a model of the family {family}, which has no attention"
                f"{gradients};\n{NEEDS_ATTENTION}"
            )

    def _explain_caption(self, image: Any, layers: Sequence[int | None]) -> AttentionMaps:
        """The attention of each token of the caption of an image over its cells."""
        task, model = caption_task(self.config.task, self.tokenizer), self.model
        pixels = input_pixels(model, image)
        source = image_source(model, task, pixels)
        (caption,) = write_captions(model, task, self.tokenizer, pixels, BeamSearch())
        ids = [*self.tokenizer.encode(caption), task.stop_id]
        inputs = torch.tensor([[task.start_id, *ids[:-1]]], device=self.device)
        grid = cast(Any, model.config).grid
        shown = ShownImage(torch.from_numpy(pixels[0]), (grid, grid))
        cells = [f"{row},{column}" for row in range(grid) for column in range(grid)]
        pieces = list(map(self.tokenizer.piece, ids))
        maps = AttentionMaps()
        for layer in layers:
            path, weights = caption_attention(model, source, inputs, layer)
            maps[path] = ImageAttentionMap(pieces, cells, weights[0], kind="cross", image=shown)
        return maps

    def gradients(self, text: str) -> GradientFlow:
        """The gradient norm of the last token's loss at the state of every earlier position.

        Of a run trained on pairs: the loss of the last token of its own translation of `text`, at
        every position of the source, in the order in which the encoder reads it.

        >>> len(run.gradients("the cat").by_distance())
        6
        """
        require_gradients(self.model)
        if isinstance(self.tokenizers, PairTokenizers):
            source, target = self._source_and_translation(text)
            pieces = list(map(self.tokenizers.source.piece, source.ids[0].tolist()))
            if getattr(self.model.config, "reversed_source", False):
                pieces = pieces[::-1]
            return last_token_gradients(self.model, target, pieces, source=source)
        self._require("gradients", "predict the next token")
        ids = [*self.tokenizer.prefix_ids, *self.tokenizer.encode(self._normalize(text))]
        pieces = list(map(self.tokenizer.piece, ids[:-1]))
        return last_token_gradients(self.model, ids, pieces)

    def unknown_parts(self, text: str) -> list[str]:
        """The parts of a text that are not in the run's vocabulary.

        >>> run.unknown_parts("the cat ?")
        ['?']
        """
        tokenizer = self.tokenizers
        if isinstance(tokenizer, PairTokenizers):
            tokenizer = tokenizer.source
        if tokenizer is None or "file" in self.inputs:
            return []
        text = text.replace(MASK, " ") if "fill" in self.verbs else text
        return tokenizer.unknown_parts(self._normalize(text))

    def limit_threads(self) -> None:
        """Decode a small model with one CPU thread: synchronising several would cost more.

        >>> run.limit_threads()
        """
        use_threads(1 if self.parameters < SMALL_MODEL else None)

    def _source_and_translation(
        self, text: str, target: str | None = None
    ) -> tuple[Source, list[int]]:
        """The source ids of a sentence, and the ids of its translation from START to STOP."""
        tokenizers, task = cast(PairTokenizers, self.tokenizers), self._pair_task()
        source_ids = tokenizers.source.encode(self._normalize(text))
        source = task.source([np.asarray(source_ids, dtype=np.int64)]).to(self.device)
        target = self.translate(text) if target is None else self._normalize(target)
        target_ids = tokenizers.target.encode(target)
        return source, [*task.prompt, *target_ids, task.stop_id]

    def _pair_task(self) -> Seq2Seq:
        return pair_task(self.config, cast(PairTokenizers, self.tokenizers))

    def _normalize(self, text: str) -> str:
        """A text as the training data was: in lower case where `data.lower` says so."""
        return text.lower() if self.config.data.lower else text

    def _normalize_input(self, what: Any) -> Any:
        if isinstance(what, str):
            return self._normalize(what)
        return tuple(map(self._normalize_input, what)) if isinstance(what, tuple) else what

    def _prompt(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise ConfigError(f"prompt={text!r} must be a string")
        return prompt_ids(self.tokenizer, self._normalize(text))

    def _engine(self, int8: bool = False) -> Engine:
        return self._engines.engine(int8)

    def _language(self, amateur: "Run | None" = None) -> Language:
        """The language model, or its contrastive combination with an amateur."""
        self._require("generate", "generate")
        model = cast(Language, self.model)
        if amateur is None:
            return model
        return ContrastiveDecoding(model, self._compatible_model(amateur, "amateur"))

    def _compatible_model(self, other: "Run", what: str) -> Language:
        """The language model of another run, which must have the same tokenizer."""
        if not isinstance(other, Run):
            raise ConfigError(f"the {what} must be a run, as regard.load returns, not {other!r}")
        other._require("generate", "generate")
        if other.tokenizer.fingerprint() != self.tokenizer.fingerprint():
            raise ConfigError(
                f"the {what} {other.folder.path} has another tokenizer than {self.folder.path};\n"
                "train it with the same data and data.tokenizer, or from the same run"
            )
        return cast(Language, other.model.to(self.device))

    def _task_class(self, what: str) -> type[Task]:
        """The class of the run's task; an imported model may have a head that no task trains."""
        kind = kind_of(self.config.task)[0]
        if kind not in TASKS:
            raise ConfigError(
                f"no task supports head={self.config.model['head']!r}, so the run cannot {what}; "
                "use run.model in Python"
            )
        return TASKS[kind]

    def _require(self, verb: str, what: str) -> None:
        """Raise if a method does not apply to the run's task."""
        task = self._task_class(what)
        if verb not in task.verbs:
            raise ConfigError(
                f"the task of {self.folder.path} is {kind_of(self.config.task)[0]!r}, which cannot "
                f"{what}; use `{task.verbs[0]}` instead"
            )


def _search(search: str | Search) -> Search:
    return parse_search(search) if isinstance(search, str) else search
