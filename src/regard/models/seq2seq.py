"""Recurrent models that read one sequence and write another, with attention or without."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.config import Choice, kind_of, make
from regard.errors import ConfigError, unknown
from regard.models.base import LanguageModel, State
from regard.models.compatibility import SEQ2SEQ, check_rules
from regard.nn.head import Head
from regard.nn.recurrent import CELLS, Cell, CellState, Recurrent, Snapshots
from regard.nn.recurrent_attention import AttentionOutput, Hard, RecurrentAttention
from regard.nn.score import SCORES
from regard.nn.state import Source


@dataclass(frozen=True, kw_only=True, slots=True)
class Seq2SeqConfig:
    """Two stacks of recurrent layers: one reads, the other writes and may look back."""

    vocab_size: int
    source_vocab_size: int | None = None  # None: one vocabulary for both sides
    cell: Choice = "lstm"  # nn.recurrent.CELLS
    dim: int = 256  # of the embeddings and of every layer
    layers: int = 1  # of the decoder
    encoder_layers: int | None = None  # None: as many as `layers`
    bidirectional: bool = True  # the encoder also reads from the end
    reversed_source: bool = False  # it reads the last id first
    bridge: bool = True  # the decoder begins where the encoder ended; else at zeros
    score: Choice | None = None  # nn.score.SCORES; None: the bridge is all there is
    placement: Literal["bahdanau", "luong", "between"] = "luong"  # see `EncoderDecoder`
    input_feeding: bool = False  # luong: what was last read off joins the next input
    heads: int | None = None  # looks with matrices of their own; None: one, at the states as such
    hops: int = 1  # looks in a row, each with what the one before has found
    hard: Hard | None = None  # look at one place only; nn.glimpse
    dropout: float = 0.0  # of embeddings, between layers, and of what the head reads
    tied: bool = True  # output matrix = embedding matrix of the target
    context: int = 256  # ids of a training pair; generating has no limit

    def __post_init__(self) -> None:
        for name in ("vocab_size", "source_vocab_size", "dim", "layers", "encoder_layers"):
            _at_least_one(name, getattr(self, name))
        for name in ("heads", "hops", "context"):
            _at_least_one(name, getattr(self, name))
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout={self.dropout} must be at least 0 and below 1")
        for name, choice, table in (
            ("cell", self.cell, CELLS),
            ("score", self.score, SCORES),
        ):
            if choice is not None and (kind := kind_of(choice)[0]) not in table:
                raise ConfigError(unknown(name, kind, table))
        check_rules(self, SEQ2SEQ)

    @property
    def shape(self) -> str:
        """What tasks ask of a model: it reads a source."""
        return "encoder-decoder"

    @property
    def depths(self) -> tuple[int, int]:
        """How many layers the encoder and the decoder have."""
        return self.layers if self.encoder_layers is None else self.encoder_layers, self.layers


def _at_least_one(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{name}={value} must be at least 1")


@dataclass(frozen=True, slots=True)
class Memory:
    """What was read: for each hop keys and values, (rows, heads, source, head_dim)."""

    hops: list[tuple[Tensor, Tensor]]
    allowed: Bool[Tensor, "rows 1 1 source"]  # what of the source is not padding

    def select(self, rows: Int[Tensor, " chosen"]) -> "Memory":
        """That of these rows."""
        hops = [(k.index_select(0, rows), v.index_select(0, rows)) for k, v in self.hops]
        return Memory(hops, self.allowed.index_select(0, rows))


@dataclass(frozen=True, slots=True)
class ReaderState:
    """What writing remembers: the states of the decoder, and what was read."""

    written: Snapshots  # of each layer, then what is fed back
    memory: Memory

    @property
    def lengths(self) -> Int[Tensor, " rows"]:
        """How many ids each row has taken in."""
        return self.written.lengths

    def select(self, rows: Int[Tensor, " chosen"]) -> "ReaderState":
        """The state of these rows, in this order."""
        return ReaderState(self.written.select(rows), self.memory.select(rows))

    def rewind(self, lengths: Int[Tensor, " rows"]) -> "ReaderState":
        """Forget all but the first `lengths` ids of each row, within the last step."""
        return replace(self, written=self.written.rewind(lengths))


class EncoderDecoder(LanguageModel):
    r"""Read a sequence into states h_1 ... h_S, then write another from states s_1, s_2, ...

        h_i = encoder(x_1 ... x_i),                       both ways: h_i = tanh(J [->h_i; <-h_i])
        s_0 = the encoder's last state,                   both ways: s_0 = tanh(B [->h_S; <-h_1])
        c_t = sum_i softmax_i(score(q_t, h_i)) h_i        where there is attention
        logits_t = W z_t + b

    where to look from and what c_t enters is the placement (e_t the embedding of y_{t-1}):

        none        s_t = cell(s_{t-1}, e_t)                           z_t = s_t
        bahdanau    s_t = cell(s_{t-1}, [e_t; c_t]),  q_t = s_{t-1}    z_t = tanh(R [e_t; s_t; c_t])
        luong       s_t = cell(s_{t-1}, e_t),         q_t = s_t        z_t = tanh(R [s_t; c_t])
        … input_feeding   s_t = cell(s_{t-1}, [e_t; z_{t-1}])
        between     q_t = s_t of the lowest layer, [q_t; c_t] enters the one above, z_t = s_t

    With several layers q and s are those of the top one, and the input is the lowest one's.
    With several hops, q is q + c of the hop before, and c_t is the last one's.

    Where no c_t enters a state that the next q_t depends on, all steps are computed at once.
    Bahdanau's R is followed by a maxout of twice the width instead of tanh, and his J and B by
    nothing and by the backward state alone; here all h have the width of s, so that any score
    can compare them.

    Sutskever et al. 2014, Cho et al. 2014; Bahdanau et al. 2015; Luong et al. 2015; "between"
    as in Wu et al. 2016; hops Sukhbaatar et al. 2015.
    """

    packs = True  # sources of different lengths

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.config = config
        dim, (encoder_layers, layers) = config.dim, config.depths
        self.embed = _embedding(config.vocab_size, dim)
        self.source_embed = None
        if config.source_vocab_size is not None:
            self.source_embed = _embedding(config.source_vocab_size, dim)
        self.encoder = Recurrent(
            config.cell,
            dim,
            dim,
            encoder_layers,
            bidirectional=config.bidirectional,
            dropout=config.dropout,
        )
        wide = {"between": 1, "bahdanau": 0, "luong": 0 if config.input_feeding else None}
        widened = None if config.score is None else wide[config.placement]
        self.decoder = nn.ModuleList(
            make(config.cell, CELLS, "cell", dim_in=dim + dim * (n == widened), dim_out=dim)
            for n in range(layers)
        )
        self.join, self.bridge, self.readout = None, None, None
        if config.bidirectional and config.score is not None:
            self.join = nn.Linear(2 * dim, dim)
        if config.bidirectional and config.bridge:
            kept = range(self._cells()[0].state_vectors)
            self.bridge = nn.ModuleList(
                nn.ModuleList(nn.Linear(2 * dim, dim) for _ in kept) for _ in range(layers)
            )
        self.attention = nn.ModuleList(
            RecurrentAttention(
                dim,
                context=config.context,
                score=config.score,
                heads=config.heads,
                hard=config.hard,
            )
            for _ in range(config.hops)
            if config.score is not None
        )
        parts = {"between": 0, "luong": 2, "bahdanau": 3}[config.placement]
        if config.score is not None and parts:
            self.readout = nn.Linear(parts * dim, dim)
        tied = self.embed if config.tied else None
        self.head = Head(dim, config.vocab_size, tied=tied, bias=True)

    def forward(
        self, ids: Int[Tensor, "batch time"], *, source: Source
    ) -> Float[Tensor, "batch time dim"]:
        """z after each id; `head` makes logits of it."""
        return self.forward_with_log_probs(ids, source=source)[0]

    def forward_with_log_probs(
        self, ids: Int[Tensor, "batch time"], *, source: Source
    ) -> tuple[Float[Tensor, "batch time dim"], Float[Tensor, "batch time"] | None]:
        """z after each id, and log P of where it was looked, if that was drawn."""
        begin, memory = self._read(source)
        z, _, looks = self._write(ids, begin, memory, _fused)
        if not (self.samples_attention and self.training):
            return z, None
        chances = [hop.log_prob for look in looks for hop in look if hop.log_prob is not None]
        each_hop = [torch.cat(chances[n :: self.config.hops], 1) for n in range(self.config.hops)]
        return z, torch.stack(each_hop).sum(0)

    @property
    def samples_attention(self) -> bool:
        """Whether training samples hard attention and so needs `forward_with_log_probs`."""
        return self.config.hard == "reinforce"

    def start(self, rows: int, capacity: int, source: Source | None = None) -> ReaderState:
        """Read the source. A state of fixed size has room for any `capacity`."""
        if source is None:
            raise ConfigError("an encoder-decoder needs a source to read")
        begin, memory = self._read(source)
        return ReaderState(Snapshots.initial(begin), memory)

    def step(
        self,
        ids: Int[Tensor, "rows time"],
        state: State,
        *,
        counts: Int[Tensor, " rows"] | None = None,
        every: bool = False,
    ) -> tuple[Float[Tensor, "rows scored vocab"], ReaderState]:
        """Take in one or more ids per row; see `Language.step`."""
        z, after = self.hidden(ids, state, counts=counts)
        if not every:
            rows = torch.arange(len(z), device=z.device)
            z = z[:, -1:] if counts is None else z[rows, counts - 1].unsqueeze(1)
        return self.head(z), after

    def hidden(
        self,
        ids: Int[Tensor, "rows time"],
        state: State,
        *,
        counts: Int[Tensor, " rows"] | None = None,
    ) -> tuple[Float[Tensor, "rows time dim"], ReaderState]:
        """z after each id, and the state with `ids` taken in."""
        assert isinstance(state, ReaderState)
        begin = state.written.current()
        z, after, _ = self._write(ids, begin, state.memory, _looped)
        snapshots = [
            tuple(torch.cat([old.unsqueeze(1), new], 1) for old, new in zip(*both, strict=True))
            for both in zip(begin, after, strict=True)
        ]
        return z, ReaderState(state.written.advance(snapshots, counts), state.memory)

    def _read(self, source: Source) -> tuple[list[CellState], Memory]:
        """The states that writing begins with, and what it may look at."""
        ids, lengths = source.ids, source.lengths
        places = torch.arange(ids.shape[1], device=ids.device)
        rows = torch.arange(len(ids), device=ids.device).unsqueeze(1)
        turned = (lengths.unsqueeze(1) - 1 - places).remainder(ids.shape[1])  # padding stays behind
        if self.config.reversed_source:
            ids = ids[rows, turned]
        embed = self.embed if self.source_embed is None else self.source_embed
        h, last = self.encoder(self._dropped(embed(ids)), lengths)
        if self.config.reversed_source:
            h = h[rows, turned]
        if self.join is not None:
            h = self.join(h).tanh()
        looks = [glimpse.keys_values(h) for glimpse in self._looks()]
        memory = Memory(looks, (places < lengths.unsqueeze(1))[:, None, None])
        return self._begin(last), memory

    def _begin(self, last: list[CellState]) -> list[CellState]:
        """s_0 of each layer, from the encoder's last states; and z_0 where it is fed."""
        if not self.config.bridge:
            begin = [cell.start(len(last[0][0])) for cell in self._cells()]
        elif self.bridge is None:
            begin = last
        else:
            linears = cast(Sequence[Sequence[nn.Linear]], self.bridge)
            begin = [
                tuple(linear(each).tanh() for linear, each in zip(both, layer, strict=True))
                for both, layer in zip(linears, last, strict=True)
            ]
        return [*begin, (torch.zeros_like(begin[0][0]),)] if self.config.input_feeding else begin

    def _write(
        self, ids: Tensor, begin: list[CellState], memory: Memory, run: "Run"
    ) -> tuple[Tensor, list[CellState], list[list[AttentionOutput]]]:
        """z after each id, what `run` gives of each layer (one by one: all states), and looks."""
        config, e = self.config, self._dropped(self.embed(ids))
        waits = config.input_feeding or config.placement == "bahdanau"
        if config.score is None or not waits:
            z, after, looks = self._at_once(e, begin, memory, run)
        else:
            step = self._one_by_one
            if torch.compiler.is_compiling():  # it would unroll the loop, and take minutes
                step = torch.compiler.disable(step)
            z, after, looks = step(e, begin, memory)
        for number, glimpse in enumerate(self._looks()):
            if glimpse.weights_tap.has_hooks:  # one tensor for all steps
                glimpse.weights_tap(torch.cat([look[number].weights for look in looks], 2))
        return self._dropped(z), after, looks

    def _at_once(
        self, e: Tensor, begin: list[CellState], memory: Memory, run: "Run"
    ) -> tuple[Tensor, list[CellState], list[list[AttentionOutput]]]:
        """Layer by layer, each over all steps; and one look for all steps."""
        x, after, looks = e, [], []
        for number, (cell, before) in enumerate(zip(self._cells(), begin, strict=True)):
            if number:
                x = self._dropped(x)
            if number == 1 and self.config.placement == "between" and len(self.attention):
                looks.append(self._look(x, memory))
                x = torch.cat([x, looks[0][-1].context], -1)
            x, states = run(cell, x, before)
            after.append(states)
        if self.readout is not None:
            looks.append(self._look(x, memory))
            x = self.readout(torch.cat([x, looks[0][-1].context], -1)).tanh()
        return x, after, looks

    def _one_by_one(
        self, e: Tensor, begin: list[CellState], memory: Memory
    ) -> tuple[Tensor, list[CellState], list[list[AttentionOutput]]]:
        """Step by step, each through all layers, since a look decides what comes in next.

        What does not wait for a look is computed for all steps: the part of e in the input
        and, for Bahdanau, z.
        """
        assert self.readout is not None
        input_feeding, cells = self.config.input_feeding, self._cells()
        from_e, from_look = cells[0].input.weight.split(self.config.dim, 1)
        states, fed = (begin[:-1], begin[-1][0]) if input_feeding else (begin, None)
        after: list[list[CellState]] = []
        looks: list[list[AttentionOutput]] = []
        for x in F.linear(e, from_e, cells[0].input.bias).unbind(1):
            if fed is None:
                looks.append(self._look(states[-1][0].unsqueeze(1), memory))
            join = looks[-1][-1].context.squeeze(1) if fed is None else fed
            x = x + F.linear(join, from_look)
            states = self._climbed(x, states)
            if fed is not None:
                s = states[-1][0]
                looks.append(self._look(s.unsqueeze(1), memory))
                c = looks[-1][-1].context.squeeze(1)
                fed = self.readout(torch.cat([s, c], -1)).tanh()
            after.append([*states, (fed,)] if fed is not None else states)
        stacked = [
            tuple(torch.stack(each, 1) for each in zip(*layer, strict=True))
            for layer in zip(*after, strict=True)
        ]
        if fed is not None:
            return stacked[-1][0], stacked, looks
        c = torch.cat([look[-1].context for look in looks], 1)
        z = self.readout(torch.cat([e, stacked[-1][0], c], -1)).tanh()
        return z, stacked, looks

    def _climbed(self, from_input: Tensor, states: list[CellState]) -> list[CellState]:
        """The states of all layers one step on; `from_input` is W x + b of the lowest."""
        climbed: list[CellState] = []
        for cell, state in zip(self._cells(), states, strict=True):
            if climbed:
                from_input = cell.input(self._dropped(climbed[-1][0]))
            climbed.append(cell.equation(from_input, state)[0])
        return climbed

    def _look(self, q: Tensor, memory: Memory) -> list[AttentionOutput]:
        """What each hop finds."""
        hops: list[AttentionOutput] = []
        for glimpse, (k, v) in zip(self._looks(), memory.hops, strict=True):
            hops.append(glimpse(q, k, v, memory.allowed))
            q = q + hops[-1].context
        return hops

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.dropout, self.training)

    def _cells(self) -> list[Cell]:
        return cast(list[Cell], list(self.decoder))

    def _looks(self) -> list[RecurrentAttention]:
        return cast(list[RecurrentAttention], list(self.attention))

    if TYPE_CHECKING:
        __call__ = forward


Run = Callable[[Cell, Tensor, CellState], tuple[Tensor, CellState]]


def _fused(cell: Cell, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
    """h after each x, by the kernel, which keeps only the last state."""
    return cell(x, state=state)


def _looped(cell: Cell, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
    """h after each x, by the readable loop, which keeps all states."""
    states = cell.loop(x, state)
    return states[0], states


def _embedding(vocab_size: int, dim: int) -> nn.Embedding:
    embed = nn.Embedding(vocab_size, dim)
    nn.init.normal_(embed.weight, std=dim**-0.5)  # as an output matrix it gives logits near 1
    return embed
