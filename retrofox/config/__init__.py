"""The recipe: one YAML file that says which model, which retrofit, which data, which stages; strict, with hints.

YAML -> `load_recipe` (overrides `a.b=c` applied, unknown keys refused) -> `Recipe` -> `dump` (defaults written out).
Importing this package imports no torch.
"""

from retrofox.config.fields import Section
from retrofox.config.reading import dump, load_recipe, schema, validate
from retrofox.config.recipe import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    LoraConfig,
    ParallelConfig,
    Recipe,
    RopeScaling,
    Source,
)
from retrofox.config.stage import (
    GATE_RATE_FACTOR,
    ROLES,
    AdaptStage,
    AlignStage,
    Budget,
    BudgetedStage,
    DistillStage,
    ExtendStage,
    Rates,
    Stage,
    TaughtStage,
    stage_of,
)

__all__ = [
    "GATE_RATE_FACTOR",
    "ROLES",
    "AdaptStage",
    "AlignStage",
    "Budget",
    "BudgetedStage",
    "CheckpointConfig",
    "DataConfig",
    "DistillStage",
    "ExtendStage",
    "LogConfig",
    "LoraConfig",
    "ParallelConfig",
    "Rates",
    "Recipe",
    "RopeScaling",
    "Section",
    "Source",
    "Stage",
    "TaughtStage",
    "dump",
    "load_recipe",
    "schema",
    "stage_of",
    "validate",
]
