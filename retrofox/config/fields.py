"""Types of a recipe's fields: counts with suffixes, paths, rates, the `fox:` section. Importing it imports no torch."""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

from retrofox.fox_spec import FoxSpec
from retrofox.spec_values import TOKENS
from retrofox.support.counts import ALLOWED, PATTERN, parse_count

logger = logging.getLogger(__name__)
FOX_COUNTS = {"anneal_tokens", "annealed_tokens"}
"""Keys of a `fox:` section that take whole tokens alone."""


def _whole(value: object) -> object:
    """A count as an integer; text that is none is an error that lists the suffixes."""
    number = parse_count(value)
    if isinstance(number, str) or (isinstance(number, float) and math.isfinite(number)):
        raise ValueError(f"given {value!r}: it takes {ALLOWED}")
    return number


def _tokens(value: Any) -> Any:
    """The tokens in a value of a `fox:` section, suffixes read."""
    if isinstance(value, (list, tuple)):
        return [_tokens(item) for item in value]
    if isinstance(value, dict):
        return {key: _tokens(item) for key, item in value.items()}
    return math.inf if value == "inf" else parse_count(value)


def read_fox(value: object) -> FoxSpec:
    """The spec of a `fox:` section, whose tokens may have suffixes.

    Raises:
        ValueError: no mapping, an unknown key, or a value outside its range.
    """
    if isinstance(value, FoxSpec):
        return value
    if not isinstance(value, dict):
        raise ValueError(f"a mapping such as {{rope: partial, max_wavelength: 1400}}, or null; got {value!r}")
    values = {str(key): _tokens(item) if key in TOKENS else item for key, item in value.items()}
    for key in FOX_COUNTS & values.keys():
        count = values[key]
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ValueError(f"{key} must be {ALLOWED}, 0 or more; got {value[key]!r}")
    try:
        return FoxSpec.from_dict(values)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{_of_wrong_type(values)} ({error})") from None


def _of_wrong_type(values: dict[str, Any]) -> str:
    """Which value of a `fox:` section has a type that can't be meant."""
    for key, item in values.items():
        try:
            FoxSpec.from_dict({key: item})
        except (TypeError, AttributeError):
            return f"{key} has the wrong type: {item!r}"
        except ValueError:
            continue
    return "a value has the wrong type"


whole = BeforeValidator(_whole, json_schema_input_type=int | Annotated[str, Field(pattern=f"^{PATTERN}$")])
MOST = 10**15
"""Tokens at most: more than there is text, and few enough for every product of counts to be a float."""
Count = Annotated[int, whole, Field(ge=0, le=MOST)]
Positive = Annotated[int, whole, Field(gt=0, le=MOST)]
Place = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fox = Annotated[FoxSpec, BeforeValidator(read_fox), PlainSerializer(lambda spec: spec.to_dict())]


def zero(why: str) -> AfterValidator:
    """A rate that must be 0 in stages of one objective."""

    def check(rate: float) -> float:
        if rate:
            raise ValueError(f"must be 0 or left out, got {rate:g}: {why}")
        return rate

    return AfterValidator(check)


def without_idle_nulls(*kinds: type[BaseModel]) -> Callable[[Any], Any]:
    """Drops `key: null` where only some of the kinds of a section have the key: recipes of earlier runs hold these."""
    names = [set(kind.model_fields) for kind in kinds]
    of_some = set.union(*names) - set.intersection(*names)

    def drop(values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if value is not None or key not in of_some}

    return drop


@functools.cache
def _say_once(text: str) -> None:
    """Warns, once in a process: a run reads its recipe several times."""
    logger.warning(text)


class Section(BaseModel):
    """Base of every section: unknown keys and wrong types are errors, "3" is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, validate_default=False)
    told_by: ClassVar[str] = ""
    """The key that tells a section's kinds apart, where there are several."""

    elsewhere: ClassVar[dict[str, str]] = {}
    """Other programs' names for keys of this section -> ours."""

    left_out: ClassVar[dict[str, str]] = {}
    """Other programs' keys without a counterpart here -> why there is none."""

    old_names: ClassVar[dict[str, str]] = {}
    """Former names of keys of this section -> their names, for recipes of then."""

    gone: ClassVar[dict[str, Any]] = {}
    """Keys that are no more -> their defaults, which runs of then wrote out and which are left out."""

    @model_validator(mode="before")
    @classmethod
    def _of_then(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = {key: value for key, value in values.items() if key not in cls.gone or value != cls.gone[key]}
        for old, new in cls.old_names.items():
            if old in values and new in values:
                raise ValueError(f"{old} is the old name of {new}: remove it")
            if old in values:
                _say_once(f"{old} is the old name of {new}")
        return {cls.old_names.get(key, key): value for key, value in values.items()}

    @classmethod
    def tags(cls) -> tuple[str, ...]:
        """The values of that key which mean this kind."""
        return get_args(cls.model_fields[cls.told_by].annotation)
