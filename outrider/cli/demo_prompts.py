"""Three prompts of different kinds, about 240 tokens each in the default model's chat template."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.client import ChatMessage, GenerateOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPrompt:
    name: str
    text: str
    options: GenerateOptions

    @property
    def messages(self) -> list[ChatMessage]:
        return [ChatMessage("user", self.text)]


_CHAT = """\
My neighbour and I want to turn the narrow strip of ground between our two houses into a small shared garden. It is \
about two metres wide and nine metres long, it lies in the shade of the larger house until noon, and after rain the \
lower end stays wet for a day or two. Neither of us has gardened before, we can give it an hour or two each weekend, \
and we would like to spend as little money as possible in the first year. She would love to have herbs and salad \
leaves for the kitchen; I would be happy with flowers that bees like and that come back every spring without much \
care. There is an old rain barrel that still holds water, a heap of bricks from a wall that was taken down, and some \
bags of leaves from last autumn that have begun to rot.

Please tell us how you would begin. Which plants would you choose for the dry upper end and which for the wet lower \
end, what should we do in the first month, and which mistakes do beginners usually make that we could avoid?"""

_EXTRACTION = """\
Read the following notice and then answer the questions with the exact words of the text.

The Harbour Museum of Lindholm will close its east wing from Monday, 3 March, until Friday, 27 June, while the roof \
above the ship models is repaired. The west wing with the lighthouse lenses, the map room and the cafe stay open from \
Tuesday to Sunday between ten and five o'clock. During the works the price of a ticket falls from twelve to eight \
crowns; children under fourteen enter free of charge. Guided tours start at the boathouse instead of the main gate, on \
Wednesdays at two o'clock in English and on Saturdays at eleven o'clock in Danish. Groups of more than ten people \
should write to Ms Ottilie Brandt, the head of the visitors' office, at least two weeks before they come.

List, each on a line of its own: the days on which the east wing closes and opens again, the opening hours of the west \
wing, the price of a ticket during the works, the place and the times of the guided tours, and the person to whom \
groups should write."""

_CODE = '''\
Complete the class below. Write the two missing methods and keep the style of the code that is there. Answer with the \
code of the whole class only.

```python
class Inventory:
    """Counts the items in a small shop, by name."""

    def __init__(self):
        self.counts = {}
        self.prices = {}

    def add_item(self, name, count, price):
        """Adds new items, or more of the items that are there."""
        if count <= 0:
            raise ValueError("count must be positive")
        if price < 0:
            raise ValueError("price must not be negative")
        self.counts[name] = self.counts.get(name, 0) + count
        self.prices[name] = price

    def remove_item(self, name, count):
        """Removes items. Raises ValueError when there are not enough of them."""

    def total_value(self):
        """The sum of count times price over all items."""
```'''

DEMO_PROMPTS = (
    # Sampled, not greedy: the tokens are the same with and without drafts all the same.
    DemoPrompt(name="chat", text=_CHAT, options=GenerateOptions(temperature=0.4, top_p=0.95, seed=7)),
    DemoPrompt(name="extraction", text=_EXTRACTION, options=GenerateOptions(temperature=0.0)),
    DemoPrompt(name="code", text=_CODE, options=GenerateOptions(temperature=0.0)),
)
