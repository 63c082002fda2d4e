"""The slow twins: each formula once more, in nested loops over Python's own float64 numbers.

Nothing here is shared with the library, and nothing here is fast.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor, nn

Vector = list[float]
Allowed = Callable[[int, int, int], bool]  # row of the batch, query i, key j: may i look at j?
Bias = Callable[[int, int, int], float]  # head, query i, key j: what is added to the score
Score = Callable[[Vector, Vector, int, int], float]  # of the query at i and the key at j
Turn = Callable[[Vector, int], Vector]  # of a query or key at a position


def tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Masks, from their definition


def everything(row: int, i: int, j: int) -> bool:
    return True


def causal(row: int, i: int, j: int) -> bool:
    return j <= i


def prefix(lengths: list[int]) -> Allowed:
    return lambda row, i, j: j <= i or j < lengths[row]


def window(width: int) -> Allowed:
    return lambda row, i, j: -width < i - j < width


def lengths(real: list[int]) -> Allowed:
    return lambda row, i, j: j < real[row]


def documents(ids: list[list[int]]) -> Allowed:
    return lambda row, i, j: ids[row][i] == ids[row][j]


def both(*rules: Allowed) -> Allowed:
    return lambda row, i, j: all(rule(row, i, j) for rule in rules)


def dense(allowed: Allowed, batch: int, time: int, seen: int) -> Tensor:
    return torch.tensor(
        [[[[allowed(row, i, j) for j in range(seen)] for i in range(time)]] for row in range(batch)]
    )


# Scores


def dot(q: Vector, k: Vector, i: int = 0, j: int = 0) -> float:
    return math.fsum(a * b for a, b in zip(q, k, strict=True))


def scaled_dot(q: Vector, k: Vector, i: int = 0, j: int = 0) -> float:
    return dot(q, k) / math.sqrt(len(q))


def shaw(table: list[Vector], max_distance: int) -> Score:
    """q_i . (k_j + a_{j-i}) / sqrt(d), the distance clipped to [-max_distance, max_distance]."""

    def score(q: Vector, k: Vector, i: int, j: int) -> float:
        a = table[max(-max_distance, min(max_distance, j - i)) + max_distance]
        return dot(q, [x + y for x, y in zip(k, a, strict=True)]) / math.sqrt(len(q))

    return score


def disentangled(
    q_r: list[Vector], k_r: list[Vector], max_distance: int, buckets: int | None
) -> Score:
    """(q_i . k_j + q_i . K r_d + k_j . Q r_d) / sqrt(3 d), with logarithmic buckets."""

    def row(distance: int) -> int:
        reach, middle = (max_distance, None) if buckets is None else (buckets, buckets // 2)
        if middle is not None and abs(distance) > middle:
            share = math.log(abs(distance) / middle) / math.log((max_distance - 1) / middle)
            distance = (1 if distance > 0 else -1) * (middle + math.ceil(share * (middle - 1)))
        return max(0, min(2 * reach - 1, distance + reach))

    def score(q: Vector, k: Vector, i: int, j: int) -> float:
        d = row(i - j)
        return (dot(q, k) + dot(q, k_r[d]) + dot(k, q_r[d])) / math.sqrt(3 * len(q))

    return score


def cosine(q: Vector, k: Vector, i: int = 0, j: int = 0) -> float:
    return dot(q, k) / math.sqrt(dot(q, q) * dot(k, k))


def additive(v: Vector, w: list[Vector]) -> Score:
    """v . tanh(W [q; k])"""
    return lambda q, k, i, j: dot(v, [math.tanh(dot(row, [*q, *k])) for row in w])


def general(w: list[Vector]) -> Score:
    """q . W k"""
    return lambda q, k, i, j: dot(q, [dot(row, k) for row in w])


def location(w: list[Vector]) -> Score:
    """(W q)_j"""
    return lambda q, k, i, j: dot(w[j], q)


# Attention


def softmax(scores: Vector, allowed: list[bool]) -> Vector:
    """exp(s_j) over the sum of those allowed; zeros where none is."""
    if not any(allowed):
        return [0.0] * len(scores)
    top = max(s for s, a in zip(scores, allowed, strict=True) if a)
    e = [math.exp(s - top) if a else 0.0 for s, a in zip(scores, allowed, strict=True)]
    return [x / math.fsum(e) for x in e]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Score = scaled_dot,
    allowed: Allowed = everything,
    bias: Bias = lambda head, i, j: 0.0,
) -> Tensor:
    """y_i = sum_j w_ij v_j, query head h looking up in key and value head h // group."""
    group = q.shape[1] // k.shape[1]
    queries, keys, values = q.tolist(), k.tolist(), v.tolist()
    rows = []
    for row in range(len(queries)):
        heads = []
        for head in range(len(queries[row])):
            own_k, own_v = keys[row][head // group], values[row][head // group]
            ys = []
            for i, query in enumerate(queries[row][head]):
                scores = [score(query, key, i, j) + bias(head, i, j) for j, key in enumerate(own_k)]
                w = softmax(scores, [allowed(row, i, j) for j in range(len(own_k))])
                ys.append([dot(w, [value[c] for value in own_v]) for c in range(len(own_v[0]))])
            heads.append(ys)
        rows.append(heads)
    return tensor(rows)


def multi_head(
    module: nn.Module,
    x: Tensor,
    memory: Tensor,
    score: Score = scaled_dot,
    allowed: Allowed = everything,
    bias: Bias = lambda head, i, j: 0.0,
    turn: Turn = lambda vector, at: vector,
) -> Tensor:
    """[head_1 ... head_h] O, with q, k and v projected from x and the memory."""

    def heads(linear_layer: nn.Linear, stream: Tensor, count: int, turn: Turn) -> Tensor:
        wide = linear(linear_layer, stream).tolist()
        size = len(wide[0][0]) // count
        return tensor(
            [
                [
                    [turn(vector[h * size : (h + 1) * size], at) for at, vector in enumerate(row)]
                    for h in range(count)
                ]
                for row in wide
            ]
        )

    q = heads(module.query, x, module.heads, turn)
    k = heads(module.key, memory, module.kv_heads, turn)
    v = heads(module.value, memory, module.kv_heads, lambda vector, at: vector)
    found = attention(q, k, v, score, allowed, bias).tolist()
    merged = [
        [[c for head in row for c in head[i]] for i in range(len(row[0]))] for row in found
    ]  # the heads of one position, end to end
    return linear(module.out, tensor(merged))


def linear(module: nn.Linear, x: Tensor) -> Tensor:
    """y_r = sum_c W_rc x_c + b_r"""
    weight = module.weight.tolist()
    bias = [0.0] * len(weight) if module.bias is None else module.bias.tolist()
    return each_vector(lambda v: [dot(w, v) + b for w, b in zip(weight, bias, strict=True)], x)


def each_vector(f: Callable[[Vector], Vector], x: Tensor) -> Tensor:
    flat = [f(vector) for vector in x.reshape(-1, x.shape[-1]).tolist()]
    return tensor(flat).reshape(*x.shape[:-1], -1)


# Positions


def sinusoid(t: int, dim: int, base: float = 10_000.0) -> Vector:
    wave = []
    for pair in range(dim // 2):
        angle = t / base ** (2 * pair / dim)
        wave += [math.sin(angle), math.cos(angle)]
    return wave


def rotary(
    x: Vector,
    t: float,
    base: float = 10_000.0,
    fraction: float = 1.0,
    interleaved: bool = False,
) -> Vector:
    """Turn pair i by t base^(-2i/d): (i, i + d/2), or (2i, 2i + 1) where interleaved."""
    d = int(len(x) * fraction)
    y = list(x)
    for i in range(d // 2):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + d // 2)
        angle = t * base ** (-2 * i / d)
        y[first] = x[first] * math.cos(angle) - x[second] * math.sin(angle)
        y[second] = x[second] * math.cos(angle) + x[first] * math.sin(angle)
    return y


def alibi_slopes(heads: int) -> Vector:
    """The geometric series that starts at and has ratio 2^(-8/n), for n a power of two.

    Else that of the power of two below, and what is still wanted from the odd places of the
    series for twice as many.
    """
    n = 1
    while 2 * n <= heads:
        n *= 2
    slopes = [2 ** (-8 / n * h) for h in range(1, n + 1)]
    twice = [2 ** (-8 / (2 * n) * h) for h in range(1, 2 * n + 1)]
    return slopes + twice[0::2][: heads - n]


def alibi(heads: int) -> Bias:
    slopes = alibi_slopes(heads)
    return lambda head, i, j: -slopes[head] * abs(i - j)


def t5_bucket(distance: int, *, causal: bool, buckets: int = 32, max_distance: int = 128) -> int:
    """The bucket of key minus query, in whole numbers, so that no logarithm is rounded.

    bucket = exact + floor(span * log(n / exact) / log(max_distance / exact)) is the largest m with
    (n / exact)^span >= (max_distance / exact)^m.
    """
    offset = 0
    if causal:
        n = max(-distance, 0)
    else:
        buckets //= 2
        offset = buckets if distance > 0 else 0
        n = abs(distance)
    exact = buckets // 2
    if n < exact:
        return offset + n
    span = buckets - exact
    m = 0
    while m < span and Fraction(n, exact) ** span >= Fraction(max_distance, exact) ** (m + 1):
        m += 1
    return offset + min(exact + m, buckets - 1)


# Norms and feed-forwards


def layer_norm(x: Vector, g: Vector, b: Vector | None, eps: float) -> Vector:
    mean = math.fsum(x) / len(x)
    variance = math.fsum((c - mean) ** 2 for c in x) / len(x)
    b = [0.0] * len(x) if b is None else b
    return [(c - mean) / math.sqrt(variance + eps) * g[i] + b[i] for i, c in enumerate(x)]


def layer_norm_std(x: Vector, g: Vector, b: Vector | None, eps: float) -> Vector:
    mean = math.fsum(x) / len(x)
    std = math.sqrt(math.fsum((c - mean) ** 2 for c in x) / len(x))
    b = [0.0] * len(x) if b is None else b
    return [(c - mean) / (std + eps) * g[i] + b[i] for i, c in enumerate(x)]


def rms_norm(x: Vector, g: Vector, eps: float) -> Vector:
    square = math.fsum(c * c for c in x) / len(x)
    return [c / math.sqrt(square + eps) * g[i] for i, c in enumerate(x)]


def relu(x: float) -> float:
    return x if x > 0 else 0.0


def relu2(x: float) -> float:
    return relu(x) ** 2


def gelu(x: float) -> float:
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


def gelu_tanh(x: float) -> float:
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def feed_forward(module: nn.Module, x: Tensor, f: Callable[[float], float]) -> Tensor:
    wide = each_vector(lambda v: [f(c) for c in v], linear(module.up, x))
    return linear(module.down, wide)


def gated(module: nn.Module, x: Tensor, f: Callable[[float], float]) -> Tensor:
    up, gate = linear(module.up, x).tolist(), linear(module.gate, x).tolist()
    wide = [
        [[u * f(g) for u, g in zip(*pair, strict=True)] for pair in zip(*rows, strict=True)]
        for rows in zip(up, gate, strict=True)
    ]
    return linear(module.down, tensor(wide))


# Loss


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> float:
    """Of the distribution (1 - e) [v = target] + e / V, summed over targets that are not -1."""
    total = 0.0
    for scores, target in zip(logits.tolist(), targets.tolist(), strict=True):
        if target == -1:
            continue
        p = softmax(scores, [True] * len(scores))
        for v in range(len(p)):
            wanted = (1 - smoothing) * (v == target) + smoothing / len(p)
            total -= wanted * math.log(p[v])
    return total
