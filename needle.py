"""A fact hidden in a long text and asked for: the prompts, and the judging of replies; generates nothing."""
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizer import Tokenizer

PLACES = ("Reykjavik", "Nairobi", "Lisbon", "Toronto", "Jakarta", "Warsaw", "Lima", "Hanoi")


@dataclass(frozen=True)
class Needle:
    """A fact at a depth (0 start, 1 end) of a text, and the number that a right answer holds."""
    place: str
    number: int
    depth: float

    def prompt(self, ids: Sequence[int], tokenizer: Tokenizer, most: int) -> list[int]:
        """At most `most` tokens: text of `ids` with the fact after the sentence at its depth; the question.

        The test is Kamradt's "Needle in a haystack" (2023).  ValueError when there is no room for a text.
        """
        text_tokens = most
        while text_tokens > 0:
            found = self._ask(self._hide_in(tokenizer.decode(ids[:text_tokens])), tokenizer)
            if len(found) <= most:
                return found
            text_tokens -= len(found) - most
        raise ValueError(f"--context leaves {most} tokens for a text and a question; give a larger one")

    def _hide_in(self, text: str) -> str:
        end = text.find(". ", int(self.depth * len(text))) + 2
        cut = 0 if self.depth == 0 else end if end > 1 else len(text)
        return f"{text[:cut]}The secret number of {self.place} is {self.number}. {text[cut:]}"

    def _ask(self, text: str, tokenizer: Tokenizer) -> list[int]:
        """Through the chat template where there is one."""
        question = f"What is the secret number of {self.place}?"
        if tokenizer.chat_template is None:
            answer = f"The secret number of {self.place} is"
            return tokenizer.encode(f"{text}\n\nQuestion: {question}\nAnswer: {answer}")
        return tokenizer.chat([{"role": "user", "content": f"{text}\n\n{question} Answer with the number."}])

    def is_answered_by(self, reply: str) -> bool:
        """Whether the reply holds the number, with or without a comma at the thousands."""
        return str(self.number) in reply.replace(",", "")


def make_needles(depths: int, trials: int, seed: int) -> list[Needle]:
    """`trials` facts at each of `depths` evenly spaced depths."""
    rng = random.Random(seed)
    at = [i / (depths - 1) for i in range(depths)] if depths > 1 else [0.5]
    return [Needle(rng.choice(PLACES), rng.randrange(10000, 100000), depth)
            for depth in at for _ in range(trials)]


def hit_rates(needles: Sequence[Needle], replies: Sequence[str]) -> dict:
    """Share of right replies: hit_rate in all, asked (how many), by_depth [{"depth", "hit_rate"}]."""
    by_depth: dict[float, list[bool]] = {}
    for needle, reply in zip(needles, replies, strict=True):
        by_depth.setdefault(needle.depth, []).append(needle.is_answered_by(reply))
    hits = sum(map(sum, by_depth.values()))
    return {"hit_rate": hits / len(needles), "asked": len(needles),
            "by_depth": [{"depth": depth, "hit_rate": sum(h) / len(h)} for depth, h in by_depth.items()]}
