"""The configuration: what a YAML file may say, and what the environment says.

The only place in the package that reads environment variables. Everything a caller gets from here is typed,
bounded and frozen, so the rest of the package does not check it again.
"""

from __future__ import annotations

from tpupipe.config.environment import (
    FAKED_SLICES_VARIABLE,
    STORAGE_VARIABLES,
    Environment,
    child_variables,
    environment,
    process_variables,
)
from tpupipe.config.identity import canonical, config_hash
from tpupipe.config.load import dry_run_config, job_parameters, load_config
from tpupipe.config.problems import MISSING, Problem
from tpupipe.config.schema import (
    BudgetsConfig,
    CheckpointConfig,
    ClusterConfig,
    Config,
    CostConfig,
    LogsConfig,
    ParityConfig,
    StageConfig,
    StoreConfig,
    sample_text,
)

__all__ = [
    "FAKED_SLICES_VARIABLE",
    "MISSING",
    "STORAGE_VARIABLES",
    "BudgetsConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "CostConfig",
    "Environment",
    "LogsConfig",
    "ParityConfig",
    "Problem",
    "StageConfig",
    "StoreConfig",
    "canonical",
    "child_variables",
    "config_hash",
    "dry_run_config",
    "environment",
    "job_parameters",
    "load_config",
    "process_variables",
    "sample_text",
]
