"""Recurrent encoder-decoders (seq2seq), with attention or without."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.config import Choice, Settings, kind_of, make
from regard.errors import ConfigError, unknown
from regard.models.base import LanguageModel, State
from regard.models.compatibility import SEQ2SEQ_RULES, check_dropout, check_rules, check_sizes
from regard.nn.head import LMHead
from regard.nn.recurrent import CELLS, Recurrent, RecurrentLayer, reversal_index
from regard.nn.recurrent_attention import AttentionOutput, HardAttention, RecurrentAttention
from regard.nn.score import SCORES
from regard.nn.state import CapturableRecurrentState, CellState, Source


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Seq2SeqConfig(Settings):
    """A recurrent encoder and a recurrent decoder, which may attend to the encoder states."""

    vocab_size: int  # number of tokens
    # number of tokens of the source; None: both sides share one vocabulary
    source_vocab_size: int | None = None
    cell: Choice = "lstm"  # the recurrent cell (nn.recurrent.CELLS)
    dim: int = 256  # width of the embeddings and of every layer
    layers: int = 1  # number of decoder layers
    encoder_layers: int | None = None  # number of encoder layers; None: as many as `layers`
    bidirectional: bool = True  # the encoder reads in both directions
    reversed_source: bool = False  # the encoder reads the source backwards
    bridge: bool = True  # initialize the decoder with the encoder's final state, else with zeros
    score: Choice | None = None  # the attention score (nn.score.SCORES); None: no attention
    # where attention is: before the decoder (bahdanau), after it (luong), or between its first
    # layer and the next (between)
    attention_placement: Literal["bahdanau", "luong", "between"] = "luong"
    input_feeding: bool = False  # luong: the attentional vector is part of the next input
    # attention heads with projections; None: one head without projections
    heads: int | None = None
    # attention layers in sequence; each adds the context vector of the one before to its query
    hops: int = 1
    # hard attention, to one position only, trained with this estimator
    hard_attention: HardAttention | None = None
    dropout: float = 0.0  # dropout of embeddings, between layers, and of the head's input
    tied: bool = True  # output matrix = embedding matrix of the target
    # maximum number of ids of either side of a training pair; generation has no limit
    context: int = 256

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "source_vocab_size", "dim", "layers", "encoder_layers")
        check_sizes(self, "heads", "hops", "context")
        check_dropout(self)
        for name, choice, kinds in (
            ("cell", self.cell, CELLS),
            ("score", self.score, SCORES),
        ):
            if choice is not None and (kind := kind_of(choice)[0]) not in kinds:
                raise ConfigError(unknown(name, kind, kinds))
        check_rules(self, SEQ2SEQ_RULES)

    @property
    def architecture(self) -> str:
        """The architecture that the seq2seq task needs."""
        return "encoder-decoder"

    @property
    def depths(self) -> tuple[int, int]:
        """The number of encoder and decoder layers."""
        return self.layers if self.encoder_layers is None else self.encoder_layers, self.layers


@dataclass(frozen=True, slots=True)
class MemoryKV:
    """The keys and values of the source for each hop, (rows, heads, source, head_dim)."""

    hops: list[tuple[Tensor, Tensor]]
    allowed: Bool[Tensor, "rows 1 1 source"]  # False on padding

    def select(self, rows: Int[Tensor, " selected"]) -> "MemoryKV":
        """The keys and values of these rows, in this order."""
        hops = [(k.index_select(0, rows), v.index_select(0, rows)) for k, v in self.hops]
        return MemoryKV(hops, self.allowed.index_select(0, rows))

    def copy_(self, memory_kv: "MemoryKV") -> None:
        """Copy keys and values of the same shape into these buffers."""
        self.allowed.copy_(memory_kv.allowed)
        for buffers, tensors in zip(self.hops, memory_kv.hops, strict=True):
            for buffer, tensor in zip(buffers, tensors, strict=True):
                buffer.copy_(tensor)


@dataclass(frozen=True, slots=True)
class Seq2SeqState:
    """The decoding state: the states of the decoder, and the keys and values of the source."""

    decoder: CapturableRecurrentState  # of each layer, then the fed-back attentional vector
    memory_kv: MemoryKV

    @property
    def lengths(self) -> Int[Tensor, " rows"]:
        """The number of ids that each row has read."""
        return self.decoder.lengths

    def select(self, rows: Int[Tensor, " selected"]) -> "Seq2SeqState":
        """The state of these rows, in this order."""
        return Seq2SeqState(
            cast(CapturableRecurrentState, self.decoder.select(rows)), self.memory_kv.select(rows)
        )

    def rewind(self, lengths: Int[Tensor, " rows"]) -> "Seq2SeqState":
        """Truncate each row to its first `lengths` ids, within the last step."""
        return replace(self, decoder=cast(CapturableRecurrentState, self.decoder.rewind(lengths)))

    def with_static_shapes(self) -> "Seq2SeqState":
        """The same state for a decode step that is captured as a CUDA graph."""
        return replace(self, decoder=self.decoder.with_static_shapes())

    def matches_capacity(self, capacity: int) -> bool:
        """True: a row can hold any number of ids."""
        return self.decoder.matches_capacity(capacity)

    def reset(self, initial: "Seq2SeqState | None" = None) -> "Seq2SeqState":
        """The state `initial`, which has read no id, in the same buffers."""
        assert initial is not None
        self.decoder.reset(initial.decoder)
        self.memory_kv.copy_(initial.memory_kv)
        return self


class RecurrentEncoderDecoder(LanguageModel):
    r"""Encode the source into states h_1 ... h_S, decode the target from states s_1, s_2, ...

        h_i = encoder(x_1 ... x_i),                  bidirectional: h_i = tanh(J [->h_i; <-h_i])
        s_0 = the encoder's final state,             bidirectional: s_0 = tanh(B [->h_S; <-h_1])
        c_t = sum_i softmax_i(score(q_t, h_i)) h_i        with attention
        logits_t = W z_t + b

    `attention_placement` defines the query q_t and where the context c_t enters (e_t is the
    embedding of y_{t-1}, the true target in training: teacher forcing):

        none        s_t = cell(s_{t-1}, e_t)                           z_t = s_t
        bahdanau    s_t = cell(s_{t-1}, [e_t; c_t]),  q_t = s_{t-1}    z_t = tanh(R [e_t; s_t; c_t])
        luong       s_t = cell(s_{t-1}, e_t),         q_t = s_t        z_t = tanh(R [s_t; c_t])
        … with input feeding    s_t = cell(s_{t-1}, [e_t; z_{t-1}])
        between     q_t = s_t of the lowest layer, [q_t; c_t] enters the one above, z_t = s_t

    With several layers q and s are those of the top layer, and the input enters the lowest.
    With several hops, the query of a hop is q + c of the previous hop, and c_t is the last c.

    Where no state depends on c_t, each layer runs over all steps in one call. Differences
    from Bahdanau et al.: the paper has a maxout of twice the width instead of R's tanh, no J, and
    a B on the backward state only. Here h and s have the same width, so that every score applies.

    Sutskever et al. 2014, Cho et al. 2014; Bahdanau et al. 2015; Luong et al. 2015; "between"
    as in Wu et al. 2016; hops Sukhbaatar et al. 2015.
    """

    uses_packed_sequence = True  # whether lengths are read on the host, to pack sequences

    def __init__(self, config: Any) -> None:  # Seq2SeqConfig, or RecurrentCaptionerConfig
        super().__init__()
        self.config = config
        dim, layers = config.dim, config.layers
        self.embed = _embedding(config.vocab_size, dim)
        self._build_encoder()
        # the layer that also reads the context vector or the attentional vector
        wide_layers = {"between": 1, "bahdanau": 0, "luong": 0 if config.input_feeding else None}
        wide_layer = None if config.score is None else wide_layers[config.attention_placement]
        self.decoder = nn.ModuleList(
            make(config.cell, CELLS, "cell", dim_in=dim + dim * (n == wide_layer), dim_out=dim)
            for n in range(layers)
        )
        self.direction_projection, self.bridge, self.readout = None, None, None
        if config.bidirectional and config.score is not None:
            self.direction_projection = nn.Linear(2 * dim, dim)
        if config.bidirectional and config.bridge:
            vectors = range(self._cells()[0].state_vectors)
            self.bridge = nn.ModuleList(
                nn.ModuleList(nn.Linear(2 * dim, dim) for _ in vectors) for _ in range(layers)
            )
        self.attention = nn.ModuleList(
            RecurrentAttention(
                dim,
                context=config.context,
                score=config.score,
                heads=config.heads,
                hard=config.hard_attention,
            )
            for _ in range(config.hops)
            if config.score is not None
        )
        # the vectors that R reads: s and c, or e, s and c
        num_vectors = {"between": 0, "luong": 2, "bahdanau": 3}[config.attention_placement]
        if config.score is not None and num_vectors:
            self.readout = nn.Linear(num_vectors * dim, dim)
        tied = self.embed if config.tied else None
        self.head = LMHead(dim, config.vocab_size, tied=tied, bias=True)

    def _build_encoder(self) -> None:
        """Create the modules that read the source."""
        config = self.config
        self.source_embed = None
        if config.source_vocab_size is not None:
            self.source_embed = _embedding(config.source_vocab_size, config.dim)
        self.encoder = Recurrent(
            config.cell,
            config.dim,
            config.dim,
            config.depths[0],
            bidirectional=config.bidirectional,
            dropout=config.dropout,
        )

    def forward(
        self, ids: Int[Tensor, "batch time"], *, source: Source
    ) -> Float[Tensor, "batch time dim"]:
        """z after each target id (teacher forcing), which `head` maps to logits."""
        return self.forward_with_log_probs(ids, source=source)[0]

    def forward_with_log_probs(
        self, ids: Int[Tensor, "batch time"], *, source: Source
    ) -> tuple[Float[Tensor, "batch time dim"], Float[Tensor, "batch time"] | None]:
        """z after each id, and log P of the sampled positions of hard attention (else None)."""
        initial, memory_kv = self._encode(source)
        z, _, attention_outputs = self._decode(ids, initial, memory_kv, _run_fused)
        if not (self.samples_attention and self.training):
            return z, None
        hops = self.config.hops
        log_probs = [
            hop.log_prob for step in attention_outputs for hop in step if hop.log_prob is not None
        ]
        per_hop = [torch.cat(log_probs[n::hops], 1) for n in range(hops)]
        return z, torch.stack(per_hop).sum(0)

    @property
    def samples_attention(self) -> bool:
        """Whether training samples hard attention and so needs `forward_with_log_probs`."""
        return self.config.hard_attention == "reinforce"

    def start(self, rows: int, capacity: int, source: Source | None = None) -> Seq2SeqState:
        """Encode the source. The size of the state does not depend on `capacity`."""
        if source is None:
            raise ConfigError("an encoder-decoder needs a source; pass source=Source(ids, lengths)")
        initial, memory_kv = self._encode(source)
        return Seq2SeqState(
            cast(CapturableRecurrentState, CapturableRecurrentState.initial(initial)), memory_kv
        )

    def step(
        self,
        ids: Int[Tensor, "rows time"],
        state: State,
        *,
        counts: Int[Tensor, " rows"] | None = None,
        all_logits: bool = False,
    ) -> tuple[Float[Tensor, "rows scored vocab"], Seq2SeqState]:
        """Read one or more ids per row; see `Language.step`."""
        z, next_state = self.hidden(ids, state, counts=counts)
        if not all_logits:
            rows = torch.arange(len(z), device=z.device)
            z = z[:, -1:] if counts is None else z[rows, counts - 1].unsqueeze(1)
        return self.head(z), next_state

    def hidden(
        self,
        ids: Int[Tensor, "rows time"],
        state: State,
        *,
        counts: Int[Tensor, " rows"] | None = None,
    ) -> tuple[Float[Tensor, "rows time dim"], Seq2SeqState]:
        """z after each id, and the state after `ids`."""
        assert isinstance(state, Seq2SeqState)
        initial = state.decoder.current()
        z, layer_states, _ = self._decode(ids, initial, state.memory_kv, _run_loop)
        snapshots = [
            tuple(torch.cat([old.unsqueeze(1), new], 1) for old, new in zip(*layer, strict=True))
            for layer in zip(initial, layer_states, strict=True)
        ]
        decoder = cast(CapturableRecurrentState, state.decoder.advance(snapshots, counts))
        return z, replace(state, decoder=decoder)

    def _encode(self, source: Source) -> tuple[list[CellState], MemoryKV]:
        """The initial states of the decoder, and the keys and values of the source."""
        ids, lengths = source.ids, source.lengths
        positions = torch.arange(ids.shape[1], device=ids.device)
        reversal = reversal_index(lengths, ids.shape[1])
        if self.config.reversed_source:
            ids = ids[reversal]
        embed = self.embed if self.source_embed is None else self.source_embed
        h, final_states = self.encoder(self._dropout(embed(ids)), lengths)
        if self.config.reversed_source:
            h = h[reversal]
        if self.direction_projection is not None:
            h = self.direction_projection(h).tanh()
        hops = [attention.keys_values(h) for attention in self._attentions()]
        memory_kv = MemoryKV(hops, (positions < lengths.unsqueeze(1))[:, None, None])
        return self._initial_states(final_states), memory_kv

    def _initial_states(self, final_states: list[CellState]) -> list[CellState]:
        """s_0 of each layer from the encoder's final states, and z_0 = 0 with input feeding."""
        if not self.config.bridge:
            states = [cell.start(len(final_states[0][0])) for cell in self._cells()]
        elif self.bridge is None:
            states = final_states
        else:
            bridges = cast(Sequence[Sequence[nn.Linear]], self.bridge)
            states = [
                tuple(linear(vector).tanh() for linear, vector in zip(bridge, state, strict=True))
                for bridge, state in zip(bridges, final_states, strict=True)
            ]
        return [*states, (torch.zeros_like(states[0][0]),)] if self.config.input_feeding else states

    def _decode(
        self, ids: Tensor, initial: list[CellState], memory_kv: MemoryKV, run_layer: "RunLayer"
    ) -> tuple[Tensor, list[CellState], list[list[AttentionOutput]]]:
        """z after each id, the states that `run_layer` returns, and the attention of each step.

        If attention makes decoding sequential, `run_layer` is not used; all states are returned.
        """
        config, e = self.config, self._dropout(self.embed(ids))
        sequential = config.input_feeding or config.attention_placement == "bahdanau"
        if config.score is None or not sequential:
            z, states, attention_outputs = self._decode_layerwise(e, initial, memory_kv, run_layer)
        else:
            z, states, attention_outputs = self._decode_stepwise(e, initial, memory_kv)
        return self._dropout(z), states, attention_outputs

    def _decode_layerwise(
        self, e: Tensor, initial: list[CellState], memory_kv: MemoryKV, run_layer: "RunLayer"
    ) -> tuple[Tensor, list[CellState], list[list[AttentionOutput]]]:
        """Layer by layer, each over all steps at once, with one attention over all steps."""
        x, all_states, attention_outputs = e, [], []
        for index, (cell, state) in enumerate(zip(self._cells(), initial, strict=True)):
            if index:
                x = self._dropout(x)
            if index == 1 and self.config.attention_placement == "between" and len(self.attention):
                attention_outputs.append(self._attend(x, memory_kv))
                x = torch.cat([x, attention_outputs[0][-1].context_vectors], -1)
            x, states = run_layer(cell, x, state)
            all_states.append(states)
        if self.readout is not None:
            attention_outputs.append(self._attend(x, memory_kv))
            x = self.readout(torch.cat([x, attention_outputs[0][-1].context_vectors], -1)).tanh()
        return x, all_states, attention_outputs

    def _decode_stepwise(
        self, e: Tensor, initial: list[CellState], memory_kv: MemoryKV
    ) -> tuple[Tensor, list[CellState], list[list[AttentionOutput]]]:
        """Step by step through all layers: the next input depends on the attention of this step.

        Two matmuls are outside the loop, for all steps at once: that of e with the input weights
        and, for Bahdanau, the readout z.
        """
        assert self.readout is not None
        input_feeding, cells = self.config.input_feeding, self._cells()
        e_weight, context_weight = cells[0].input.weight.split(self.config.dim, 1)
        states, previous_z = (initial[:-1], initial[-1][0]) if input_feeding else (initial, None)
        states_by_step: list[list[CellState]] = []
        attention_outputs: list[list[AttentionOutput]] = []
        inputs = F.linear(e, e_weight, cells[0].input.bias).unbind(1)
        for n, x in enumerate(inputs):
            step = (n, len(inputs))
            if previous_z is None:
                attention_outputs.append(self._attend(states[-1][0].unsqueeze(1), memory_kv, step))
            extra_input = (
                attention_outputs[-1][-1].context_vectors.squeeze(1)
                if previous_z is None
                else previous_z
            )
            x = x + F.linear(extra_input, context_weight)
            states = self._step_cells(x, states, step)
            if previous_z is not None:
                s = states[-1][0]
                attention_outputs.append(self._attend(s.unsqueeze(1), memory_kv, step))
                c = attention_outputs[-1][-1].context_vectors.squeeze(1)
                previous_z = self.readout(torch.cat([s, c], -1)).tanh()
            states_by_step.append([*states, (previous_z,)] if previous_z is not None else states)
        all_states = [
            tuple(torch.stack(vectors, 1) for vectors in zip(*layer, strict=True))
            for layer in zip(*states_by_step, strict=True)
        ]
        if previous_z is not None:
            return all_states[-1][0], all_states, attention_outputs
        c = torch.cat([step[-1].context_vectors for step in attention_outputs], 1)
        z = self.readout(torch.cat([e, all_states[-1][0], c], -1)).tanh()
        return z, all_states, attention_outputs

    def _step_cells(
        self, from_input: Tensor, states: list[CellState], step: tuple[int, int]
    ) -> list[CellState]:
        """The next states of all layers; `from_input` is W x + b of the lowest."""
        next_states: list[CellState] = []
        for cell, state in zip(self._cells(), states, strict=True):
            if next_states:
                from_input = cell.input(self._dropout(next_states[-1][0]))
            next_states.append(cell.step(from_input, state, cell.hook_function(*step)))
        return next_states

    def _attend(
        self, q: Tensor, memory_kv: MemoryKV, step: tuple[int, int | None] = (0, None)
    ) -> list[AttentionOutput]:
        """The output of each hop; `step` is the index of the first q and the number of steps."""
        first, steps = step
        outputs: list[AttentionOutput] = []
        for attention, (k, v) in zip(self._attentions(), memory_kv.hops, strict=True):
            outputs.append(attention(q, k, v, memory_kv.allowed, first=first, steps=steps))
            q = q + outputs[-1].context_vectors
        return outputs

    def _dropout(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.dropout, self.training)

    def _cells(self) -> list[RecurrentLayer]:
        return cast(list[RecurrentLayer], list(self.decoder))

    def _attentions(self) -> list[RecurrentAttention]:
        return cast(list[RecurrentAttention], list(self.attention))

    if TYPE_CHECKING:
        __call__ = forward


RunLayer = Callable[[RecurrentLayer, Tensor, CellState], tuple[Tensor, CellState]]


def _run_fused(cell: RecurrentLayer, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
    """h after each x and the final state, by the fused kernel where there is one."""
    return cell(x, state=state)


def _run_loop(cell: RecurrentLayer, x: Tensor, state: CellState) -> tuple[Tensor, CellState]:
    """h after each x and all states, by the loop over time."""
    states = cell.loop(x, state)
    return states[0], states


def _embedding(vocab_size: int, dim: int) -> nn.Embedding:
    embed = nn.Embedding(vocab_size, dim)
    # logits of a tied matrix then have a standard deviation near 1
    nn.init.normal_(embed.weight, std=dim**-0.5)
    return embed
