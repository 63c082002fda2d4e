"""A trained run: load it, generate, predict, evaluate, explain, export."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.accel import attach_onednn_linear
from regard.api.explanation import (
    all_attention,
    head_scores,
    layer_attention,
    states,
    text_attribution,
    text_gradients,
    text_head_effects,
    text_logit_lens,
)
from regard.api.forecasting import (
    backtest_validation,
    evaluation_figure,
    future_figure,
    next_dates,
    next_values,
)
from regard.api.formatting import format_number
from regard.api.generation import (
    SMALL_MODEL,
    DecoderCache,
    chain_for,
    generate_text,
    prompt_ids,
    search_text,
    stream_response,
    stream_text,
    translate_text,
    translation_search,
)
from regard.api.prediction import (
    check_top,
    predict_rows,
    predict_values,
    read_inputs,
    unknown_parts,
)
from regard.api.run_evaluation import (
    evaluate_all,
    evaluate_by_length,
    evaluate_logged_metrics,
    evaluation_search,
    validation_data,
)
from regard.api.similarity import (
    nearest_words,
    similar_texts,
    text_embeddings,
    word_occurrences,
)
from regard.config import Choice, RunConfig, kind_of
from regard.errors import ConfigError
from regard.explain.attribution import Attribution
from regard.explain.gradient import GradientFlow
from regard.explain.heads import HeadScores
from regard.explain.lens import LensPredictions
from regard.explain.token_map import AttentionMaps, StateMaps
from regard.generate import (
    DEFAULT_SAMPLERS,
    Chain,
    CudaGraphDecoder,
    PromptLookup,
    Search,
)
from regard.html import html_table
from regard.hub.external_checkpoint import is_external_checkpoint, open_checkpoint
from regard.models.build import check_weights, load_model, resolve, weights
from regard.pipelines import Pipeline, pipeline_of, tokenizer_fingerprint
from regard.pipelines.base import Progress, Tokenizers
from regard.pipelines.by_length import MetricsByLength
from regard.pipelines.pairs import pair_task
from regard.pipelines.series_forecasts import ColumnForecast
from regard.pipelines.strokes import stroke_task
from regard.tasks import TASKS, Seq2Seq, Task
from regard.text import PairTokenizers, Tokenizer
from regard.training.import_export import ExportResult, export_as
from regard.training.setup.device import pick_device, use_threads
from regard.training.storage.evaluation import Evaluation
from regard.training.storage.imported import imported_run_config
from regard.training.storage.initial_weights import open_adapter, run_weights
from regard.training.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def load(path: Path | str, device: str = "auto", *, adapter: Path | str | None = None) -> "Run":
    """Open a run folder, or a Hugging Face checkpoint folder as if it were one.

    `adapter` is merged into the weights: a run with a LoRA adapter or a PEFT folder, given by its
    path or by its name in the folder `adapters` of the run.

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
        lora, config = open_adapter(path, adapter, config, tokenizers)
        merged = lora.merge(weights(model))
        check_weights(model, merged, str(adapter))
        model.load_state_dict(merged, strict=False, assign=True)
    target = torch.device("cpu") if hasattr(model, "fit") else pick_device(device)
    if target.type == "cpu":
        attach_onednn_linear(model)
    return Run(folder, config, model.to(target).eval(), tokenizers, target)


@dataclass(frozen=True, repr=False)
class Run:
    """A trained model with its tokenizer and its settings.

    >>> run  # doctest: +ELLIPSIS
    Run('.../runs/cats': transformer, 4,080 parameters, causal, validation loss 3...)
    >>> run.methods
    ('generate', 'search', 'gradients')
    """

    folder: RunFolder
    config: RunConfig
    model: nn.Module
    tokenizers: Tokenizers | None  # None: the model does not read text
    device: torch.device
    _decoders: DecoderCache = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_decoders", DecoderCache(self.model))

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
        """The number of parameters, or of the values that a model with `fit` stores."""
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
    def methods(self) -> tuple[str, ...]:
        """The methods of this class that apply to the run's task, the main one first."""
        return () if self._task is None else self._task.methods

    @property
    def unit(self) -> str:
        """The unit of the metrics, where it is not obvious."""
        return "" if self._task is None else self._task.unit

    @property
    def predicts_words(self) -> bool:
        """Whether `predict` gives one prediction for each word of a text."""
        return self._task is not None and self._task.predicts_words

    @property
    def supports_top(self) -> bool:
        """Whether `predict` gives the `top` most probable classes, tokens or answers."""
        return self._task is not None and self._task.supports_top

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs of `predict`: ("text",), or those of two texts.

        >>> labels.inputs
        ('text',)
        """
        if self._task is None:
            return ("text",)
        return self.pipeline.input_names(self.config)

    @property
    def metrics(self) -> dict[str, float]:
        """The validation metrics of the saved model; empty for an external checkpoint."""
        return {} if is_external_checkpoint(self.folder.path) else self.folder.best_metrics()

    def export(
        self,
        out: Path | str,
        *,
        model_type: str | None = None,
        format: Literal["transformers", "onnx", "gguf"] = "transformers",
        type: Literal["f32", "f16", "q8_0", "q4_k"] | None = None,
    ) -> ExportResult:
        """Write the run as a folder for Hugging Face transformers, or with an ONNX or GGUF file.

        `model_type` is that of transformers, by default the first that supports the settings of
        the model; `type` is that of the weights of a GGUF file, by default f32. The outputs are
        compared with those of the other library, if it is installed.

        >>> run.export("exported").model_type
        'gpt2'
        """
        return export_as(self.folder.path, Path(out), format, model_type, type)

    def generate(
        self,
        prompt: str | Sequence[str] = "",
        *,
        max_new_tokens: int = 200,
        sampler: str | Sequence[str] | Chain = DEFAULT_SAMPLERS,
        seed: int | None = None,
        draft: "Run | PromptLookup | None" = None,
        amateur: "Run | None" = None,
        stop_strings: str | Sequence[str] = (),
        int8: bool = False,
        float16: bool = False,
        int4: bool = False,
    ) -> Any:
        """Continue a prompt, or each of a list; the result does not include the prompt.

        A text ends before the first of the `stop_strings`. For a list of prompts, a list of texts
        is returned; prompt n of the list has the seed `seed` + n, and its text is the same as when
        it is generated alone with this seed.

        `draft` is the draft model of speculative decoding: a run with a smaller model, or
        `PromptLookup()`. The distribution of texts does not change; whether generation is faster
        depends on the draft's acceptance rate and cost. `amateur` is a run with a weaker model for
        contrastive decoding. With `int8` a decoder uses 8-bit weights: faster where it is large,
        at a small loss of accuracy; with `float16`, on a CPU, 16-bit weights; with `int4`, on a
        GPU, 4-bit weights. An empty prompt starts a new line of text.

        >>> settings = {"max_new_tokens": 20, "sampler": ["temperature=0.7", "top_k=5"], "seed": 1}
        >>> run.generate("the ", **settings) == run.generate("the ", **settings)
        True
        """
        return generate_text(
            self,
            prompt,
            max_new_tokens=max_new_tokens,
            sampler=sampler,
            seed=seed,
            draft=draft,
            amateur=amateur,
            stop_strings=stop_strings,
            int8=int8,
            float16=float16,
            int4=int4,
        )

    def stream(
        self,
        prompt: str = "",
        *,
        max_new_tokens: int = 200,
        sampler: str | Sequence[str] | Chain = DEFAULT_SAMPLERS,
        seed: int | None = None,
        draft: "Run | PromptLookup | None" = None,
        amateur: "Run | None" = None,
        stop_strings: str | Sequence[str] = (),
        int8: bool = False,
        float16: bool = False,
        int4: bool = False,
    ) -> Iterator[str]:
        """Continue a prompt and yield the text in chunks; see `generate`.

        >>> chunks = run.stream("the ", max_new_tokens=20, seed=1)
        >>> "".join(chunks) == run.generate("the ", max_new_tokens=20, seed=1)
        True
        """
        return stream_text(
            self,
            prompt,
            max_new_tokens=max_new_tokens,
            sampler=sampler,
            seed=seed,
            draft=draft,
            amateur=amateur,
            stop_strings=stop_strings,
            int8=int8,
            float16=float16,
            int4=int4,
        )

    def chat(
        self,
        messages: str | Sequence[tuple[str, str]],
        *,
        max_new_tokens: int = 400,
        sampler: str | Sequence[str] | Chain = DEFAULT_SAMPLERS,
        seed: int | None = None,
    ) -> Iterator[str]:
        """Respond to the last message of a dialogue, and yield the response in chunks.

        `messages` is a message of the user, or pairs of a role (system, user, assistant) and a
        text. The oldest messages are left out where the dialogue does not fit the context.

        >>> "".join(talk.chat("101?", max_new_tokens=5, seed=1)) == "".join(
        ...     talk.chat([("user", "101?")], max_new_tokens=5, seed=1)
        ... )
        True
        """
        return stream_response(
            self, messages, max_new_tokens=max_new_tokens, sampler=sampler, seed=seed
        )

    def chain(self, specs: str | Sequence[str] | None = None, order: str | None = None) -> Chain:
        """A chain of samplers, in which tokens may be named by their text: `ban=["the"]`.

        `order` names the library whose order and defaults apply: regard, hf, llama.cpp, textgen.

        >>> print(run.chain(["temperature=0.7", "top_p=0.9"]))
        temperature=0.7 → top_p=0.9 → sample
        """
        self._require("generate", "generate")
        return chain_for(self.tokenizer, specs, order)

    def search(
        self,
        prompt: str = "",
        *,
        max_new_tokens: int = 200,
        search: str | Search = "beam=5",
        amateur: "Run | None" = None,
    ) -> list[tuple[str, float]]:
        """The continuations of a prompt that a search returns, with their scores, best first.

        >>> best, second = run.search("the ", max_new_tokens=5, search="beam={width=2, n_best=2}")
        >>> best[1] >= second[1]
        True
        """
        return search_text(
            self, prompt, max_new_tokens=max_new_tokens, search=search, amateur=amateur
        )

    def translate(
        self,
        text: str | Sequence[str],
        *,
        beam: int | None = None,
        length_penalty: float | None = None,
        search: str | Search | None = None,
    ) -> Any:
        """Translate a sentence, or a list of sentences.

        The search is beam search, by default with `beam=5` and `length_penalty=1`, or the one that
        `search` describes, as in "beam={width=5, normalization='gnmt'}".

        >>> len(translator.translate(["117 cats", "118 cats"], beam=2))
        2
        """
        return translate_text(self, text, translation_search(search, beam, length_penalty))

    def predict(self, inputs: Any = None, *, top: int = 3) -> Any:
        """The prediction of the run's task for one input, or for each of a list.

        For a text: the most probable classes of it or of each of its words, or the most probable
        tokens for each <mask>. For an image: its most probable classes. For a series: its next
        values; without an input, those of the series that the run was trained on.
        Classes and tokens come with their probabilities, best first. For a run trained on pairs:
        the translation of a sentence. Where the task reads two texts, an input is a tuple of both,
        as in `run.predict(("Who wrote it?", "Ada wrote it."))`.

        >>> [[(best, probability), second]] = labels.predict("a good film", top=2)
        >>> best in ("good", "bad") and probability >= second[1]
        True
        """
        self._require("predict", "predict")
        return predict_values(self, inputs, top)

    def predict_file(
        self, path: Path | str, *, column: str | None = None, top: int = 1
    ) -> Iterator[dict[str, Any]]:
        """The rows of a file with a `prediction` each, and for classes a `probability`.

        The file is a table with the inputs in a `column` (by default found as in training), a text
        file with one text per line, a CoNLL file, or a folder of images.

        >>> row = next(iter(labels.predict_file(labelled)))
        >>> row["text"], row["prediction"] in ("good", "bad")
        ('a good film 0', True)
        """
        self._require("predict", "predict")
        return predict_rows(self, read_inputs(self, path, column).rows, top=top)

    def forecast(self, series: str | Path | None = None, *, steps: int | None = None) -> Any:
        """The next values of a series: a list, or for several columns a dict of lists.

        `series` is a file or a built-in; without it, the data of the run, validation included, or
        the data of `data.validation` alone. A forecast of more `steps` than the horizon, which is
        the default, is recursive.

        >>> len(series.forecast(steps=3))
        3
        """
        return next_values(self, series, steps)

    def forecast_dates(
        self, series: str | Path | None = None, *, steps: int | None = None
    ) -> list[str]:
        """The dates of the next rows of a series; empty if its rows have no dates.

        >>> series.forecast_dates(steps=3)
        []
        """
        return next_dates(self, series, steps)

    def draw_forecast(
        self,
        series: str | Path | None = None,
        *,
        steps: int | None = None,
        column: str | None = None,
    ) -> "Figure":
        """The next values of a column, and one-step-ahead forecasts of its last true values.

        >>> len(series.draw_forecast(steps=3).axes)
        2
        """
        return future_figure(self, series, steps, column)

    def draw_evaluation(
        self, *data: Choice, test: bool = False, column: str | None = None
    ) -> "Figure":
        """The last values of a column of the validation data with its forecasts, and the errors.

        >>> len(series.draw_evaluation().axes)
        2
        """
        return evaluation_figure(self, data, test, column)

    def backtest(self) -> ColumnForecast:
        """The end of the validation series, in its first column, and its forecasts.

        >>> forecast = series.backtest()
        >>> len(forecast.truth) == len(forecast.forecast) == len(forecast.one_step)
        True
        """
        return backtest_validation(self)

    def classify(
        self, image: str | Path | NDArray[Any], *, top: int = 3
    ) -> list[tuple[str, float]]:
        """The most probable classes of an image with their probabilities, best first.

        `image` is a file, or an array of height and width, with channels first, last or none.

        >>> (best, probability), second = images.classify(image, top=2)
        >>> best in ("dark", "light") and probability >= second[1]
        True
        """
        self._require("classify", "classify images")
        check_top(top)
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

        `label` is the class to draw, for a model with classes, or the text, for a model with a soft
        window; a larger `bias` draws more neatly.
        `explain.render.strokes.to_svg` renders the drawings.

        >>> drawings.draw(count=2, seed=0)[0].shape[1]
        3
        """
        self._require("draw", "draw")
        task = stroke_task(self.config.task)
        condition: Any = {"text": label} if task.alphabet else {"label": task.class_index(label)}
        return task.draw(self.model, count, **condition, bias=bias, seed=seed)

    def fill(self, text: str, *, top: int = 5) -> list[list[tuple[str, float]]]:
        """The most probable tokens for each <mask> in a text with their probabilities, best first.

        >>> (candidates,) = masked.fill("the <mask> sat on the mat", top=2)
        >>> len(candidates)
        2
        """
        self._require("fill", "fill in masked tokens")
        check_top(top)
        filled = self.pipeline.predict(self, self._normalize(text), top=top)
        return cast(list[list[tuple[str, float]]], filled)

    def neighbours(
        self, words: str | Sequence[str], *, top: int = 10
    ) -> dict[str, list[tuple[str, float]]]:
        """The words with the most similar embedding vectors and their cosines, best first.

        `words` are single words or signed sums: "war king - man + woman" is two queries.

        >>> near = run.neighbours("c", top=2)
        >>> [word for word in near], len(near["c"])
        (['c'], 2)
        """
        return nearest_words(self, words, top)

    def embed(self, texts: str | Sequence[str]) -> torch.Tensor:
        """The L2-normalized embeddings of texts: a vector, or a row for each of a list.

        >>> near.embed(["12 cats", "13 cats"]).shape
        torch.Size([2, 16])
        """
        return text_embeddings(self, texts)

    def similar(
        self,
        texts: str | Sequence[str],
        among: Sequence[str] | Path | str | None = None,
        *,
        top: int = 10,
    ) -> dict[str, list[tuple[str, float]]]:
        """The texts with the most similar embeddings and their cosines, best first.

        `among` is a list of texts to search, or the path of a file with one on each line; by
        default they are those of the validation data.

        >>> [(best, cosine), _] = near.similar("12 cats", ["12 cats", "no dog"], top=2)["12 cats"]
        >>> best, round(cosine, 4)
        ('12 cats', 1.0)
        """
        return similar_texts(self, texts, among, top)

    def compare_occurrences(self, word: str, text: str) -> dict[str, Any]:
        """Cosines between the vectors of a word at all its positions in a text.

        See `explain.neighbours.compare_occurrences`.

        >>> run.compare_occurrences("c", "cat, cat")["positions"]
        [1, 6]
        """
        return word_occurrences(self, word, text)

    def evaluate(
        self,
        *data: Choice,
        beam: int | None = None,
        length_penalty: float | None = None,
        stride: int | None = None,
        test: bool = False,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """All metrics of the run's task on its own validation data, or on other data.

        >>> sorted(run.evaluate())
        ['bits_per_byte', 'loss', 'perplexity']

        A language model predicts each token from a window of its context; windows advance by
        `stride` tokens (by default `train.evaluate_stride`). A smaller stride gives every token
        more context, and takes longer. `test` evaluates on the test split, which series with
        `data.split` and archives of strokes may have.
        Translations and captions are generated by beam search, by default with `beam=5` and
        `length_penalty=1`; other tasks have no search.
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
        beam: int | None = None,
        length_penalty: float | None = None,
        stride: int | None = None,
        test: bool = False,
        progress: Progress | None = None,
    ) -> Evaluation:
        """The metrics of `evaluate`, with the number of targets, the context and the stride.

        >>> run.evaluation().is_complete
        True

        The metrics of the run's own validation data are stored in its folder, where `info` and
        `compare` find them.
        """
        return evaluate_all(
            self,
            data,
            search=evaluation_search(self, beam, length_penalty),
            stride=stride,
            test=test,
            progress=progress,
        )

    def evaluate_logged_metrics(
        self, *, stride: int | None = None, progress: Progress | None = None
    ) -> Evaluation:
        """Compute and store the metrics that training logs, on all validation data of the run.

        >>> run.evaluate_logged_metrics().metrics == run.metrics
        True
        """
        return evaluate_logged_metrics(self, stride, progress)

    def evaluate_by_length(
        self, *data: Choice, beam: int | None = None, length_penalty: float | None = None
    ) -> MetricsByLength:
        """The metrics of predictions or translations, for short and for long texts separately.

        >>> translator.evaluate_by_length(beam=1).unit
        'words'
        """
        self._require("evaluate_by_length", "be evaluated by length")
        return evaluate_by_length(self, data, evaluation_search(self, beam, length_penalty))

    def validation_pairs(self, limit: int | None = None) -> list[tuple[str, str]]:
        """The first source and target sentences of the run's validation data.

        >>> [(source, target)] = translator.validation_pairs(1)
        >>> source.endswith("cats"), target.endswith("chats")
        (True, True)
        """
        self._require("translate", "translate")
        return list(islice(cast(Any, validation_data(self)).rows(), limit))

    def explain(
        self,
        input: str | tuple[str, ...],
        *,
        layer: int | None = None,
        pattern: str | None = None,
        words: bool = False,
    ) -> AttentionMaps:
        """Attention maps of one layer, by default the last; for pairs, its cross-attention.

        `pattern` selects others by path, as in "encoder.blocks.*". See `attention` for all layers.
        For a captioning run, `input` is an image file, and the maps show the attention of each
        token of the caption over the regions of the image; for other runs it is a text, or a tuple
        of two texts, such as a question and a context.

        >>> run.explain("the cat")
        {'decoder.blocks.0.attention': AttentionMap(2 heads, 7 × 7 tokens)}
        """
        return layer_attention(self, input, layer=layer, pattern=pattern, words=words)

    def attention(
        self,
        input: Any,
        *,
        target: str | None = None,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
        pattern: str | None = None,
        words: bool = False,
    ) -> AttentionMaps:
        """All attention weights of the model for a text or an image, with tokens as labels.

        For pairs and captions, this is the self-attention of encoder and decoder and the
        cross-attention, for the model's own output or a given `target`. `layers`, `heads` and
        `rows` (indices of queries) select a part, so that a long text needs little memory;
        `pattern` selects modules by their path. With `words`, tokens are merged into words.

        >>> run.attention("the cat", heads=[1], words=True)
        {'decoder.blocks.0.attention': AttentionMap(1 head, 2 × 2 tokens)}
        """
        return all_attention(
            self,
            input,
            target=target,
            layers=layers,
            heads=heads,
            rows=rows,
            pattern=pattern,
            words=words,
        )

    def states(self, input: str | tuple[str, ...], *, pattern: str = "*") -> StateMaps:
        """The gates and the hidden state of each recurrent layer at each token of a text.

        For pairs, encoder and decoder are included, and the decoder reads the model's own
        translation; for a captioning run, `input` is an image file, and the decoder reads the
        model's own caption.

        >>> run.states("the cat")
        Traceback (most recent call last):
        regard.errors.RegardError: no recurrent layer matches '*'; Transformer has none
        """
        return states(self, input, pattern)

    def find_heads(self, *, seed: int = 0) -> HeadScores:
        """Scores of every head of a decoder: previous token, induction, duplicate token, copying.

        See `explain.find_heads`; special tokens are left out of its random sequences.

        >>> run.find_heads().scores["induction"].shape  # (layers, heads)
        torch.Size([1, 2])
        """
        return head_scores(self, seed)

    def head_effects(self, text: str, *, mean: bool = False) -> dict[str, Tensor]:
        """The increase in the loss of a text when each head is ablated, in nats per token.

        For pairs, the loss is that of the model's own translation of the text.

        Ablation sets the output of the head to zero, or with `mean` to its mean over positions.

        >>> run.head_effects("the cat sat")["decoder.blocks.0.attention"].shape
        torch.Size([2])
        """
        return text_head_effects(self, text, mean)

    def logit_lens(self, text: str) -> LensPredictions:
        """The next token that each layer would predict at each position of a text.

        >>> run.logit_lens("the cat")
        LensPredictions(2 layers, 7 tokens)
        """
        return text_logit_lens(self, text)

    def attribution(self, text: str | tuple[str, ...], output: str | None = None) -> Attribution:
        """The contribution of each token to the most probable class or next token, or to `output`.

        Contributions are integrated gradients of the logit, with embeddings of 0 as baseline.

        >>> len(run.attribution("the cat").values)
        7
        """
        return text_attribution(self, text, output)

    def gradients(self, text: str) -> GradientFlow:
        """The gradient norm of the last token's loss with respect to each earlier state.

        For a run trained on pairs, the loss is that of the last token of the model's translation of
        `text`, and the positions are those of the source, in the order in which the encoder reads.

        >>> len(run.gradients("the cat").by_distance())
        6
        """
        return text_gradients(self, text)

    def unknown_parts(self, text: str | tuple[str, ...]) -> list[str]:
        """The parts of a text, or of several, that are not in the run's vocabulary.

        >>> run.unknown_parts("the cat ?")
        ['?']
        """
        return unknown_parts(self, text)

    def limit_threads(self) -> None:
        """Decode a small model with one CPU thread: synchronizing several costs more than it saves.

        >>> run.limit_threads()
        """
        use_threads(1 if self.parameters < SMALL_MODEL else None)

    @property
    def _task(self) -> type[Task] | None:
        """The class of the run's task; None for an imported head that no task trains."""
        return TASKS.get(kind_of(self.config.task)[0])

    def _pair_task(self) -> Seq2Seq:
        return pair_task(self.config, cast(PairTokenizers, self.tokenizers))

    def _normalize(self, text: str) -> str:
        """Lowercase a text if `data.lower` is set, as the training data was."""
        return text.lower() if self.config.data.lower else text

    def _prompt(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise ConfigError(f"prompt={text!r} must be a string")
        return prompt_ids(self.tokenizer, self._normalize(text))

    def _decoder(
        self, int8: bool = False, float16: bool = False, int4: bool = False
    ) -> CudaGraphDecoder:
        return self._decoders.decoder(int8, float16, int4)

    def _task_class(self, action: str) -> type[Task]:
        """The class of the run's task; raise if no task trains its head."""
        if self._task is None:
            raise ConfigError(
                f"no task supports head={self.config.model['head']!r}, so the run cannot {action}; "
                "use run.model in Python"
            )
        return self._task

    def _require(self, method: str, action: str) -> None:
        """Raise if a method does not apply to the run's task; `action` describes the method."""
        task = self._task_class(action)
        if method not in task.methods:
            main = task.methods[0]
            use = "`regard generate`, in Python `run.draw`," if main == "draw" else f"`{main}`"
            raise ConfigError(
                f"the task of {self.folder.path} is {kind_of(self.config.task)[0]!r}, which cannot "
                f"{action}; use {use} instead"
            )
