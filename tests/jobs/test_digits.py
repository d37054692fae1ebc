"""The five-minute example, with plain JAX on the CPU."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

from jobs import digits


def rows(*, kept_back: bool) -> dict[str, np.ndarray]:
    (pattern,) = digits.SOURCE.pattern
    text = gzip.decompress(Path(pattern).read_bytes()).decode()
    return digits.parse({"text": np.array([text], object)}, kept_back=kept_back)


def test_the_rows_are_scikit_learns():
    """Both parts together are load_digits(), every fifth row kept back."""
    from sklearn.datasets import load_digits

    whole = load_digits()
    train, test = rows(kept_back=False), rows(kept_back=True)
    assert len(train["label"]) + len(test["label"]) == len(whole.target)
    np.testing.assert_array_equal(test["label"], whole.target[::5])
    np.testing.assert_array_equal(train["pixels"][0], whole.data[1].astype(np.float32) / 16)


def test_it_learns_the_digits():
    """After the job's steps, nine of ten digits that were kept back are right."""
    import jax

    job = digits.build(digits.Params(steps=100))
    train, infer = job.stage("model"), job.stage("classified")
    data, test = rows(kept_back=False), rows(kept_back=True)
    params, step = train.init(jax.random.key(0)), jax.jit(train.step)
    for i in range(train.steps):
        at = np.arange(i * train.batch_size, (i + 1) * train.batch_size) % len(data["label"])
        batch = {name: column[at] for name, column in data.items()}
        params, metrics = step(params, {**batch, "mask": np.ones(len(at), bool)})
    found = np.asarray(infer.apply(params, {"pixels": test["pixels"]})["digit"])
    assert np.isfinite(metrics["loss"])
    assert (found == test["label"]).mean() > 0.9


def test_the_example_stays_short():
    """It is there to be read: under 60 lines."""
    assert len(Path(digits.__file__).read_text(encoding="utf-8").splitlines()) < 60
