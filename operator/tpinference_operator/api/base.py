"""What the models of the API share: naming, how each field takes effect, Kubernetes quantities.

Knows no field of the API.
"""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal
from enum import Enum
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
)
from pydantic.alias_generators import to_camel

from tpinference_operator.errors import InvalidQuantity

QUANTITY_PATTERN = r"^\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,2})?$"
"""What Kubernetes reads as a quantity that is not negative. The usual pattern for CRDs lets text
through (`4kM`) that is none; exponents beyond two digits fit no resource."""

_SUFFIXES = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", start=1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", start=1)},
}


class Effect(Enum):
    """What a change of a field does. Each field of the spec has exactly one, as metadata."""

    ROLLS = "rolls"
    """Part of the revision: groups are replaced."""
    LIVE = "live"
    """Acted on without a restart."""
    NONE = "none"
    """Changes nothing that runs."""


class ApiModel(BaseModel):
    """Frozen; a field that is not known (a newer CRD) is ignored, never an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        alias_generator=to_camel,
        populate_by_name=True,
        use_attribute_docstrings=True,
    )

    def to_raw(self) -> dict[str, Any]:
        """JSON data as the API server stores it: camelCase, absent instead of null."""
        return self.model_dump(by_alias=True, mode="json", exclude_none=True)


def _quantity_text(value: object) -> object:
    """The API allows plain numbers; one form inside keeps `2` and `"2"` the same revision."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return str(value)


Quantity = Annotated[
    str,
    BeforeValidator(_quantity_text),
    StringConstraints(pattern=QUANTITY_PATTERN, max_length=64),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "maxLength": 64,
            "pattern": QUANTITY_PATTERN,
            "x-kubernetes-int-or-string": True,
        }
    ),
]


def list_map(*keys: str) -> Any:
    """Metadata of a list that the API server merges by these keys; they must be unique in it."""
    return Field(
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": list(keys),
        }
    )


def parse_quantity(text: str) -> Decimal:
    """The number that a Kubernetes quantity stands for: `500m` is 0.5, `1Ki` is 1024."""
    digits = text.rstrip("numkKMGTPEi")
    suffix = text[len(digits) :]
    if suffix not in _SUFFIXES:
        raise InvalidQuantity(f"quantity is {text!r}, its suffix {suffix!r} is not known")
    try:
        return Decimal(digits) * _SUFFIXES[suffix]
    except ArithmeticError as error:
        raise InvalidQuantity(f"quantity is {text!r}, not a number with a suffix") from error


def quantity_ceil(text: str) -> int:
    """A quantity for a program that takes whole numbers only; rounds up."""
    return int(parse_quantity(text).to_integral_value(rounding=ROUND_CEILING))
