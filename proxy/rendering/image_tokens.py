"""Images in prompts: a chat template writes one placeholder for each image, which the processor expands.

The ids are those of the whole expanded text. To find them, the text is encoded with one placeholder token for each
image, and the ids of the image then replace that token: added tokens divide a text, whatever is next to them. If the
text of a conversation spells such a token, a placeholder is written inside it, and the placeholder's token is removed
again. The text is thus encoded as its characters, and never taken for an image.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np

from proxy.rendering.tokenizer import Tokenizer
from proxy.types import Ids, ImagePart, Message, PlacedImage, ids_of
from proxy.vision.processor import VisionProcessor
from tokengrove.errors import ConfigurationError, InvalidRequest

# One of these is inserted into a spelled token while the template writes. Unicode gives them no meaning.
_GUARDS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
_EXPANSIONS = 512
_PROBE = (640, 480)
# Expanding a new size takes about as long as rendering this many characters.
_WORK_OF_SIZE, _WORK_OF_IMAGE = 100_000, 200


class ImageTokens:
    """The tokens of images for one tokenizer and processor. Thread-safe.

    `token`: the token that images consist of. `mark`: the placeholder's token, as templates write it. `placeholders`:
    the tokens that stand for images, videos or sounds.
    """

    def __init__(self, tokenizer: Tokenizer, vision: VisionProcessor) -> None:
        self.vision = vision
        self._tokenizer = tokenizer
        mark = tokenizer.token_id(vision.placeholder)
        if mark is None or not tokenizer.is_marker(mark):
            raise ConfigurationError(f"{vision.placeholder} is no token of this model, so it cannot stand for an image")
        self.mark = mark
        probe = vision.expansion(*_PROBE)
        ids = [token for token in tokenizer.encode(probe) if tokenizer.is_marker(token)]
        if not ids:
            raise ConfigurationError(f"{vision.name} writes no token for an image")
        self.token = Counter(ids).most_common(1)[0][0]
        reserved = [tokenizer.token_id(text) for text in vision.reserved]
        self.placeholders = frozenset((self.token, *(token for token in reserved if token is not None)))
        spelled = {*vision.reserved, vision.placeholder, *(str(tokenizer.piece(token), "utf-8") for token in set(ids))}
        self._spelled = re.compile("|".join(map(re.escape, sorted(spelled, key=len, reverse=True))))
        self._divided = lru_cache(_EXPANSIONS)(self._divide)
        self._check(probe)

    def guarded(self, messages: Sequence[Message]) -> tuple[list[Message], str]:
        """Return the messages, and the character that divides the image tokens spelled in their texts.

        The character is "" if they spell none.
        """
        if not any(map(self._spells, messages)):
            return list(messages), ""
        whole = repr(messages)
        guard = next(guard for guard in _GUARDS if guard not in whole and repr(guard)[1:-1] not in whole)
        return [self._guarded(message, guard) for message in messages], guard

    def encode(self, text: str, images: Sequence[ImagePart], guard: str = "") -> Ids:
        """Return the ids of the template's text for messages with these images, in their order."""
        parts: list[Ids] = []
        shown = self._with_marks(text, iter(images), parts, guard)
        ids = self._tokenizer.encode(shown)
        if not parts:
            return ids
        out, before = ids_of(), 0
        places = np.flatnonzero(np.frombuffer(ids, np.int32) == self.mark).tolist()
        if len(places) != len(parts):
            raise InvalidRequest("the chat template of this model cannot express these images", param="messages")
        for at, part in zip(places, parts, strict=True):
            out += ids[before:at]
            out += part
            before = at + 1
        return out + ids[before:]

    def placed(self, ids: Ids, images: Sequence[ImagePart], start: int = 0) -> tuple[PlacedImage, ...]:
        """Return the places of `images` in `ids`, which contain no others. `start`: the number of prompt ids before."""
        places = np.flatnonzero(np.frombuffer(ids, np.int32) == self.token)
        found, at = [], 0
        for image in images:
            first, last = at, at + self.count(image)
            if last > len(places):
                break
            begin, end = int(places[first]), int(places[last - 1]) + 1
            found.append(PlacedImage(image.digest, start + begin, end - begin, image.width, image.height, image.detail))
            at = last
        if len(found) != len(images) or at != len(places):
            wanted = sum(map(self.count, images))
            raise InvalidRequest(
                f"the prompt has {len(places)} image tokens, but its {len(images)} images take {wanted}",
                param="messages",
            )
        return tuple(found)

    def count(self, image: ImagePart) -> int:
        """Return the number of tokens `token` in an image."""
        return self.core(image).count(self.token)

    def core(self, image: ImagePart) -> Ids:
        """Return the ids from the first to the last token of an image, which never depend on the text around it."""
        return self._divided(image.width, image.height, image.detail)[1]

    def expanded(self, image: ImagePart) -> Ids:
        """Return all ids that replace the placeholder of an image."""
        lead, core, tail = self._divided(image.width, image.height, image.detail)
        return self._tokenizer.encode(lead) + core + self._tokenizer.encode(tail)

    def work(self, images: Iterable[ImagePart]) -> int:
        """Return the time that expanding images takes, in characters of text to render."""
        work = 0
        for image in images:
            known = self.vision.knows(image.width, image.height, image.detail)
            work += _WORK_OF_IMAGE if known else _WORK_OF_SIZE
        return work

    def _with_marks(self, text: str, images: Iterator[ImagePart], parts: list[Ids], guard: str) -> str:
        """Return the text with one placeholder for each image and guard. `parts` gets the ids of each, in order."""
        out, before = [], 0
        marks = re.escape(self.vision.placeholder)
        for found in re.finditer(f"{guard}|{marks}" if guard else marks, text):
            out.append(text[before : found.start()])
            before = found.end()
            if found[0] == guard:
                out.append(self.vision.placeholder)
                parts.append(ids_of())
                continue
            image = next(images, None)
            if image is None:
                raise InvalidRequest(
                    f"the text {self.vision.placeholder} stands for an image to this model; leave it out",
                    param="messages",
                )
            lead, core, tail = self._divided(image.width, image.height, image.detail)
            out += (lead, self.vision.placeholder, tail)
            parts.append(core)
        if next(images, None) is not None:
            raise InvalidRequest("the chat template of this model leaves out an image here", param="messages")
        return "".join([*out, text[before:]])

    def _divide(self, width: int, height: int, detail: str) -> tuple[str, Ids, str]:
        """Return the text before the first token of an image's expansion, the ids up to its last, and the rest."""
        return self._split(self.vision.expansion(width, height, detail))

    def _split(self, text: str) -> tuple[str, Ids, str]:
        found = list(self._spelled.finditer(text))
        first, last = found[0].start(), found[-1].end()
        return text[:first], self._tokenizer.encode(text[first:last]), text[last:]

    def _spells(self, message: Message) -> bool:
        search = self._spelled.search
        return bool(
            search(message.content)
            or (message.reasoning and search(message.reasoning))
            or any(search(call.arguments) for call in message.tool_calls)
        )

    def _guarded(self, message: Message, guard: str) -> Message:
        def broken(text: str) -> str:
            return self._spelled.sub(lambda found: found[0][:1] + guard + found[0][1:], text)

        pieces, images, before, length = list[str](), list[ImagePart](), 0, 0
        for image in message.images:  # a spelled token that an image divides is not one
            pieces.append(broken(message.content[before : image.at]))
            before, length = image.at, length + len(pieces[-1])
            images.append(image._replace(at=length))
        pieces.append(broken(message.content[before:]))
        return message._replace(
            content="".join(pieces),
            images=tuple(images),
            reasoning=message.reasoning and broken(message.reasoning),
            tool_calls=tuple([call._replace(arguments=broken(call.arguments)) for call in message.tool_calls]),
        )

    def _check(self, probe: str) -> None:
        """Raise ConfigurationError unless the ids of an expansion are independent of the text next to it."""
        lead, core, tail = self._split(probe)
        for before, after in (("", ""), ("a", "b"), ("a ", " b"), ("a\n", "\nb")):
            whole = self._tokenizer.encode(before + probe + after)
            marked = self._tokenizer.encode(before + lead + self.vision.placeholder + tail + after)
            at = marked.index(self.mark)
            if marked[:at] + core + marked[at + 1 :] != whole:
                raise ConfigurationError(f"the tokens of {self.vision.placeholder} depend on the text beside them")


def images_of(messages: Sequence[Message]) -> list[ImagePart]:
    """Return the images of the messages, in order."""
    return [image for message in messages for image in message.images]
