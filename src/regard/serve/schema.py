"""Request bodies and their limits: a larger request is refused before anything is computed."""

import json
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    field_validator,
    model_validator,
)

from regard.api.overrides import format_toml
from regard.errors import ConfigError
from regard.generate.samplers import SAMPLERS

MAX_TOKENS = 4096  # new tokens of a response
MAX_CHOICES = 16
MAX_RESPONSE = 2**17  # tokens and log-probabilities of all choices of a response
MAX_LOGPROBS = 20
MAX_STOP_STRINGS, MAX_STOP_LENGTH = 4, 256  # stop strings, and characters of each
MAX_TEXT = 200_000  # characters of a prompt
MAX_PROMPTS = 64
MAX_FIELDS = 256  # of a body
MAX_LIST = 1024  # entries of a sampler's list, and of logit_bias


def list_length(at_most: int, *, at_least: int = 1) -> Any:
    """Limits the length of a list; validation stops at the first error, since there may be many."""
    return Field(min_length=at_least, max_length=at_most, fail_fast=True)


Text = Annotated[str, Field(max_length=MAX_TEXT)]
Id = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Ids = Annotated[list[Id], list_length(MAX_TEXT)]
Number = Annotated[float, Field(allow_inf_nan=False, strict=True)]
Texts = Annotated[list[Text], list_length(4, at_least=2)]  # the texts of one input
Image = Annotated[str, Field(max_length=2**21)]  # an image file in base64, or its data: URL
Column = Annotated[list[Number], list_length(MAX_TEXT)]  # of a series
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Seed = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]

# Fields of OpenAI's and vLLM's API that become samplers.
OPENAI_SAMPLER_FIELDS = (
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_tokens",
    "logit_bias",
)
# Fields of OpenAI's and vLLM's API that are rejected: ignoring them would change the result.
REFUSED = (
    *("tools", "functions", "audio", "prediction", "web_search_options", "use_beam_search"),
    *("previous_response_id", "conversation", "background", "chat_template", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("allowed_token_ids", "bad_words", "include_stop_str_in_output", "prompt_logprobs"),
    *("dimensions", "truncate_prompt_tokens"),
)


class Body(BaseModel):
    """A request body; unknown fields are accepted and reported in the header x-regard-ignored."""

    model_config = ConfigDict(extra="allow")

    model: Annotated[str, Field(max_length=256)] | None = None
    user: Any = None

    @model_validator(mode="before")
    @classmethod
    def _check_field_count(cls, body: Any) -> Any:
        if isinstance(body, dict) and len(body) > MAX_FIELDS:
            raise ValueError(f"it has more than {MAX_FIELDS} fields")
        return body


class Sampling(Body):
    """How to continue a text. All samplers of the library may be given by their names."""

    seed: Seed | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop | Annotated[list[Stop], list_length(MAX_STOP_STRINGS, at_least=0)] | None = None
    stream: StrictBool | None = None
    stream_options: dict[str, Any] | None = None
    temperature: Annotated[Number, Field(ge=0, le=100)] | dict[str, Any] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | dict[str, Any] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-100, le=100)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-100, le=100)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, Field(pattern=r"^[0-9]{1,9}$")],
                Annotated[Number, Field(ge=-100, le=100)],
            ],
            Field(max_length=MAX_LIST),
        ]
        | None
    ) = None
    min_tokens: Annotated[StrictInt, Field(ge=0, le=MAX_TOKENS)] | None = None
    ignore_eos: StrictBool | None = None
    stop_token_ids: Annotated[list[Id], list_length(64, at_least=0)] | None = None
    sampler: (
        Annotated[list[Annotated[str, Field(max_length=4096)]], list_length(64, at_least=0)] | None
    ) = None  # as `regard generate -s`, in this order
    order: Annotated[str, Field(max_length=32)] | None = None  # as `regard generate --order`
    response_format: dict[str, Any] | None = None

    @field_validator("*", mode="before")
    @classmethod
    def _check_value(cls, value: Any) -> Any:
        """Refuse lone surrogates, which no tokenizer can encode, and large tables."""
        if isinstance(value, dict) and len(value) > MAX_LIST:
            raise ValueError(f"it has more than {MAX_LIST} entries")
        _check_text(value)
        return value

    def stop_strings(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def sampler_fields(self) -> dict[str, Any]:
        """The samplers that are given by name, whether as a declared field or as an extra one."""
        values = {**self.model_dump(exclude_none=True), **(self.model_extra or {})}
        return {name: values[name] for name in SAMPLERS if values.get(name) is not None}

    def specs(self) -> tuple[str, ...] | None:
        """The samplers as `regard generate -s` takes them; None: the default ones.

        Samplers that are given as fields are applied in the order of `SAMPLERS`.
        """
        if self.sampler is not None:
            openai_fields = [name for name in OPENAI_SAMPLER_FIELDS if getattr(self, name)]
            if names := [*self.sampler_fields(), *openai_fields]:
                raise ConfigError(
                    f"sampler: {names[0]} is given too; sampler names all samplers in their order, "
                    f"so put {names[0]} into it, or leave sampler out"
                )
            return tuple(self.sampler)
        specs = {name: to_spec(name, value) for name, value in self.sampler_fields().items()}
        if specs.get("top_k") == "top_k=-1":  # off, in vLLM's API
            del specs["top_k"]
        for name, value in (
            ("frequency", self.frequency_penalty),
            ("presence", self.presence_penalty),
        ):
            if value:
                specs.setdefault(name, f'{name}={{penalty={value}, scope="completion"}}')
        if self.repetition_penalty is not None:
            specs.setdefault("repetition", f"repetition={self.repetition_penalty}")
        if self.min_tokens:
            specs.setdefault("min_new_tokens", f"min_new_tokens={self.min_tokens}")
        by_value: dict[float, list[int]] = {}
        for token, value in (self.logit_bias or {}).items():
            by_value.setdefault(value, []).append(int(token))
        biases = [f"bias={{tokens={tokens}, value={value}}}" for value, tokens in by_value.items()]
        if not specs and not biases:
            return None
        ordered = [specs[name] for name in SAMPLERS if name in specs]
        return (*biases, *ordered)

    def ignored_fields(self) -> list[str]:
        """The names of unknown fields."""
        return [name for name in self.model_extra or {} if name not in SAMPLERS]


class CompletionBody(Sampling):
    """The body of /v1/completions."""

    prompt: (
        Text
        | Annotated[list[Text], list_length(MAX_PROMPTS)]
        | Ids
        | Annotated[list[Ids], list_length(MAX_PROMPTS)]
    ) = ""
    max_tokens: Annotated[StrictInt, Field(ge=0, le=MAX_TOKENS)] | None = None
    best_of: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: StrictBool | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None


class ContentPart(BaseModel):
    """A part of the content of a message; only text is supported."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "input_text", "output_text"]
    text: Text


class Message(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[ContentPart], list_length(64, at_least=0)]

    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatBody(Sampling):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], list_length(256)]
    max_tokens: Annotated[StrictInt, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class TextOptions(BaseModel):
    """The field `text` of /v1/responses."""

    model_config = ConfigDict(extra="allow")

    format: dict[str, Any] | None = None  # a `response_format`


class ResponsesBody(Sampling):
    """The body of /v1/responses."""

    text: TextOptions | None = None
    input: Text | Annotated[list[Message], list_length(256)]
    instructions: Text | None = None
    max_output_tokens: Annotated[StrictInt, Field(ge=1, le=MAX_TOKENS)] | None = None


class EmbeddingsBody(Body):
    """The body of /v1/embeddings."""

    input: (
        Text
        | Annotated[list[Text], list_length(MAX_PROMPTS)]
        | Ids
        | Annotated[list[Ids], list_length(MAX_PROMPTS)]
    )
    encoding_format: Literal["float", "base64"] = "float"


class TokenizeBody(Body):
    """The body of /tokenize."""

    prompt: Text
    add_special_tokens: StrictBool = True


class DetokenizeBody(Body):
    """The body of /detokenize."""

    tokens: Annotated[list[Id], list_length(MAX_TEXT, at_least=0)]


class TranslateBody(Body):
    """The body of /translate."""

    text: Text | Annotated[list[Text], list_length(MAX_PROMPTS)]
    beam: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] = 5
    length_penalty: Annotated[Number, Field(ge=-10, le=10)] = 1.0


class PredictBody(Body):
    """The body of /predict: texts, images or a series, depending on the task of the model."""

    input: (
        Text
        | Annotated[list[Text], list_length(MAX_PROMPTS)]
        | Annotated[list[Texts], list_length(MAX_PROMPTS)]
        | None
    ) = None
    image: Image | Annotated[list[Image], list_length(16)] | None = None
    series: Column | dict[Annotated[str, Field(max_length=256)], Column] | None = None
    steps: Annotated[StrictInt, Field(ge=1, le=MAX_TOKENS)] | None = None  # of a forecast
    top: Annotated[StrictInt, Field(ge=1, le=MAX_LOGPROBS)] = 3


class ExplainBody(Sampling):
    """The body of /explain: attention maps, the next-token table and the effect of samplers."""

    text: Annotated[str, Field(min_length=1, max_length=4096)]
    layer: Annotated[StrictInt, Field(ge=0, le=1000)] | None = None
    top: Annotated[StrictInt, Field(ge=1, le=MAX_LOGPROBS)] = 10
    tokens: Annotated[StrictInt, Field(ge=0, le=16)] = 1  # whose sampling is traced


def as_prompts(prompt: Any) -> list[str | list[int]]:
    """One or several prompts, each a text or ids, as a list."""
    if isinstance(prompt, str):
        return [prompt]
    return [prompt] if isinstance(prompt[0], int) else list(prompt)


def to_spec(name: str, value: Any) -> str:
    """A sampler's value from JSON as the text that `regard generate -s` takes.

    >>> to_spec("dry", {"multiplier": 0.8, "allowed_length": 3})
    'dry={multiplier=0.8,allowed_length=3}'
    """
    _check_entries(name, value)
    return f"{name}={format_toml(value)}"


def _check_entries(name: str, value: Any) -> None:
    """Raise if the value of a sampler contains null, or a list or a table that is too large."""
    if value is None:
        raise ConfigError(f"{name}: null is not a value of a sampler; leave it out")
    if isinstance(value, list | dict):
        if len(value) > MAX_LIST:
            raise ConfigError(f"{name}: {len(value):,} entries are more than {MAX_LIST:,}")
        for item in value.values() if isinstance(value, dict) else value:
            _check_entries(name, item)


def _check_text(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise ValueError("a text has a lone surrogate, which is not a character") from None
