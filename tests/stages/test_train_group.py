"""What Ray Train brings up with a training group."""

from __future__ import annotations

from pathlib import Path

from ray.train.v2.api.config import RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer

from tpupipe.stages.train_group import _Trainer


def test_nothing_of_ray_data_is_brought_up(tmp_path: Path) -> None:
    """All that a trainer brings up of itself, but for the processes that hand out data sets."""
    trainer = _Trainer(
        lambda: None, scaling_config=ScalingConfig(num_workers=1), run_config=RunConfig(storage_path=str(tmp_path))
    )
    ours, all_of_them = (
        {type(callback).__name__ for callback in make(trainer)}
        for make in (_Trainer._create_default_callbacks, JaxTrainer._create_default_callbacks)
    )
    assert all_of_them - ours == {"DatasetsCallback"}
    assert "BackendSetupCallback" in ours
