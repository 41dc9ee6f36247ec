"""Types of a recipe's fields: counts with suffixes, paths, rates, the `fox:` section. Importing it imports no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

from retrofox.fox_spec import FoxSpec
from retrofox.spec_values import TOKENS
from retrofox.support.counts import ALLOWED, PATTERN, parse_count


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


def read_fox(value: Any) -> FoxSpec:
    """The spec of a `fox:` section, whose tokens may have suffixes; raises ValueError as FoxSpec does."""
    if isinstance(value, FoxSpec):
        return value
    if isinstance(value, dict):
        if told := [key for key in ("base", "base_revision", "version") if value.get(key) is not None]:
            raise ValueError(f"{told[0]}: conversion fills it in, remove it")
        value = {str(key): _tokens(item) if key in TOKENS else item for key, item in value.items()}
    return FoxSpec.from_dict(value)


whole = BeforeValidator(_whole, json_schema_input_type=int | Annotated[str, Field(pattern=f"^{PATTERN}$")])
MOST = 10**15
"""Tokens at most: more than there is text, and few enough for every product of counts to be a float."""
Count = Annotated[int, whole, Field(ge=0, le=MOST)]
Positive = Annotated[int, whole, Field(gt=0, le=MOST)]
Place = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fox = Annotated[FoxSpec, BeforeValidator(read_fox), PlainSerializer(lambda spec: spec.to_dict())]


class Section(BaseModel):
    """Base of every section: unknown keys and wrong types are errors, "3" is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, validate_default=False)
    hints: ClassVar[dict[str, str]] = {}
    """Other programs' names for keys of this section, or keys without a counterpart here -> what to do."""

    @model_validator(mode="after")
    def _consistent(self) -> Section:
        if found := [text for broken, text in self._rules() if broken]:
            raise ValueError("; ".join(found))
        return self

    def _rules(self) -> Iterator[tuple[bool, str]]:
        """Rules between fields: whether one is broken, and what to do then."""
        yield from ()
