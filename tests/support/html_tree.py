"""HTML as elements with classes, attributes and text."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"link", "meta", "img", "br", "input"}


class Element:
    def __init__(self, tag, attributes):
        self.tag = tag
        self.attributes = dict(attributes)
        self.classes = (self.attributes.get("class") or "").split()
        self.children = []

    @property
    def text(self):
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def walk(self):
        yield self
        for child in self.children:
            if not isinstance(child, str):
                yield from child.walk()

    def all(self, tag=None, *classes, **attributes):
        """Returns the elements with this tag, these classes and these attributes. data_lane=… means data-lane."""
        wanted = {name.replace("_", "-"): value for name, value in attributes.items()}
        return [
            found
            for found in self.walk()
            if (tag is None or found.tag == tag)
            and set(classes) <= set(found.classes)
            and wanted.items() <= found.attributes.items()
        ]

    def one(self, tag=None, *classes, **attributes):
        (found,) = self.all(tag, *classes, **attributes)
        return found


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = [Element("", ())]

    def handle_starttag(self, tag, attributes):
        element = Element(tag, attributes)
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop().tag == tag

    def handle_data(self, data):
        self.open[-1].children.append(data)


def read(html):
    reader = Reader()
    reader.feed(html)
    (root,) = reader.open
    return root
