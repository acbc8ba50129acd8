"""Text to stdout as its tokens are made, and a chat of many turns over one cache."""
import sys
from collections.abc import Iterable

from inference import Engine
from report import decode_rate
from tokenizer import TextStream, Tokenizer


def print_tokens(tokens: Iterable[int], tokenizer: Tokenizer | None, stop_ids: frozenset[int],
                 context: Iterable[int] = ()) -> int:
    """Write a stream of tokens as text (as numbers without a tokenizer); how many there were.  A character
    that the last token leaves unfinished is not shown."""
    stream = TextStream(tokenizer, context) if tokenizer else None
    count = 0
    for token in tokens:
        count += 1
        if stream is None:
            print(token, end=" ", flush=True)
        elif token not in stop_ids:
            print(stream.feed(token), end="", flush=True)
    print(flush=True)
    return count


def chat_turns(engine: Engine, tokenizer: Tokenizer, max_new_tokens: int) -> None:
    """Read a line, answer it, over one cache: a turn feeds only what the cache does not hold yet."""
    messages, held = [], []  # held: the tokens in the cache, slot by slot
    print("Type a message; an empty line or end of file ends the chat.", file=sys.stderr)
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        text = sys.stdin.readline().rstrip("\n")
        if not text:
            return
        messages.append({"role": "user", "content": text})
        ids = tokenizer.chat(messages)
        room = min(max_new_tokens, engine.cache_size - len(ids))
        if room < 1:
            print(f"The conversation of {len(ids)} tokens fills the cache of {engine.cache_size} slots; "
                  "start again with a larger --cache_size.", file=sys.stderr)
            return
        same = next((i for i, (a, b) in enumerate(zip(held, ids, strict=False)) if a != b),
                    min(len(held), len(ids) - 1))
        reply = []
        tokens = engine.generate(ids[same:], room, tokenizer.stop_ids, same)
        print_tokens(tee(tokens, reply), tokenizer, tokenizer.stop_ids)
        said = tokenizer.decode(reply).strip().rstrip("\ufffd")  # of a character cut by --max_new_tokens
        messages.append({"role": "assistant", "content": said})
        held = ids + reply[:-1]  # the last token was sampled, not fed
        rate = decode_rate(engine.timing)
        speed = f", {rate:.1f} tokens/s" if rate else ""
        print(f"[{len(ids) - same} tokens fed, {same} kept, {len(reply)} new{speed}]", file=sys.stderr)


def tee(tokens: Iterable[int], into: list[int]) -> Iterable[int]:
    """Pass tokens on and keep them."""
    for token in tokens:
        into.append(token)
        yield token
