"""The slow twins of models that count: dicts of tuples and loops, in Python's own floats.

Nothing here is shared with the library, and nothing here is fast.
"""

import itertools
import math
from collections import Counter, defaultdict

import torch


class NGram:
    """Followers of every context; a subclass says what they are worth, one at a time."""

    def __init__(self, rows, vocab_size, order):
        self.vocab_size, self.order = vocab_size, order
        self.followers = defaultdict(Counter)
        for ids, targets in rows:
            for t, target in enumerate(targets):
                if target == -1:
                    continue
                for length in range(min(order - 1, t + 1) + 1):
                    self.followers[tuple(ids[t + 1 - length : t + 1])][target] += 1

    def probability(self, word, history):
        shorter = self.probability(word, history[1:]) if history else 1 / self.vocab_size
        seen = self.followers.get(tuple(history))
        return self.smoothed(word, history, seen, shorter) if seen else shorter

    def table(self, ids):
        """P of every word after each of these ids."""
        rows = []
        for t in range(len(ids)):
            history = ids[max(0, t + 2 - self.order) : t + 1] if self.order > 1 else []
            rows.append([self.probability(word, history) for word in range(self.vocab_size)])
        return torch.tensor(rows, dtype=torch.float64)


class WittenBell(NGram):
    def smoothed(self, word, history, seen, shorter):
        return (seen[word] + len(seen) * shorter) / (sum(seen.values()) + len(seen))


class AddK(NGram):
    k = 1.0

    def smoothed(self, word, history, seen, shorter):
        return (seen[word] + self.k) / (sum(seen.values()) + self.k * self.vocab_size)


class KneserNey(NGram):
    """Chen & Goodman 1999, section 3, with nothing computed before it is asked for."""

    def __init__(self, rows, vocab_size, order):
        super().__init__(rows, vocab_size, order)
        raw = {h: Counter(words) for h, words in self.followers.items()}
        for history, words in self.followers.items():
            if len(history) == order - 1:
                continue
            for word in words:
                before = [h for h in raw if h and h[1:] == history and word in raw[h]]
                words[word] = len(before) or raw[history][word]

    def discounts(self, length):
        n = Counter(
            count
            for history, words in self.followers.items()
            if len(history) == length
            for count in words.values()
        )
        if not (n[1] and n[2] and n[3]):
            return [0, 0.5, 1, 1.5]
        y = n[1] / (n[1] + 2 * n[2])
        found = [j - (j + 1) * y * n[j + 1] / n[j] if j else 0 for j in range(4)]
        return found if min(found[1:]) > 0 else [0, 0.5, 1, 1.5]

    def smoothed(self, word, history, seen, shorter):
        discount = self.discounts(len(history))
        rest = sum(discount[min(count, 3)] for count in seen.values())
        kept = seen[word] - discount[min(seen[word], 3)]
        return (kept + rest * shorter) / sum(seen.values())


class Arpa:
    """A model of back-offs in the format of that name: log10 of P, the gram, log10 of its rest."""

    def __init__(self, lines):
        self.log, self.rest = {}, {}
        for line in lines:
            value, _, gram = line.rstrip("\n").partition("\t")
            if gram:
                words, _, rest = gram.partition("\t")
                self.log[tuple(words.split())] = float(value)
                self.rest[tuple(words.split())] = float(rest or 0)

    def log10(self, word, history):
        if (*history, word) in self.log:
            return self.log[*history, word]
        return self.rest.get(tuple(history), 0.0) + self.log10(word, history[1:])


class HMM:
    """Every path through the hidden states, one after the other."""

    def __init__(self, first, move, write):
        self.first, self.move, self.write = first, move, write

    def paths(self, ids):
        """Each path, and how likely it is together with the ids."""
        for path in itertools.product(range(len(self.first)), repeat=len(ids)):
            p = self.first[path[0]] * self.write[path[0]][ids[0]]
            for t in range(1, len(ids)):
                p *= self.move[path[t - 1]][path[t]] * self.write[path[t]][ids[t]]
            yield path, p

    def likelihood(self, ids):
        return math.fsum(p for _, p in self.paths(ids))

    def viterbi(self, ids):
        return max(self.paths(ids), key=lambda each: each[1])[0]

    def improved(self, rows):
        """What is expected to have happened in all rows, as shares."""
        states, vocab = range(len(self.first)), range(len(self.write[0]))
        first, move = [0.0 for _ in states], [[0.0 for _ in states] for _ in states]
        write = [[0.0 for _ in vocab] for _ in states]
        for ids in rows:
            whole = self.likelihood(ids)
            for path, p in self.paths(ids):
                first[path[0]] += p / whole
                for t, state in enumerate(path):
                    write[state][ids[t]] += p / whole
                for before, after in itertools.pairwise(path):
                    move[before][after] += p / whole
        shares = [[[each / sum(row) for each in row] for row in table] for table in (move, write)]
        return HMM([each / len(rows) for each in first], *shares)
