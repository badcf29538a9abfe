"""The explanatory figures of docs/: a request, drafting ahead, KV transfer, failover. Drawn by references.py.

Each has a white background, so that it is legible on a dark page, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 900  # in pixels, like all sizes below
TOP, ROW, HEAD = 24, 30, 40
INK, QUIET, LINE, EDGE, FILL = "#1c2733", "#5b6673", "#3d4a58", "#8794a3", "#f3f6f9"
FONT = 'font-family="Helvetica, Arial, sans-serif" font-size="12"'
BLUE, GREEN, RED = "#0b62c4", "#1a7f4b", "#c0392b"


@dataclass(frozen=True, slots=True)
class Message:
    sender: int
    receiver: int
    text: str
    color: str = LINE


@dataclass(frozen=True, slots=True)
class Work:
    """Work that one of the actors does."""

    at: int
    text: str
    color: str = INK


@dataclass(frozen=True, slots=True)
class Lost:
    at: int
    text: str


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame around the next `num_rows` rows."""

    text: str
    num_rows: int


Row = Message | Work | Lost | Frame


def text(x: float, y: float, words: str, *, color: str = INK, anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{color}" text-anchor="{anchor}"{extra}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, *, fill: str = FILL, edge: str = EDGE, extra: str = "") -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{fill}" stroke="{edge}"{extra}/>'
    )


def arrow(x1: float, y1: float, x2: float, y2: float, *, color: str = LINE, extra: str = "") -> str:
    """Draws an arrow that ends with a head of the same colour."""
    return (
        f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" fill="none" stroke="{color}" stroke-width="1.5" '
        f'marker-end="url(#{color[1:]})"{extra}/>'
    )


def picture(title: str, height: int, parts: Sequence[str], notes: Sequence[str] = ()) -> str:
    """Returns the whole SVG file, with notes below the parts."""
    below = [text(20, height + 18 * line, note, color=QUIET, anchor="start") for line, note in enumerate(notes)]
    height += 18 * len(notes)
    heads = "".join(
        f'<marker id="{color[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" '
        f'orient="auto"><path d="M0 0L10 5L0 10z" fill="{color}"/></marker>'
        for color in (LINE, BLUE, GREEN, RED)
    )
    view = f'viewBox="0 0 {WIDTH} {height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" {view} {FONT}>',
            f"<title>{escape(title)}</title>",
            f"<defs>{heads}</defs>",
            '<rect width="100%" height="100%" fill="#fff"/>',
            *parts,
            *below,
            "</svg>\n",
        ]
    )


def sequence(title: str, actors: Sequence[str], rows: Sequence[Row], notes: Sequence[str] = ()) -> str:
    """Draws a sequence diagram, in which time runs downwards."""
    step = WIDTH / len(actors)
    places = [step * (index + 0.5) for index in range(len(actors))]
    bottom = TOP + HEAD + ROW * (len(rows) + 1)
    lost = {row.at: TOP + HEAD + ROW * (index + 1) for index, row in enumerate(rows) if isinstance(row, Lost)}
    parts = []
    for index, (place, name) in enumerate(zip(places, actors, strict=True)):
        end = lost.get(index, bottom - 10)
        parts.append(f'<path d="M{place:g} {TOP + HEAD}V{end:g}" stroke="{EDGE}" stroke-dasharray="3 4"/>')
        parts += [
            box(place - 66, TOP, 132, HEAD - 6),
            text(place, TOP + 22, name, extra=' font-weight="bold" font-size="14"'),
        ]
    for index, row in enumerate(rows):
        parts += _drawn(row, TOP + HEAD + ROW * (index + 1), places)
    return picture(title, bottom + 14, parts, notes)


def _drawn(row: Row, y: float, places: Sequence[float]) -> Iterator[str]:
    match row:
        case Message(sender, receiver, words, color):
            start, end = places[sender], places[receiver]
            yield arrow(start, y, end, y, color=color)
            yield _ground((start + end) / 2, y - 7, words)
            yield text((start + end) / 2, y - 6, words, color=INK if color == LINE else color)
        case Work(at, words, color):
            width = 6.1 * len(words) + 16
            yield box(places[at] - width / 2, y - 17, width, 22, fill="#fff")
            yield text(places[at], y - 2, words, color=color)
        case Lost(at, words):
            x = places[at]
            yield f'<path d="M{x - 7:g} {y - 7:g}l14 14m0 -14l-14 14" stroke="{RED}" stroke-width="2.5"/>'
            yield text(x + 14, y + 4, words, color=RED, anchor="start")
        case Frame(words, num_rows):
            yield box(14, y - 18, WIDTH - 28, ROW * (num_rows + 1) - 4, fill="none", extra=' stroke-dasharray="5 4"')
            yield text(24, y - 2, words, color=QUIET, anchor="start")


def _ground(x: float, y: float, words: str) -> str:
    """Draws white behind a text, so that no lifeline crosses it."""
    width = 6 * len(words)
    return f'<rect x="{x - width / 2:g}" y="{y - 10:g}" width="{width:g}" height="13" fill="#fff"/>'


def request() -> str:
    client, router, decode, prefill, draft = range(5)
    rows = [
        Message(client, router, "Generate"),
        Work(router, "validate, tokenize, queue, place"),
        Message(router, decode, "open (session stream)"),
        Message(decode, router, "granted: address, held prefix"),
        Message(decode, draft, "newest state: the prompt"),
        Message(router, prefill, "Prefill: tokens, transfer, address"),
        Frame("for each chunk and group of layers", 1),
        Message(prefill, decode, "KV frames", BLUE),
        Message(prefill, decode, "commit: digest", BLUE),
        Message(decode, router, "KV ready"),
        Frame("for each step", 5),
        Message(draft, decode, "branches, ahead of need"),
        Work(decode, "one forward pass: verify, accept, one token more"),
        Message(decode, router, "tokens"),
        Message(decode, draft, "newest state"),
        Message(router, client, "Delta"),
        Message(router, client, "Finished, Summary"),
    ]
    return sequence("A request in time", ("client", "router", "decode node", "prefill node", "draft node"), rows)


def hand_off() -> str:
    router, prefill, decode = range(3)
    rows = [
        Message(router, decode, "open: prompt of 300 tokens"),
        Message(decode, router, "granted: blocks reserved, 64 tokens held already (prefix cache)"),
        Message(router, prefill, "Prefill: tokens 64 to 298"),
        Work(prefill, "chunk 1, layers 0 to 9"),
        Message(prefill, decode, "frames: K and V of chunk 1, layers 0 to 9", BLUE),
        Work(prefill, "chunk 1, layers 10 to 19"),
        Message(prefill, decode, "frames: K and V of chunk 1, layers 10 to 19", BLUE),
        Work(prefill, "chunk 2 …"),
        Message(prefill, decode, "frames: …", BLUE),
        Message(decode, prefill, "each frame checked, written and acknowledged"),
        Message(prefill, decode, "commit: list of all frames with checksums", BLUE),
        Message(decode, prefill, "COMMITTED, if nothing is missing or altered"),
        Message(decode, router, "KV ready: the sequence is in the running batch", GREEN),
    ]
    notes = (
        "Frames leave while later layers and chunks are still computed. Nothing counts before the commit: if the",
        "prefill node is lost in between, another sends what is missing. The prompt's last token is decoded, not sent.",
    )
    return sequence("The hand-off of KV", ("router", "prefill node", "decode node"), rows, notes)


def failover() -> str:
    client, router, first, second = range(4)
    rows = [
        Message(router, first, "open: prompt, seed"),
        Message(first, router, "tokens 0 to 41"),
        Message(router, client, "text of tokens 0 to 41"),
        Lost(first, "killed or frozen"),
        Work(router, "its stream breaks, or its progress stops"),
        Message(router, second, "open: prompt, seed, tokens 0 to 41"),
        Message(second, router, "granted"),
        Work(second, "KV by a prefill node, as before"),
        Message(second, router, "tokens 42, 43, …", GREEN),
        Message(router, client, "text of tokens 42, 43, …", GREEN),
    ]
    notes = (
        "The token of a position depends on model, prompt, parameters, seed and the tokens before it: so the second",
        "node computes what the first one would have. The client sees a pause, and no token missing or changed.",
    )
    return sequence("An answer moves", ("client", "router", "decode node 0", "decode node 1"), rows, notes)


def chips(x: float, y: float, tokens: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Draws tokens in their colours, side by side. Rejected tokens are crossed out."""
    for word, color in tokens:
        width = 7 * len(word) + 14
        yield box(x, y, width, 22, fill="#fff", edge=color)
        extra = ' text-decoration="line-through"' if color == RED else ""
        yield text(x + width / 2, y + 15, word, color=color, extra=extra)
        x += width + 4


def drafting() -> str:
    parts = [
        text(20, 80, "draft node", anchor="start", extra=' font-weight="bold" font-size="14"'),
        text(20, 242, "decode node", anchor="start", extra=' font-weight="bold" font-size="14"'),
    ]
    steps = (
        (140, "step 1", "The cat", ("sat", "on", "a"), (("sat", GREEN), ("on", GREEN), ("a", RED), ("the", BLUE))),
        (520, "step 2", "… sat on the", ("mat", "and"), (("mat", GREEN), ("and", GREEN), ("slept", BLUE))),
    )
    for x, name, committed, drafts, result in steps:
        parts += [
            box(x, 196, 340, 106),
            text(x + 10, 214, f"{name}: after “{committed}” verify, in one pass", anchor="start", color=QUIET),
            *chips(x + 10, 224, [(word, INK) for word in drafts]),
            text(x + 10, 268, "verdict:", anchor="start", color=QUIET),
            *chips(x + 64, 253, result),
            text(x + 10, 292, f"{len(result) - (x < 500)} tokens", anchor="start", color=QUIET),
        ]
    parts += [
        box(140, 30, 340, 106),
        text(150, 48, "meanwhile drafts on, for the likeliest outcomes", anchor="start", color=QUIET),
        text(150, 78, "if “a” is right:", anchor="start"),
        *chips(276, 63, (("chair", INK), (".", INK))),
        text(150, 112, "if “the” is instead:", anchor="start"),
        *chips(276, 97, (("mat", INK), ("and", INK))),
        box(520, 30, 340, 106),
        text(530, 48, "drafts on after “mat and …”", anchor="start", color=QUIET),
        text(530, 78, "if “slept” comes:", anchor="start"),
        *chips(656, 63, (("there", INK), (".", INK))),
        arrow(455, 136, 533, 194, color=BLUE),
        text(545, 158, "the branch that fits is there already", color=BLUE, anchor="start"),
        text(545, 174, "when step 2 begins: a hit, no round trip", color=BLUE, anchor="start"),
        arrow(440, 196, 410, 138),
        text(414, 176, "committed tokens", anchor="end"),
        arrow(140, 330, 860, 330),
        text(860, 348, "time", color=QUIET, anchor="end"),
        *chips(140, 340, (("accepted", GREEN), ("rejected", RED), ("the target's own", BLUE))),
    ]
    notes = (
        "A draft token is accepted if it is the token that the target itself draws for that position. So drafts, right",
        "or wrong, late or missing, change how many tokens a step yields, never which. Without drafts it yields one.",
    )
    return picture("Drafting ahead of the verdict", 390, parts, notes)


FIGURES = {
    "request.svg": request,
    "drafting.svg": drafting,
    "hand_off.svg": hand_off,
    "failover.svg": failover,
}
