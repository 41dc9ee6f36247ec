"""The recipe: one YAML file that says which model, which retrofit, which data, which stages; strict, with hints.

YAML -> `load_recipe` (overrides `a.b=c` applied, unknown keys refused) -> `Recipe` -> `dump` (defaults written out).
Importing this package imports no torch.
"""

from retrofox.config.reading import dump as dump
from retrofox.config.reading import load_recipe as load_recipe
from retrofox.config.reading import schema as schema
from retrofox.config.reading import validate as validate
from retrofox.config.recipe import CheckpointConfig as CheckpointConfig
from retrofox.config.recipe import DataConfig as DataConfig
from retrofox.config.recipe import LoraConfig as LoraConfig
from retrofox.config.recipe import ParallelConfig as ParallelConfig
from retrofox.config.recipe import Recipe as Recipe
from retrofox.config.recipe import Source as Source
from retrofox.config.stage import ROLES as ROLES
from retrofox.config.stage import AlignStage as AlignStage
from retrofox.config.stage import Budget as Budget
from retrofox.config.stage import BudgetedStage as BudgetedStage
from retrofox.config.stage import DistillStage as DistillStage
from retrofox.config.stage import ExtendStage as ExtendStage
from retrofox.config.stage import Stage as Stage
from retrofox.config.stage import TaughtStage as TaughtStage
