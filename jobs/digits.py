"""Five minutes: learn scikit-learn's handwritten digits, then classify the ones kept back.

tpupipe run jobs.digits -c configs/local.yaml
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import numpy as np
from pydantic import BaseModel

import tpupipe
from tpupipe import Every, Files, Infer, Preprocess, Train

SOURCE = Files(str(files("sklearn.datasets.data") / "digits.csv.gz"))  # a line: 64 grey values, the digit


class Params(BaseModel):  # the `job:` section: tpupipe run ... --set job.steps=500
    steps: int = 200


def parse(batch: Any, *, kept_back: bool) -> dict[str, Any]:  # the file's text in, its rows out
    table = np.array([line.split(",") for text in batch["text"] for line in text.splitlines()], np.float32)
    table = table[(np.arange(len(table)) % 5 == 0) == kept_back]  # every fifth digit is kept back
    return {"pixels": table[:, :64] / 16, "label": table[:, 64].astype(np.int32)}


def logits(params: Any, pixels: Any) -> Any:
    return pixels @ params["weights"] + params["bias"]


def build(cfg: Params) -> tpupipe.Job:
    def init(key: Any) -> Any:
        import jax

        return {"weights": jax.random.normal(key, (64, 10)) / 8, "bias": jax.numpy.zeros(10)}

    def step(params: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        import jax

        def loss(params: Any) -> Any:
            real = batch["mask"][:, None] * jax.nn.one_hot(batch["label"], 10)
            return -(jax.nn.log_softmax(logits(params, batch["pixels"])) * real).sum() / batch["mask"].sum()

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients), {"loss": value}

    return tpupipe.Job("digits", [
        Preprocess("train-rows", source=SOURCE, map=lambda batch: parse(batch, kept_back=False)),
        Preprocess("test-rows", source=SOURCE, map=lambda batch: parse(batch, kept_back=True)),
        Train("model", "train-rows", init, step, batch_size=64, steps=cfg.steps, checkpoint=Every(steps=50)),
        Infer("classified", "test-rows", "model", lambda p, b: {"digit": logits(p, b["pixels"]).argmax(1)}, keep=("label",)),
    ])  # fmt: skip


if __name__ == "__main__":
    tpupipe.main(build)
