"""Random JSON schemas whose answers have bounded lengths."""

from __future__ import annotations

WORDS = ("name", "city", "age", "tags", "total", "is_open", "created_at", "unit price", "größe", 'a "b"')
PATTERNS = ("^[a-z]{1,8}$", "^(red|green|blue)-[0-9]{2}$", r"^[A-Z][a-z]{1,9}\.$")


def random_schema(choice, depth=2):
    """Returns a schema that `choice`, a random.Random, determines."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    if depth:
        kinds += ["object", "object", "object", "array", "anyOf", "$ref"]
    match choice.choice(kinds if depth < 2 else ["object", "object", "array", "$ref"]):
        case "string":
            return {"type": "string", "minLength": choice.choice((0, 2)), "maxLength": choice.choice((5, 20))}
        case "integer":
            least = choice.choice((-1000, 0, 7))
            return {"type": "integer", "minimum": least, "maximum": least + choice.choice((1, 50, 100_000))}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": choice.choice((1, 99.5)), "multipleOf": 0.25}
        case "enum":
            return {"enum": choice.sample([*WORDS, 1, 2.5, None, True, {"a": [1]}], 3)}
        case "const":
            return {"const": choice.choice([*WORDS, 0, [1, "x"]])}
        case "pattern":
            return {"type": "string", "pattern": choice.choice(PATTERNS)}
        case "array":
            return {"type": "array", "items": random_schema(choice, depth - 1), "minItems": 1, "maxItems": 3}
        case "anyOf":
            return {"anyOf": [random_schema(choice, depth - 1) for _ in range(2)]}
        case "object":
            names = choice.sample(WORDS, choice.randrange(1, 4))
            return {
                "type": "object",
                "properties": {name: random_schema(choice, depth - 1) for name in names},
                "required": names[: choice.randrange(len(names) + 1)],
                "additionalProperties": False,
            }
        case "$ref":
            inner = random_schema(choice, depth - 1)
            item = {"$ref": "#/$defs/part"}
            if "$ref" in str(inner):  # it needs its own "$defs" at the root
                return inner
            return {"type": "array", "items": item, "maxItems": 2, "$defs": {"part": inner}} if depth == 2 else inner
        case kind:
            return {"type": kind}
