"""Small configurations."""

from __future__ import annotations

from typing import Any

from tpupipe.config import Config

WORLD: dict[str, Any] = {
    "store": {"uri": "gs://bucket/x", "embedded": True},
    "cluster": {"kind": "fake", "generation": "v6e", "topology": "2x4", "chips_per_vm": 4},
}


def config_of(**sections: Any) -> Config:
    """A valid configuration with some sections replaced."""
    return Config.model_validate({**WORLD, **sections})
