"""Finds the handler of a message type, reads from its signature what it takes, and checks what it returns.

A handler is `async def f(message: Message[T], db: Database)` or, in batch form,
`async def f(messages: list[Message[T]], db: Database)`, or with `Messages[T]` for its columns.
`T` decides the value: `bytes` is raw, `dict` or nothing is plain JSON, and a dataclass, pydantic
model or TypedDict is validated.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import typing_extensions
from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from processor.errors import ConfigError
from processor.messages.formats.json import BadValue, may_lose_digits, parse_exactly
from processor.messages.incoming import Incoming, RawColumns
from processor.messages.message import Message, Messages, Output, Outputs, Result
from processor.messages.types import MessageType, MessageTypes
from processor.settings.importing import resolve

if TYPE_CHECKING:
    from processor.settings.schema import Settings

Handler = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """A type of messages, and its handler."""

    type: MessageType
    handler: Handler
    takes_batch: bool
    by_column: bool  # it takes a batch as Messages
    timeout_seconds: float

    @property
    def name(self) -> str:
        """The handler's name, for people."""
        return self.type.handler


class Given(NamedTuple):
    """What a batch handler returned: outputs with the messages that they answer, and results.

    `where` has the index in the batch of the message that each output answers, `places` the output's place among
    those of the same message.
    """

    outputs: Sequence[Output] = ()
    where: Sequence[int] = ()
    places: list[int] = []  # noqa: RUF012 - is never changed
    results: Sequence[tuple[int, Any]] = ()


class Routes:
    def __init__(self, routes: Mapping[str, Route]) -> None:
        self._routes = {route.type: route for route in routes.values()}
        self.types = MessageTypes({name: route.type for name, route in routes.items()})
        self.act = any(route.type.acts for route in routes.values())

    def of(self, message_type: MessageType) -> Route:
        return self._routes[message_type]


def load(settings: Settings) -> Routes:
    """Import every handler and read its signature; ConfigError names the key that is wrong."""
    routes = {}
    for name, handler in settings.handlers.items():
        where = f"{settings.source}: handlers.{name}"
        try:
            function = resolve(handler.call)
            takes_batch, by_column, annotation = _signature(function)
            read, read_all = _value_readers(annotation)
            if handler.effect and takes_batch:
                raise ConfigError(f"{handler.call}: a handler with effect = true takes one message, not a list of them")
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        routes[name] = Route(
            MessageType(name, handler.call, read, read_all, handler.inbox, handler.effect),
            function,
            takes_batch,
            by_column,
            (handler.timeout_ms or settings.failure.timeout_ms) / 1000,
        )
    return Routes(routes)


def given_for_one(handler: str, value: Any) -> tuple[Sequence[Output], Any]:
    """Return outputs and result. A handler may return nothing, an Output, a list of them, or a Result."""
    if value is None:
        return (), None
    if isinstance(value, Output):
        return (value,), None
    if isinstance(value, Result):
        return _outputs_of(handler, value), value.value
    if isinstance(value, list | tuple):
        for item in value:
            if not isinstance(item, Output):
                raise TypeError(
                    f"{handler} returned {_a(value)} with {_a(item)} in it; return Outputs, or Result(value, outputs)"
                )
        return value, None
    if isinstance(value, Outputs):
        raise TypeError(f"{handler} returned Outputs, which answer a batch; return an Output, or a list of them")
    raise TypeError(
        f"{handler} returned {_a(value)}; return an Output, a list of them, "
        "or Result(value) for a value to keep in the inbox row"
    )


def _outputs_of(handler: str, result: Result) -> Sequence[Output]:
    given: Any = result.outputs
    if not isinstance(given, list | tuple):
        raise TypeError(f"{handler} returned a Result with {_a(given)} for its outputs; they are a list of Output")
    for item in given:
        if not isinstance(item, Output):
            raise TypeError(f"{handler} returned a Result with {_a(item)} among its outputs; they are a list of Output")
    return given


def _a(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def given_for_batch(handler: str, messages: Sequence[Message[Any]], value: Any) -> Given:
    """Return what a batch handler gave, in the order of the messages that it names as causes."""
    if value is None:
        return Given()
    if not isinstance(value, list | tuple):
        value = [value]
    one_for_each = len(value) == len(messages) and set(map(type, value)) == {Output}
    if one_for_each and all(map(is_, map(_cause, value), messages)):  # the usual case: in order
        return Given(value, range(len(messages)), [0] * len(messages))
    index_of = {id(message): index for index, message in enumerate(messages)}
    outputs: list[tuple[int, Output]] = []
    results: dict[int, Any] = {}
    for item in value:
        if not isinstance(item, Output | Result):
            raise TypeError(f"{handler} returned {_a(item)}; a batch handler returns Outputs")
        index = index_of.get(id(item.cause))
        if index is None:
            raise TypeError(
                f"{handler} returned {_a(item)} without a message of this batch as cause; "
                f"write {type(item).__name__}(..., cause=message)"
            )
        if isinstance(item, Result):
            results[index] = item.value
            outputs += [(index, output) for output in _outputs_of(handler, item)]
        else:
            outputs.append((index, item))
    outputs.sort(key=itemgetter(0))
    where = [index for index, _ in outputs]
    return Given(
        [output for _, output in outputs],
        where,
        places(where),
        [(index, result) for index, result in results.items() if result is not None],
    )


def places(where: Sequence[int]) -> list[int]:
    """Return the place of each output among those of its message; equal indexes have to be neighbours."""
    if len(set(where)) == len(where):
        return [0] * len(where)
    return [place for _, run in groupby(where) for place, _ in enumerate(run)]


_cause = attrgetter("cause")


def _signature(function: Handler) -> tuple[bool, bool, Any]:
    """Return whether it takes a batch, whether it takes that as Messages, and the T of Message[T]."""
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"{_label(function)} is not an `async def` function")
    parameters = list(inspect.signature(function).parameters.values())
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if len(parameters) < 2 or len(required) > 2 or any(p.kind is p.KEYWORD_ONLY for p in required):
        raise ConfigError(f"{_label(function)} must take two parameters, (message, db)")
    try:
        annotation = typing.get_type_hints(function).get(parameters[0].name, Message)
    except NameError as error:
        raise ConfigError(
            f"{_label(function)}: its annotations cannot be read: {error}; "
            "types of messages must be importable at run time, not only under TYPE_CHECKING"
        ) from None
    origin = typing.get_origin(annotation)
    if Messages in (annotation, origin):
        return True, True, typing.get_args(annotation)[0] if origin else Any
    takes_batch = origin in (list, Sequence)
    if takes_batch:
        annotation = typing.get_args(annotation)[0]
    if annotation is Message or annotation is Any:
        return takes_batch, False, Any
    if typing.get_origin(annotation) is Message:
        return takes_batch, False, typing.get_args(annotation)[0]
    raise ConfigError(
        f"{_label(function)}: its first parameter must be annotated Message[T], list[Message[T]] or Messages[T], "
        f"not {annotation}"
    )


ReadOne = Callable[[Incoming], Any]
ReadMany = Callable[[RawColumns], Sequence[Any] | None]


def _value_readers(annotation: Any) -> tuple[ReadOne, ReadMany]:
    if annotation is Any:
        return _plain, RawColumns.documents
    optional = False
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        optional = len(members) < len(typing.get_args(annotation))
        if len(members) == 1:
            annotation = members[0]
    read, read_many = _present_value_readers(annotation)

    def value(incoming: Incoming) -> Any:
        if incoming.value is not None:
            return read(incoming)
        if optional:
            return None
        raise BadValue(
            "null_value",
            f"a delete marker (null value), but the handler takes {annotation}; annotate `… | None`",
        )

    return value, read_many


def _present_value_readers(annotation: Any) -> tuple[ReadOne, ReadMany]:
    if annotation is bytes:
        return lambda incoming: incoming.value, lambda columns: columns.values
    if annotation is Any or isinstance(annotation, typing.TypeVar):
        return _plain, RawColumns.documents
    if annotation is dict or (typing.get_origin(annotation) is dict and typing.get_args(annotation)[1] is Any):
        return _plain_object, _plain_objects
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(_known_to_pydantic(annotation))
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        raise ConfigError(f"{annotation} cannot be validated from JSON: {str(error).splitlines()[0]}") from None

    def validate(value: bytes) -> Any:
        if may_lose_digits(value):
            return adapter.validate_python(parse_exactly(value))
        return adapter.validate_json(value)

    def validated(incoming: Incoming) -> Any:
        assert incoming.value is not None
        try:
            return validate(incoming.value)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, problem['loc'])) or 'value'}: {problem['msg']}"
                for problem in error.errors(include_url=False, include_input=False, include_context=False)[:5]
            )
            reason = "not_json" if error.errors()[0]["type"] == "json_invalid" else "wrong_shape"
            raise BadValue(reason, f"value does not fit {_type_name(annotation)}: {problems}") from None

    def validated_many(columns: RawColumns) -> Sequence[Any] | None:
        try:
            if not columns.may_lose_digits():
                return list(map(adapter.validate_json, columns.values))
            return list(map(validate, columns.values))
        except Exception:  # a handler's own validator may raise anything; `validated` finds the value at fault
            return None

    return validated, validated_many


def _known_to_pydantic(annotation: Any) -> Any:
    """Return the annotation with TypedDicts of typing_extensions: before Python 3.12, pydantic takes no others."""
    if sys.version_info >= (3, 12):
        return annotation
    if typing.is_typeddict(annotation):
        fields = {
            name: hint if name in annotation.__required_keys__ else typing.NotRequired[hint]
            for name, hint in (
                (name, _known_to_pydantic(hint)) for name, hint in typing.get_type_hints(annotation).items()
            )
        }
        return typing_extensions.TypedDict(annotation.__name__, fields)  # type: ignore[operator]
    if isinstance(annotation, types.GenericAlias):
        origin: Any = annotation.__origin__
        return types.GenericAlias(origin, tuple(map(_known_to_pydantic, annotation.__args__)))
    return annotation


def _plain(incoming: Incoming) -> Any:
    document = incoming.document()
    if incoming.problem is not None:
        raise incoming.problem
    return document


def _plain_objects(columns: RawColumns) -> Sequence[Any] | None:
    documents = columns.documents()
    return documents if documents is not None and set(map(type, documents)) == {dict} else None


def _plain_object(incoming: Incoming) -> Any:
    document = _plain(incoming)
    if not isinstance(document, dict):
        raise BadValue("wrong_shape", f"value is a JSON {type(document).__name__}, the handler takes an object")
    return document


def _label(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', function)}"


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)
