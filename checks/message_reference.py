"""Generates docs/protos.md: the calls and messages of protos/, one line each. The sources describe every field."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from importlib.resources import files
from inspect import cleandoc
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parents[1] / "protos"
PUBLIC = "router"
HEAD = """# Messages

`router.proto` is the public contract; the other files are between services. The sources describe every field. Order of
messages, limits and failures are in [protocol](protocol.md)."""
METHOD, MESSAGE, ENUM, SERVICE, SYNTAX = 2, 4, 5, 6, 12
"""Field numbers in descriptor.proto, which the paths of SourceCodeInfo consist of."""

Table = Callable[..., Iterator[str]]


def describe_messages(table: Table) -> Iterator[str]:
    """Yields the page's lines. `table` makes a table of a head and rows.

    Raises: SystemExit if protoc rejects the sources.
    """
    yield HEAD
    for file in sorted(_describe_files(), key=lambda file: (PUBLIC not in file.name, file.name)):
        yield from _describe_file(file, table)


def _describe_files() -> list[FileDescriptorProto]:
    sources = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "outrider").rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "set"
        well_known = files("grpc_tools") / "_proto"
        arguments = ["--include_source_info", f"--descriptor_set_out={output}", *sources]
        if protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", *arguments]) != 0:
            raise SystemExit("messages: protoc failed")
        return list(FileDescriptorSet.FromString(output.read_bytes()).file)


def _describe_file(file: FileDescriptorProto, table: Table) -> Iterator[str]:
    sentences = {
        tuple(location.path): _first_sentence(location.leading_comments or location.trailing_comments)
        for location in file.source_code_info.location
    }
    source = f"protos/{file.name}"
    yield f"\n## {Path(file.name).name}\n\nSource: [{source}](../{source}). {sentences.get((SYNTAX,), '')}"
    for index, service in enumerate(file.service):
        yield f"\n### {service.name}\n\n{sentences.get((SERVICE, index), '')}"
        yield from table(
            ("call", "request", "response", "meaning"),
            (
                (
                    f"`{method.name}`",
                    _stream(method.input_type, is_stream=method.client_streaming),
                    _stream(method.output_type, is_stream=method.server_streaming),
                    sentences.get((SERVICE, index, METHOD, number), ""),
                )
                for number, method in enumerate(service.method)
            ),
        )
    types = [
        (f"`{declared.name}`", sentences[kind, index])
        for kind, declarations in ((MESSAGE, file.message_type), (ENUM, file.enum_type))
        for index, declared in enumerate(declarations)
        if sentences.get((kind, index))
    ]
    if types:
        yield from table(("message or enum", "meaning"), types)


def _first_sentence(comment: str) -> str:
    paragraph = " ".join(cleandoc(comment).partition("\n\n")[0].split())
    return re.split(r"(?<=[.]) (?=[A-Z0-9])", paragraph, maxsplit=1)[0].rstrip(":")


def _stream(name: str, *, is_stream: bool) -> str:
    return f"{'stream of ' if is_stream else ''}`{name.removeprefix('.outrider.v1.')}`"
