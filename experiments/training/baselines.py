"""What a model must beat: unigram and bigram counts, smoothed. Nats per token."""

from __future__ import annotations

import numpy as np


def unigram(stream: np.ndarray, vocabulary: int) -> np.ndarray:
    """float64 [V]: frequencies in stream [N], one added to each count."""
    counts = np.bincount(stream, minlength=vocabulary) + 1.0
    return counts / counts.sum()


def bigram(stream: np.ndarray, vocabulary: int, weight: float = 10.0) -> np.ndarray:
    """float64 [V, V], rows the previous token: counts drawn towards the unigram.

    p(b | a) = (count(a, b) + weight p(b)) / (count(a) + weight), the Dirichlet smoothing.
    """
    pairs = stream[:-1].astype(np.int64) * vocabulary + stream[1:]
    counts = np.bincount(pairs, minlength=vocabulary**2).reshape(vocabulary, vocabulary)
    mixed = counts + weight * unigram(stream, vocabulary)
    return mixed / mixed.sum(1, keepdims=True)


def losses(training: np.ndarray, held_out: np.ndarray, vocabulary: int) -> dict[str, float]:
    """Mean nats of held_out [S, T], its first column apart, under both baselines."""
    before, after = held_out[:, :-1], held_out[:, 1:]
    return {
        "unigram": float(-np.log(unigram(training, vocabulary)[after]).mean()),
        "bigram": float(-np.log(bigram(training, vocabulary)[before, after]).mean()),
    }
