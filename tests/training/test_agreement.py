"""How well a scorer ranks: against scipy and against sets written out."""

import numpy as np
import pytest
import scipy.stats

from inertiakv_jax.training.agreement import (
    Agreement,
    agreement,
    mean_agreement,
    rank_agreement,
    top_tenth,
)


def test_agreement_is_scipys():
    rng = np.random.default_rng(0)
    scores, target = rng.normal(size=(2, 3, 100)), rng.normal(size=(2, 3, 100))
    scores[0, 0, :40] = 1.0  # equals
    seen = np.arange(100) < np.array([100, 70, 55])[:, None]
    got, _ = rank_agreement(scores, target, seen)
    expected = [
        scipy.stats.spearmanr(a[s], b[s]).statistic
        for layer in zip(scores, target, strict=True)
        for a, b, s in zip(*layer, seen, strict=True)
    ]
    assert got == pytest.approx(np.mean(expected), rel=1e-9)


def test_top_tenth_is_what_a_policy_keeps():
    values = np.zeros((1, 40))
    values[0, :35] = 1.0  # of equals the lower position goes; what is not seen is no candidate
    seen = (np.arange(40) < 30)[None]
    assert np.flatnonzero(top_tenth(values, seen)).tolist() == [27, 28, 29]
    _, jaccard = rank_agreement(values, np.arange(40.0)[None], seen)
    assert jaccard == 1.0
    spearman, jaccard = rank_agreement(values, -np.arange(40.0)[None], seen)
    assert (spearman, jaccard) == (0.0, 0.0)


def test_one_ranking_of_all_layers():
    """Two layers, weights 4 to 5: the head's sum ranks as attention's does, its layers do not."""
    attention = np.full((2, 1, 10), 0.01)
    attention[0, 0, 3] = attention[1, 0, 7] = 0.91
    scores = np.zeros((2, 1, 10))
    scores[1] = 4 / 9 * attention[0] + 5 / 9 * attention[1]
    seen = np.ones((1, 10), bool)
    found = agreement(2.5, scores, np.log(attention), seen)
    assert found.loss == 2.5
    assert found.shared_jaccard == 1.0
    assert found.shared_spearman == pytest.approx(1.0)
    # In layer 0 the head ranks nothing: its top tenth is the last token, attention's is token 3.
    assert found.jaccard == 0.5
    assert 0 < found.spearman < 0.5


def test_mean_over_texts():
    texts = [Agreement(1.0, 0.0, 0.2, 0.4, 0.6), Agreement(3.0, 1.0, 0.4, 0.6, 1.0)]
    assert mean_agreement(texts) == Agreement(2.0, 0.5, pytest.approx(0.3), 0.5, 0.8)
