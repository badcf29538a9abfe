"""docs/protos.md: every service and message of protos/, with the comments of their sources."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from importlib.resources import files
from inspect import cleandoc
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parents[1] / "protos"
PUBLIC = "router"
HEAD = """# Messages

`router.proto` is the public contract; the other files are between services. Order of messages, limits and failures are
in [protocol](protocol.md). A field without a comment is what its name says."""
FIELD, NESTED, ENUM, VALUE, METHOD, MESSAGE, ENUM_AT_TOP, SERVICE, SYNTAX = 2, 3, 4, 2, 2, 4, 5, 6, 12
"""Numbers of fields in descriptor.proto, of which the paths of SourceCodeInfo consist."""

Table = Callable[..., Iterator[str]]


def describe_messages(table: Table) -> Iterator[str]:
    """The page's lines. `table` makes one of a head and rows.

    Raises: SystemExit when protoc refuses the sources.
    """
    yield HEAD
    described = sorted(_describe_files(), key=lambda file: (PUBLIC not in file.name, file.name))
    for file in described:
        yield from _File(file, table).lines()


def _describe_files() -> list[FileDescriptorProto]:
    sources = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "outrider").rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "set"
        well_known = files("grpc_tools") / "_proto"
        arguments = ["--include_source_info", f"--descriptor_set_out={output}", *sources]
        if protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", *arguments]) != 0:
            raise SystemExit("messages: protoc failed")
        return list(FileDescriptorSet.FromString(output.read_bytes()).file)


class _File:
    def __init__(self, file: FileDescriptorProto, table: Table) -> None:
        self._file = file
        self._table = table
        self._locations = {tuple(each.path): each for each in file.source_code_info.location}

    def lines(self) -> Iterator[str]:
        name = Path(self._file.name).name
        source = f"protos/{self._file.name}"
        yield f"\n## {name}\n\nSource: [{source}](../{source}).\n\n{self._comment(SYNTAX)}"
        for index, service in enumerate(self._file.service):
            path = (SERVICE, index)
            yield f"\n### {service.name}\n\n{self._comment(*path)}"
            yield from self._table(
                ("call", "request", "response", "meaning"),
                (
                    (
                        f"`{method.name}`",
                        _stream(method.input_type, is_stream=method.client_streaming),
                        _stream(method.output_type, is_stream=method.server_streaming),
                        self._comment(*path, METHOD, number),
                    )
                    for number, method in enumerate(service.method)
                ),
            )
        for index, message in enumerate(self._file.message_type):
            yield from self._message(message, (MESSAGE, index), message.name)
        for index, enum in enumerate(self._file.enum_type):
            yield from self._enum(enum, (ENUM_AT_TOP, index), enum.name)

    def _message(self, message: DescriptorProto, path: tuple[int, ...], name: str) -> Iterator[str]:
        yield f"\n### {name}\n\n{self._comment(*path)}"
        maps = {entry.name: entry for entry in message.nested_type if entry.options.map_entry}
        rows = [
            (str(field.number), f"`{field.name}`", _type(field, message, maps), self._comment(*path, FIELD, index))
            for index, field in enumerate(message.field)
        ]
        yield from self._table(("number", "field", "type", "meaning"), rows) if rows else ("\nNo fields.",)
        for index, nested in enumerate(message.nested_type):
            if nested.name not in maps:
                yield from self._message(nested, (*path, NESTED, index), f"{name}.{nested.name}")
        for index, enum in enumerate(message.enum_type):
            yield from self._enum(enum, (*path, ENUM, index), f"{name}.{enum.name}")

    def _enum(self, enum: EnumDescriptorProto, path: tuple[int, ...], name: str) -> Iterator[str]:
        yield f"\n### {name}\n\n{self._comment(*path)}"
        yield from self._table(
            ("number", "value", "meaning"),
            (
                (str(value.number), f"`{value.name}`", self._comment(*path, VALUE, index))
                for index, value in enumerate(enum.value)
            ),
        )

    def _comment(self, *path: int) -> str:
        """Above a declaration or behind it. Lists in it stand apart, as Markdown wants them."""
        location = self._locations.get(path)
        if location is None:
            return ""
        text = cleandoc(location.leading_comments or location.trailing_comments)
        lists = re.sub(r"^ *(?=\d+\. )", "", text, flags=re.MULTILINE)
        before_the_first = re.sub(r"^(?=\d+\. )", "\n", lists, count=1, flags=re.MULTILINE)
        return re.sub(r"^(\d+\. .*|   .*)\n(?=\S)(?!\d+\. )", r"\1\n\n", before_the_first, flags=re.MULTILINE)


def _stream(name: str, *, is_stream: bool) -> str:
    return f"{'stream of ' if is_stream else ''}{_link(name)}"


def _link(name: str) -> str:
    """Of a message or enum: our own by its heading."""
    short = name.removeprefix(".outrider.v1.")
    return f"`{name[1:]}`" if short == name else f"[{short}](#{short.replace('.', '').lower()})"


def _type(field: FieldDescriptorProto, message: DescriptorProto, maps: dict[str, DescriptorProto]) -> str:
    entry = maps.get(field.type_name.rpartition(".")[2])
    if entry is not None:
        return f"map of {' to '.join(_type(each, entry, {}) for each in entry.field)}"
    name = _link(field.type_name) if field.type_name else FieldDescriptorProto.Type.Name(field.type)[5:].lower()
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    if field.proto3_optional:
        return f"optional {name}"
    return f"{name}, one of `{message.oneof_decl[field.oneof_index].name}`" if field.HasField("oneof_index") else name
