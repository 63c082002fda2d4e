"""Reference samplers: the definition of each as loops over plain floats, for one row.

A row of logits is a list with -inf for removed tokens; a truncation returns the set of kept ids.
"""

import math
from itertools import pairwise

REMOVED = -math.inf


def remaining(logits):
    return [v for v, x in enumerate(logits) if x > REMOVED]


def softmax(logits):
    best = max(logits)
    weights = [math.exp(x - best) if x > REMOVED else 0.0 for x in logits]
    return [w / sum(weights) for w in weights]


def entropy(p):
    return -sum(x * math.log(x) for x in p if x > 0)


def ranked_ids(logits):
    """The remaining ids, most probable first, ties by id."""
    return sorted(remaining(logits), key=lambda v: (-logits[v], v))


def with_min_keep(logits, kept, min_keep):
    """Add the most probable tokens up to `min_keep`, and those that tie with the last of them."""
    last = ranked_ids(logits)[:min_keep][-1]
    return set(kept) | {v for v in remaining(logits) if logits[v] >= logits[last]}


def top_k(logits, k):
    if k == 0:
        return set(remaining(logits))
    ranks = ranked_ids(logits)
    least = logits[ranks[min(k, len(ranks)) - 1]]
    return {v for v in ranks if logits[v] >= least}


def top_p(logits, p, min_keep=1):
    probs, kept, mass = softmax(logits), set(), 0.0
    for v in ranked_ids(logits):
        if mass < p or not kept:
            kept.add(v)
        mass += probs[v]
    return kept if min_keep == 1 else with_min_keep(logits, kept, min_keep)


def above_threshold(logits, threshold, min_keep=1):
    """Keep tokens that reach a threshold, which may depend on all probabilities."""
    probs = softmax(logits)
    lowest = threshold(probs)
    return with_min_keep(logits, {v for v in remaining(logits) if probs[v] >= lowest}, min_keep)


def min_p(logits, m, min_keep=1):
    return above_threshold(logits, lambda p: m * max(p), min_keep)


def top_a(logits, a, min_keep=1):
    return above_threshold(logits, lambda p: a * max(p) ** 2, min_keep)


def epsilon(logits, epsilon, min_keep=1):
    return above_threshold(logits, lambda p: epsilon, min_keep)


def eta(logits, epsilon, min_keep=1):
    return above_threshold(
        logits, lambda p: min(epsilon, epsilon**0.5 * math.exp(-entropy(p))), min_keep
    )


def top_n_sigma(logits, n, min_keep=1):
    values = [logits[v] for v in remaining(logits)]
    mean = sum(values) / len(values)
    sigma = math.sqrt(sum((x - mean) ** 2 for x in values) / len(values))
    lowest = max(values) - n * sigma
    return with_min_keep(logits, {v for v in remaining(logits) if logits[v] >= lowest}, min_keep)


def top_h(logits, h):
    ranks = ranked_ids(logits)[:100]
    probs = softmax([logits[v] for v in ranks])
    kept, sum_so_far = {ranks[0]}, 0.0
    for v, p in zip(ranks, probs, strict=True):
        sum_so_far -= p * math.log(p)
        if sum_so_far <= h * entropy(probs):
            kept.add(v)
    return kept


def typical(logits, mass, min_keep=1):
    probs = softmax(logits)
    expected = entropy(probs)
    distance = {v: abs(-math.log(probs[v]) - expected) for v in remaining(logits)}
    kept, far = set(), sorted(distance.values())[min(min_keep, len(distance)) - 1]
    for v, d in distance.items():
        nearer = sum(probs[u] for u, other in distance.items() if other < d)
        if nearer < mass or d <= far:
            kept.add(v)
    return kept


def tail_free(logits, z, min_keep=1):
    ranks, probs = ranked_ids(logits), softmax(logits)
    sorted_p = [probs[v] for v in ranks]
    first = [b - a for a, b in pairwise(sorted_p)]
    second = [abs(b - a) for a, b in pairwise(first)]
    if sum(second) == 0:
        return set(ranks)
    kept, cumulative = {ranks[0]}, 0.0
    for j in range(1, len(ranks) - 1):
        cumulative += second[j - 1] / sum(second)
        if cumulative <= z:
            kept.add(ranks[j])
    return kept if min_keep == 1 else with_min_keep(logits, kept, min_keep)


def xtc(logits, threshold):
    """The ids kept in a row where XTC acts."""
    probs = softmax(logits)
    top = {v for v in remaining(logits) if probs[v] >= threshold}
    least = min(top, key=lambda v: (logits[v], v), default=None)
    return set(remaining(logits)) - (top - {least})


def mirostat_2(logits, mu):
    probs = softmax(logits)
    return with_min_keep(logits, {v for v in remaining(logits) if -math.log2(probs[v]) <= mu}, 1)


def mirostat_1(logits, mu):
    ranks, probs = ranked_ids(logits), softmax(logits)
    top = [probs[v] for v in ranks[:100]]
    t = [math.log((i + 1) / i) for i in range(1, len(top))]
    b = [math.log(p / q) for p, q in pairwise(top)]
    s = sum(x * y for x, y in zip(t, b, strict=True)) / sum(x * x for x in t)
    if not s > 0:
        return set(ranks)
    ratio = (s - 1) / (1 - len(logits) ** (1 - s)) if s != 1 else 1 / math.log(len(logits))
    k = (ratio * 2**mu) ** (1 / s)
    return set(ranks[: max(1, math.floor(k))])


def dynamic_temperature(logits, low, high, exponent):
    count = len(remaining(logits))
    if count < 2:
        return logits
    relative = entropy(softmax(logits)) / math.log(count)
    return [x / (low + (high - low) * relative**exponent) for x in logits]


def quadratic(logits, factor, curve):
    best, changed = max(logits), []
    for x in logits:
        d = x - best
        square = best - (3 - curve) / 2 * factor * d**2
        changed.append(REMOVED if x == REMOVED else square + (curve - 1) / 2 * factor * d**3)
    return changed


def adaptive_p(logits, target, mean):
    aim = min(max(2 * target - mean, 0.0), 1.0)
    changed = []
    for logit, p in zip(logits, softmax(logits), strict=True):
        x = abs(p - aim) / 0.3
        changed.append(REMOVED if logit == REMOVED else 5 - 10 * x**2 / (1 + x))
    return changed


def repetition(logits, penalty, text):
    changed = list(logits)
    for v in set(text):
        changed[v] = logits[v] / penalty if logits[v] > 0 else logits[v] * penalty
    return changed


def presence(logits, penalty, text):
    return [x - penalty * (v in text) for v, x in enumerate(logits)]


def frequency(logits, penalty, text):
    return [x - penalty * text.count(v) for v, x in enumerate(logits)]


def no_repeat_ngram(logits, size, text):
    grams = {tuple(text[i : i + size]) for i in range(len(text) - size + 1)}
    newest = tuple(text[len(text) - size + 1 :])
    if len(text) < size - 1:
        newest = None
    return [
        REMOVED if newest is not None and (*newest, v) in grams else x for v, x in enumerate(logits)
    ]


def dry(logits, multiplier, base, allowed, text, breakers=()):
    longest = {}
    for j in range(len(text) - 1):
        m = 0
        while m <= j and text[j - m] == text[-1 - m] and text[-1 - m] not in breakers:
            m += 1
        longest[text[j + 1]] = max(m, longest.get(text[j + 1], 0))
    changed = list(logits)
    for v, m in longest.items():
        if m >= allowed and v not in breakers:
            changed[v] -= multiplier * base ** (m - allowed)
    return changed
