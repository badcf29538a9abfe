"""Converts dataclasses to and from messages whose fields have the same names.

Messages sent for each token are converted by hand instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass
from dataclasses import fields as fields_of
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from google.protobuf.message import Message

Value = TypeVar("Value")
Proto = TypeVar("Proto", bound=Message)


class Converter(Protocol):
    """Converts the value of a field, or each value of a repeated field."""

    @property
    def to_proto(self) -> Callable[[Any], Any]: ...

    @property
    def from_proto(self) -> Callable[[Any], Any]: ...


@dataclass(frozen=True, slots=True)
class Conversion:
    to_proto: Callable[[Any], Any]
    from_proto: Callable[[Any], Any]


MAX_TRACEPARENT_LENGTH = 64
"""Maximum characters of a traceparent, which has 55 in the first version of W3C's format."""

TRACEPARENT = Conversion(str, lambda value: value if len(value) <= MAX_TRACEPARENT_LENGTH else "")
"""Converts a traceparent. Drops it if it is too long, because it is kept as long as its request."""

_MICROSECONDS = Conversion(lambda seconds: round(seconds * 1e6), lambda microseconds: microseconds / 1e6)


class _Field(NamedTuple):
    name: str
    proto_name: str
    to_proto: Callable[[Any], Any]
    from_proto: Callable[[Any], Any]
    may_be_unset: bool  # whether the message may leave the field unset, so that the dataclass's default applies


class Fields(Generic[Value, Proto]):
    """Converts values to and from messages, field by field.

    A tuple becomes a repeated field. A field `…seconds` may be called `…microseconds` in the message.

    `elsewhere`: fields of either side without a counterpart; the caller passes them with each value, or leaves them
    unset. `names`: the message's field names where they differ, by the dataclass's field name. `converters`: by the
    dataclass's field name. Raises: TypeError if any other field of either side has no counterpart.
    """

    def __init__(
        self,
        value_type: type[Value],
        proto_type: type[Proto],
        *,
        elsewhere: Collection[str] = (),
        names: Mapping[str, str] | None = None,
        **converters: Converter,
    ) -> None:
        self.value_type, self._proto_type = value_type, proto_type
        self._fields: list[_Field] = []
        described: dict[str, Any] = dict(proto_type.DESCRIPTOR.fields_by_name)
        value_fields: Any = value_type
        for field in fields_of(value_fields):
            if field.name in elsewhere:
                continue
            name, converter = (names or {}).get(field.name, field.name), converters.get(field.name)
            if name not in described and name.endswith("seconds"):
                name, converter = name.removesuffix("seconds") + "microseconds", _MICROSECONDS
            if name not in described:
                raise TypeError(f"{proto_type.__name__} has no {name}")
            proto_field = described.pop(name)
            is_map = proto_field.message_type is not None and proto_field.message_type.GetOptions().map_entry
            has_default = field.default is not MISSING or field.default_factory is not MISSING
            to_proto, from_proto = _of_field(converter, is_list=proto_field.is_repeated and not is_map)
            may_be_unset = proto_field.has_presence and has_default
            self._fields.append(_Field(field.name, name, to_proto, from_proto, may_be_unset))
        forgotten = described.keys() - set(elsewhere)
        if forgotten:
            raise TypeError(f"{value_type.__name__} has no {', '.join(sorted(forgotten))}")

    def to_proto(self, value: Value, **others: Any) -> Proto:
        """Returns the message. `others`: fields that the value does not have. Fields that are None are left unset."""
        for name, proto_name, to_proto, _, _ in self._fields:
            found = getattr(value, name)
            if found is not None:
                others[proto_name] = to_proto(found)
        return self._proto_type(**others)

    def from_proto(self, proto: Proto, **others: Any) -> Value:
        """Returns the value. `others`: fields that the message does not have, or that override it."""
        for name, proto_name, _, from_proto, may_be_unset in self._fields:
            if name not in others and not (may_be_unset and not proto.HasField(proto_name)):
                others[name] = from_proto(getattr(proto, proto_name))
        return self.value_type(**others)


def _of_field(converter: Converter | None, *, is_list: bool) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Returns (conversion to the message's value, conversion from the message's value)."""
    if not is_list:
        return (converter.to_proto, converter.from_proto) if converter is not None else (_same, _same)
    if converter is None:
        return _same, tuple
    one_to_proto, one_from_proto = converter.to_proto, converter.from_proto
    return lambda values: map(one_to_proto, values), lambda protos: tuple(map(one_from_proto, protos))


def _same(value: Any) -> Any:
    return value
