"""Texts that agents and environments may send and that a page must show as they are: markup, scripts, odd characters.

A text that became markup would set `window.MARKER`, open a dialog, ask another origin, or leave an element of `MADE`.
"""

from __future__ import annotations

MARKER = "hostileTextRan"
"""The property of `window` that each of the scripts sets."""
ORIGIN = "http://hostile.invalid"
"""Where the addresses in the texts lead; no request may go there."""
MADE = (
    "img:not(.picture)",  # those of the page itself, whose addresses `watched.py` looks at
    "iframe",
    "object",
    "embed",
    "base",
    "marquee",
    "font",
    "b",
    "blink",
    "math",
    "video",
    "audio",
    "template",
)
"""Selectors of elements that the texts would make, and the page itself never does."""

_RUN = f"window.{MARKER}=1;alert(1)"
SCRIPT = f"<script>{_RUN}</script>"
IMAGE = f'<img src="{ORIGIN}/x.png" onerror="{_RUN}">'
SVG = f'<svg onload="{_RUN}"><a href="javascript:{_RUN}"><text>svg</text></a></svg>'
CLOSING = f"\"'></td></title></style></textarea></script>{SCRIPT}{IMAGE}<b>bold</b><!--"
LINK = f"javascript:{_RUN}//"
DATA_LINK = f"data:text/html,{SCRIPT}"
STYLE = f"</style><style>*{{display:none!important;background:url({ORIGIN}/css)}}</style>"
FRAME = f'<iframe srcdoc="{SCRIPT}" src="{ORIGIN}/frame"></iframe><base href="{ORIGIN}/">'
REFRESH = f'<meta http-equiv="refresh" content="0;{ORIGIN}">'
TEMPLATES = (
    f"${{{_RUN}}} {{{{constructor.constructor('{_RUN}')()}}}} <%= {_RUN} %> %3Cscript%3E &lt;script&gt; &#60;b&#62;"
)
BIDI = "\u202egnp.exe\u202c \u2066isolated\u2069 \u200b\u200c\u200d\ufeffzero width\u2028line\u2029paragraph"
CONTROL = "bell\x07 escape\x1b[31m delete\x7f back\x08 c1\x9b31m form\x0c return\rnew"
EMOJI = "👩‍👩‍👧‍👦 🏳️‍🌈 🇺🇳 ñ e\u0301\u0323\u0322 Z̶͑͊a̷͝l̴͌g̵̈o̶̽ 漢字 עברית العربية"
FORMULA = '=HYPERLINK("http://hostile.invalid") $(reboot) `id` \'; DROP TABLE sessions; --'
PROTO = "__proto__"
LONG_LINE = "wide" * 250_000
"""A line of a million characters without a space."""

TEXTS = (
    *(SCRIPT, IMAGE, SVG, CLOSING, LINK, DATA_LINK, STYLE, FRAME, REFRESH, TEMPLATES, BIDI, CONTROL, EMOJI, FORMULA),
    *("constructor", PROTO, "toString"),
)
EVERYTHING = " | ".join(TEXTS)
"""All of them as one text."""
WITH_NUL = f"NUL\0 {EVERYTHING}"
"""For fields that are stored as JSON: messages, metadata, metrics."""
HALF_A_PAIR = '"\\ud83d"'
"""JSON that a model may write and no request may hold."""
SESSION_IDS = ("a/b/c", "javascript:alert+1", "x@y~z", "o.o", "日本", "a:b@c", "w" * 200)
"""Ids at their worst."""
