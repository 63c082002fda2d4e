"""From the body of a request to a request to the engine."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from regard.data.dialogues import ROLES
from regard.errors import ConfigError
from regard.serve.models import ServedModel
from regard.serve.request import Request
from regard.serve.schema import Sampling
from regard.text import PairTokenizers
from regard.text.chat_encoding import chat_prompt_ids, response_end, special_end
from regard.training.storage.start import run_template

SPEAKERS = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request to the engine, and what its answer needs besides."""

    request: Request
    text: str  # of the prompt
    stops: list[str]

    @property
    def prompt_tokens(self) -> int:
        """How many ids the prompt has."""
        return len(self.request.source or self.request.prompt)


def prepare(
    model: ServedModel,
    prompt: str | Sequence[int],
    body: Sampling,
    *,
    tokens: int,
    n: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    more_stops: Sequence[str] = (),
) -> PreparedRequest:
    """The request to the engine for a prompt; an error if it cannot be answered."""
    if model.engine is None:
        raise ConfigError(f"the model {model.name!r} does not generate text; use /predict")
    chain = model.chain(body.specs(), body.order)
    source = None
    if model.takes_source:
        if prompt_logprobs is not None:
            raise ConfigError("echo with logprobs is for decoders; this model reads a source")
        task = model.run._pair_task()
        source = source_ids(model, prompt)
        text = prompt if isinstance(prompt, str) else ""
        ids, stop = list(task.prompt), {task.eos_id}
    else:
        text, ids = _prompt(model, prompt)
        ends = [special_end(model.tokenizer, end) for end in more_stops]
        stop = set(model.tokenizer.stop_ids).union(*ends)
    stop = set() if body.ignore_eos else stop
    vocab = model.engine.language.vocab_size
    for token in body.stop_token_ids or ():
        _check_id(token, vocab, "stop_token_ids")
        stop.add(token)
    constraints = []
    if body.response_format is not None:
        all_constraints = [model.schemas.constraint(body.response_format) for _ in range(n)]
        constraints = [constraint for constraint in all_constraints if constraint is not None]
    seed = secrets.randbits(62) if body.seed is None else body.seed
    request = Request(
        ids,
        chain,
        tokens,
        seed,
        frozenset(stop),
        n,
        source,
        logprobs,
        prompt_logprobs,
        constraints,
    )
    return PreparedRequest(request, text, [*body.stops(), *more_stops])


def _prompt(model: ServedModel, prompt: str | Sequence[int]) -> tuple[str, list[int]]:
    """The text and the ids of a prompt, which must fit into the context."""
    assert model.engine is not None
    if isinstance(prompt, str):
        text, ids = prompt, model.run._prompt(prompt)
    else:
        ids = list(prompt)
        for token in ids:
            _check_id(
                token, min(model.tokenizer.vocab_size, model.engine.language.vocab_size), "prompt"
            )
        text = model.tokenizer.decode(ids)
    limit = model.context
    if limit is not None and len(ids) > limit:
        raise ConfigError(
            f"the prompt has {len(ids)} tokens, and the model's context is {limit}; shorten it"
        )
    return text, ids


def source_ids(model: ServedModel, prompt: str | Sequence[int]) -> list[int]:
    """The source of an encoder-decoder, with the special ids that it was trained with."""
    source = cast(PairTokenizers, model.run.tokenizers).source
    ids = (
        list(prompt) if not isinstance(prompt, str) else source.encode(model.run._normalize(prompt))
    )
    for token in ids:
        _check_id(token, source.vocab_size, "prompt")
    framed = model.run._pair_task().source([np.asarray(ids, dtype=np.int64)])
    if model.context is not None and framed.ids.shape[1] > model.context:
        raise ConfigError(
            f"the source has {framed.ids.shape[1]} tokens, and the model's context is "
            f"{model.context}; shorten it"
        )
    return framed.ids[0].tolist()


def _check_id(token: int, vocab: int, name: str) -> None:
    if not 0 <= token < vocab:
        raise ConfigError(f"{name}: token {token} is not in the vocabulary of {vocab}")


def chat_prompt(
    model: ServedModel, messages: Sequence[tuple[str, str]]
) -> tuple[str | list[int], list[str]]:
    """A conversation as a text or ids that the model continues, and where its answer ends.

    Ids by the chat template of the run, as `regard chat`; without one, each message is a line with
    the name of its speaker. An encoder-decoder reads the last message only.
    """
    if model.takes_source:
        return messages[-1][1], []
    template = run_template(model.run.folder, model.run.config)
    if template is not None:
        normalize = model.run._normalize
        named = [(ROLES.get(role, "user"), normalize(text)) for role, text in messages]
        _, end = response_end(model.tokenizer, template)
        return chat_prompt_ids(model.tokenizer, template, named), [end] if end else []
    lines = [f"{SPEAKERS[role]}: {text}\n" for role, text in messages]
    return "".join([*lines, "Assistant:"]), ["\nUser:", "\nSystem:"]
