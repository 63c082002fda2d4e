"""Make requests to the engine from the bodies of HTTP requests."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from regard.data.dialogues import MESSAGE_ROLES
from regard.errors import ConfigError
from regard.serve.models import ServedModel
from regard.serve.request import Request
from regard.serve.schema import MAX_RESPONSE, Sampling
from regard.text import PairTokenizers
from regard.text.chat_encoding import (
    chat_prompt_ids,
    response_end,
    special_stop_ids,
    template_variables,
)
from regard.text.chat_template import render
from regard.training.storage.initial_weights import run_template

SPEAKERS = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request to the engine, with the prompt and stop strings that its response needs."""

    request: Request
    text: str  # of the prompt
    stop_strings: list[str]

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt, or of the source."""
        return len(self.request.source or self.request.prompt)


def prepare(
    model: ServedModel,
    prompt: str | Sequence[int],
    body: Sampling,
    *,
    max_new_tokens: int,
    n: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    stop_strings: Sequence[str] = (),
    prompts: int = 1,
) -> PreparedRequest:
    """Make the request to the engine for a prompt; raise `ConfigError` if it is invalid.

    `stop_strings` are added to those of the body; `prompts` is the number of its prompts.
    """
    if model.engine is None:
        raise ConfigError(f"the model {model.name!r} does not generate text; use /predict")
    if (body.min_tokens or 0) > max_new_tokens:
        raise ConfigError(f"min_tokens: {body.min_tokens} is more than max_tokens={max_new_tokens}")
    size = prompts * n * max_new_tokens * (1 + (logprobs or 0))
    if size > MAX_RESPONSE:
        raise ConfigError(
            f"max_tokens={max_new_tokens} for {prompts} prompts, n={n} and "
            f"logprobs={logprobs or 0} gives up to {size:,} tokens and log-probabilities; "
            f"the limit is {MAX_RESPONSE:,}"
        )
    chain = model.chain(body.specs(), body.order)
    source = None
    if model.takes_source:
        if prompt_logprobs is not None:
            raise ConfigError(
                "echo with logprobs is for decoders, and this model is an encoder-decoder; leave "
                "out echo or logprobs"
            )
        task = model.run._pair_task()
        source = source_ids(model, prompt)
        text = prompt if isinstance(prompt, str) else ""
        ids, stop = list(task.prompt), {task.eos_id}
    else:
        text, ids = _prompt(model, prompt)
        ends = [special_stop_ids(model.tokenizer, end) for end in stop_strings]
        stop = set(model.tokenizer.stop_ids).union(*ends)
    stop = set() if body.ignore_eos else stop
    vocab = model.engine.language.vocab_size
    for token in body.stop_token_ids or ():
        check_token(token, vocab, "stop_token_ids")
        stop.add(token)
    constraints = []
    if body.response_format is not None:
        constraint = model.schemas.constraint(body.response_format)
        if constraint is not None:
            constraints = [constraint, *(constraint.copy() for _ in range(n - 1))]
    seed = secrets.randbits(62) if body.seed is None else body.seed
    request = Request(
        ids,
        chain,
        max_new_tokens,
        seed,
        frozenset(stop),
        n,
        source,
        logprobs,
        prompt_logprobs,
        constraints,
    )
    return PreparedRequest(request, text, [*body.stop_strings(), *stop_strings])


def _prompt(model: ServedModel, prompt: str | Sequence[int]) -> tuple[str, list[int]]:
    """The text and the ids of a prompt, which must fit into the context."""
    assert model.engine is not None
    ids = model.run._prompt(prompt) if isinstance(prompt, str) else list(prompt)
    limit = model.context
    if limit is not None and len(ids) > limit:
        raise ConfigError(
            f"prompt: it has {len(ids)} tokens, and the model's context is {limit}; shorten it"
        )
    if isinstance(prompt, str):
        return prompt, ids
    vocab = min(model.tokenizer.vocab_size, model.engine.language.vocab_size)
    for token in ids:
        check_token(token, vocab, "prompt")
    return model.tokenizer.decode(ids), ids


def source_ids(model: ServedModel, prompt: str | Sequence[int]) -> list[int]:
    """The source of an encoder-decoder: a text with its special ids, or ids as they are."""
    if isinstance(prompt, str):
        ids = encode_source(model, prompt)
    else:
        ids, vocab = list(prompt), cast(PairTokenizers, model.run.tokenizers).source.vocab_size
        for token in ids:
            check_token(token, vocab, "prompt")
    if model.context is not None and len(ids) > model.context:
        raise ConfigError(
            f"the source has {len(ids)} tokens, and the model's context is {model.context}; "
            "shorten it"
        )
    return ids


def encode_source(model: ServedModel, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The ids of a source text, by default with the special ids that the model was trained with."""
    source = cast(PairTokenizers, model.run.tokenizers).source
    ids = source.encode(model.run._normalize(text))
    if not add_special_tokens:
        return ids
    encoded: list[int] = (
        model.run._pair_task().source([np.asarray(ids, dtype=np.int64)]).ids[0].tolist()
    )
    return encoded


def check_token(token: int, vocab_size: int, name: str) -> None:
    """Raise if a token id of the field `name` is not in the vocabulary."""
    if not 0 <= token < vocab_size:
        raise ConfigError(f"{name}: token {token} is not in the vocabulary ({vocab_size=})")


def chat_prompt(
    model: ServedModel, messages: Sequence[tuple[str, str]]
) -> tuple[str | list[int], list[str]]:
    """The prompt of a conversation, as text or ids, and the strings that end the response.

    The chat template of the run gives ids, as in `regard chat`. Without a template, each message is
    a line with the name of its speaker. An encoder-decoder reads the last message only.
    """
    if model.takes_source:
        return messages[-1][1], []
    template = run_template(model.run.folder, model.run.config)
    if template is not None:
        turns = _turns(model, messages)
        _, end = response_end(model.tokenizer, template)
        return chat_prompt_ids(model.tokenizer, template, turns), [end] if end else []
    lines = [f"{SPEAKERS[role]}: {text}\n" for role, text in messages]
    return "".join([*lines, "Assistant:"]), ["\nUser:", "\nSystem:"]


def formatted_messages(model: ServedModel, messages: Sequence[tuple[str, str]]) -> str | None:
    """The text of a conversation after the chat template; None if no template is applied."""
    template = run_template(model.run.folder, model.run.config)
    if template is None or model.takes_source:
        return None
    variables = template_variables(model.tokenizer)
    return render(
        template, _turns(model, messages), add_generation_prompt=True, variables=variables
    )


def _turns(model: ServedModel, messages: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The messages with the roles of chat templates."""
    normalize = model.run._normalize
    return [(MESSAGE_ROLES.get(role, "user"), normalize(text)) for role, text in messages]
