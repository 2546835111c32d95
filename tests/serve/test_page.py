"""The chat page in headless Chromium; skipped where there is none, but for what its source shows."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bridge.runtime.model import Model
from bridge.serve import app
from tests.serve.browser import PROGRAM, SHIFT, Browser, Lost, Page, ScriptedServer
from tests.serve.conftest import Server

SOURCE = Path(app.__file__).with_name("page.html").read_text(encoding="utf-8")
IDLE = "document.querySelector('#send').textContent === 'Send'"
PROPS = {
    "default_generation_settings": {
        "params": {"temperature": 0.6, "top_k": 20, "top_p": 0.949999988079071, "min_p": 0.0, "repeat_penalty": 1.0}
    },
    "chat_template": "{% if enable_thinking is false %}<think></think>{% endif %}",
}
MARKDOWN = r"""# A title

A *word*, **two** and `three`, with [a link](https://example.org/a_b_c) and https://example.org/(x).

1. one
   - inner
     goes on

   and a paragraph
2. two
- other

> quoted
> - item

| a | b |
|---|:-:|
| `c` | d \| e |

```python
def f(a_1, *b):

    return "<b>"
```

$$
a_1 * b_2 * c
$$
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome in PATH")
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def server(browser: Browser) -> Iterator[ScriptedServer]:
    server = ScriptedServer(props=PROPS)
    yield server
    server.close()


@pytest.fixture
def open_page(browser: Browser, server: ScriptedServer) -> Iterator[Callable[..., Page]]:
    """open_page(width, scheme, before="script"): the scripted server's page, which must not have failed at the end."""
    pages: list[Page] = []

    def opened(width: int = 1280, scheme: str = "light", before: str = "", url: str = "") -> Page:
        pages.append(Page(browser, url or server.url, width, scheme, before))
        return pages[-1]

    yield opened
    for page in pages:
        assert page.errors == []
        page.close()


@pytest.fixture
def page(open_page: Callable[..., Page]) -> Page:
    return open_page()


@pytest.fixture(scope="module")
def renderer(browser: Browser) -> Iterator[Callable[[str], str]]:
    """The HTML of what the page makes of a text in Markdown."""
    server = ScriptedServer()
    page = Page(browser, server.url)

    def rendered(text: str) -> str:
        return page.value(f"(box => {{ markdown(box)({json.dumps(text)}); return box.innerHTML; }})(make('div'))")

    yield rendered
    page.close()
    server.close()


def replied(page: Page, count: int = 1) -> None:
    page.wait(f"{IDLE} && document.querySelectorAll('.reply .actions').length === {count}")


def roles_and_texts(request: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in request["messages"]]


def test_the_page_has_nothing_that_parses_html_or_code() -> None:
    assert (
        re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(|srcdoc", SOURCE) == []
    )
    assert "require-trusted-types-for 'script'" in app._PAGE_POLICY
    assert "default-src 'none'" in app._PAGE_POLICY


def test_a_conversation_with_the_server(
    browser: Browser, running: Server, reference: Model, open_page: Callable[..., Page]
) -> None:
    """Two turns, the second with all before it; then a new chat."""
    page = open_page(url=f"{running.url}/")
    page.value("fields.temperature.value = '0'; fields.max_tokens.value = '12'")
    page.send("Speak <b>now</b>.")
    replied(page)
    prompt = "user: Speak <b>now</b>.\nassistant: "
    first = "".join(reference.generate(prompt, 12, temperature=0))
    assert page.texts(".said") == ["Speak <b>now</b>."]
    assert page.value("current.messages[1].content") == first
    assert "cut off after 12 tokens · " in page.texts(".reply .foot")[0]
    page.type("And then?")
    page.value("$('send').click()")
    replied(page, 2)
    second = "".join(reference.generate(f"{prompt}{first}\nuser: And then?\nassistant: ", 12, temperature=0))
    assert page.value("current.messages[3].content") == second
    page.value("document.querySelector('.new').click()")
    assert page.texts(".message") == []


def test_the_servers_refusal_is_shown(running: Server, open_page: Callable[..., Page]) -> None:
    page = open_page(url=f"{running.url}/")
    page.value("fields.system.value = 'word '.repeat(800)")
    page.send("x")
    page.wait("document.querySelector('#talk > .problem')")
    assert "the context holds 500" in page.texts(".problem")[0]


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a *b* **c** _d_ __e__ ***f*** ~~g~~",
         "<p>a <em>b</em> <strong>c</strong> <em>d</em> <strong>e</strong> "
         "<strong><em>f</em></strong> <del>g</del></p>"),
        ("**a *b***, *c **d***, **e `*` f**",
         "<p><strong>a <em>b</em></strong>, <em>c <strong>d</strong></em>, "
         "<strong>e <code>*</code> f</strong></p>"),
        ("a_1 * b_2 * c, 2*3*4, x**2 + y**2, snake_case_name, f(*a, **b)",
         "<p>a_1 * b_2 * c, 2*3*4, x**2 + y**2, snake_case_name, f(*a, **b)</p>"),
        ("$x_1$ and \\(a_1 *b* c\\) and $$a *b*$$, *$5* and *$10*",
         "<p>$x_1$ and \\(a_1 *b* c\\) and $$a *b*$$, <em>$5</em> and <em>$10</em></p>"),
        ("\\[\n- a *b* c\n+ d\n\\]\n*e*", "<p>\\[\n- a *b* c\n+ d\n\\]</p><p><em>e</em></p>"),
        ("\\*a\\* \\_b\\_ ``c ` d`` `e", "<p>*a* _b_ <code>c ` d</code> `e</p>"),
        ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
        ("## a *b* ##\ntext\n---\n#no", "<h3 class=\"heading h2\">a <em>b</em></h3><p>text</p><hr><p>#no</p>"),
        ("- a\n- b\n  - c\n\n  d\n- e", "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul><p>d</p></li>"
         "<li><p>e</p></li></ul>"),
        ("3. a\n  - b\n4. c\n\nIn\n1990. d",
         '<ol start="3"><li><p>a</p><ul><li><p>b</p></li></ul></li><li><p>c</p></li></ol>'
         "<p>In\n1990. d</p>"),
        ("> a\nb\n> - c\n\nd", "<blockquote><p>a\nb</p><ul><li><p>c</p></li></ul></blockquote><p>d</p>"),
        ("x\n|a|b|\n|-|-|\n|c<br>d|`e`|\nf",
         '<p>x</p><div class="scroll" tabindex="0" role="region" aria-label="Table">'
         "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>c<br>d</td><td><code>e</code></td></tr></tbody>"
         "</table></div><p>f</p>"),
        ("[*a*](https://b.c/d_e_(f)) <mailto:g@h.i> ![j](https://k.l/)",
         '<p><a href="https://b.c/d_e_(f)" target="_blank" rel="noopener noreferrer"><em>a</em></a> '
         '<a href="mailto:g@h.i" target="_blank" rel="noopener noreferrer">g@h.i</a> '
         '<a href="https://k.l/" target="_blank" rel="noopener noreferrer">j</a></p>'),
        ("(https://a.b/c_d_e). [https://f.g](https://f.g)",
         '<p>(<a href="https://a.b/c_d_e" target="_blank" rel="noopener noreferrer">https://a.b/c_d_e</a>). '
         '<a href="https://f.g/" target="_blank" rel="noopener noreferrer">https://f.g</a></p>'),
        ("*[a*](https://b.c)", '<p>*<a href="https://b.c/" target="_blank" rel="noopener noreferrer">a*</a></p>'),
        ("[a](javascript:alert(1)) [b](data:text/html,x) [c](java\tscript:x) [d](//e.f) [g](h)",
         "<p>[a](javascript:alert(1)) [b](data:text/html,x) [c](java\tscript:x) [d](//e.f) [g](h)</p>"),
        ("<b>a</b> <img src=x onerror=alert(1)> &lt;",
         "<p>&lt;b&gt;a&lt;/b&gt; &lt;img src=x onerror=alert(1)&gt; &amp;lt;</p>"),
    ],
)  # fmt: skip
def test_markdown_becomes_elements(renderer: Callable[[str], str], text: str, html: str) -> None:
    assert renderer(text) == html


def test_code_blocks_keep_their_text(page: Page, server: ScriptedServer) -> None:
    server.replies("1. Do\n   ~~~~c x\n   a\n\n     *b*\n   ~~~\n   ~~~~\n\n```\n<i>&amp;\n")
    page.send("x")
    replied(page)
    assert page.texts(".code .bar span") == ["c", "code"]
    assert page.texts(".code code") == ["a\n\n  *b*\n~~~", "<i>&amp;\n"]


def test_what_comes_in_parts_looks_as_if_it_had_come_at_once(page: Page) -> None:
    """For any beginning of the text; what has ended is not made again."""
    page.value(
        f"globalThis.text = {json.dumps(MARKDOWN)}; globalThis.parts = make('div'); globalThis.show = markdown(parts)"
    )
    assert page.value("""(() => {
        const differing = [];
        let heading;
        for (let length = 1; length <= text.length; length++) {
            const once = make('div');
            markdown(once)(text.slice(0, length));
            show(text.slice(0, length));
            if (once.innerHTML !== parts.innerHTML) differing.push(text.slice(0, length));
            if (length > 150) heading ??= parts.firstChild;
        }
        const kinds = parts.querySelectorAll('h2, ol, ul, blockquote, table, .code');
        return [differing, heading === parts.firstChild, kinds.length];
    })()""") == [[], True, 8]  # fmt: skip


@pytest.mark.parametrize(
    "pattern",
    ["*", "[", "_", "`", "](", "[](", "$", "\\(", "> ", "- ", "|", "<", "*a ", "**a *b ", "a*_", "`` ` ", "[a](b ", "*[a*](http://b)",
     "- a\n\n", "\n", "|a|\n|-|\n", "* * * x", "# #", "http://a)", '](a "', " "],
)  # fmt: skip
def test_hostile_texts_take_time_linear_in_their_length(page: Page, pattern: str) -> None:
    """Where it were quadratic, the browser would end it after minutes."""
    for beginning in ("a", "```"):
        text = f"{json.dumps(beginning)} + {json.dumps(pattern)}.repeat({400_000 // len(pattern)}) + '`x'"
        result = page.call("Runtime.evaluate", expression=f"markdown(make('div'))({text}); 'shown'", timeout=120_000)
        assert result["result"].get("value") == "shown"


def test_what_a_model_writes_never_becomes_script(page: Page, server: ScriptedServer) -> None:
    """In no part of a reply, not in names, and not when a chat is read back."""
    bad = "<img src=x onerror=hacked=1><script>hacked=1</script><svg onload=hacked=1>"
    text = f"{bad}\n\n# {bad}\n\n- {bad}\n\n|{bad}|\n|-|\n|{bad}|\n\n```{bad}\n{bad}\n```\n[a](javascript:hacked=1) [{bad}](https://a.b/'\"{bad})"
    call = {"index": 0, "id": bad, "type": "function", "function": {"name": bad, "arguments": bad}}
    server.replies({"reasoning_content": text}, f"<think>{text}</think>", text, {"tool_calls": [call]})
    page.send(text)
    replied(page)
    for _ in range(2):  # the second time after a reload
        assert (
            page.value(
                "document.querySelectorAll('#talk :is(img, script, svg, iframe), #list :is(img, script)').length"
            )
            == 0
        )
        assert page.value("[...document.querySelectorAll('#talk a')].every(a => a.protocol === 'https:')")
        assert page.value("typeof hacked") == "undefined"
        assert bad in page.texts(".call .bar")[0]
        assert bad in page.texts(".call code")[0]
        page.reload()
    assert page.value("document.title") == "small <model> · chat"
    assert (
        page.value("(() => { try { make('p').innerHTML = '<b>'; } catch (error) { return error.name; } })()")
        == "TypeError"
    )
    page.errors.clear()  # the browser told of that one


def test_thoughts_are_folded(page: Page, server: ScriptedServer) -> None:
    """What the server names so, what the model marks, and what the template began; they are not sent again."""
    server.replies({"reasoning_content": "hm "}, {"reasoning_content": "*so*"}, "One.")
    page.send("a")
    replied(page)
    server.replies("<thi", "nk>\nwell", "</think>\n\n", "Two.")
    page.send("b")
    replied(page, 2)
    server.replies("begun before", "</think>", "Three.")
    page.send("c")
    replied(page, 3)
    assert page.texts(".reply > .prose") == ["One.", "Two.", "Three."]
    assert page.texts(".thought .prose") == ["hm so", "well", "begun before"]
    assert page.texts(".thought summary") == ["Thought for 1 s"] * 3
    assert page.value("[...document.querySelectorAll('details')].some(node => node.open)") is False
    assert roles_and_texts(server.requests[2])[:4] == [
        ("user", "a"),
        ("assistant", "One."),
        ("user", "b"),
        ("assistant", "Two."),
    ]


def test_calls_of_tools_are_shown(page: Page, server: ScriptedServer) -> None:
    begun = {"index": 0, "id": "1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    parts = [{"index": 0, "function": {"arguments": text}} for text in ('{"city"', ': "Porto"}')]
    second = {"index": 1, "id": "2", "type": "function", "function": {"name": "time", "arguments": "not JSON"}}
    server.replies({"tool_calls": [begun]}, {"tool_calls": [parts[0]]}, {"tool_calls": [parts[1], second]})
    page.send("x")
    replied(page)
    assert page.texts(".call .bar span") == ["Calls weather", "Calls time"]
    assert page.texts(".call code") == ['{\n  "city": "Porto"\n}', "not JSON"]


def test_a_reply_is_stopped_and_enter_does_nothing_while_it_runs(page: Page, server: ScriptedServer) -> None:
    """What has come is kept and counted; the text that was written meanwhile stays."""
    never = threading.Event()
    server.replies("one ", "two", never)
    page.send("x")
    page.wait("document.querySelector('.reply')?.textContent === 'one two'")
    page.type("meanwhile")
    page.key("Enter")
    page.key("Enter", SHIFT)
    assert page.value("[$('text').value, $('send').textContent]") == ["meanwhile\n", "Stop"]
    page.value("$('send').click()")
    replied(page)
    never.set()
    assert page.texts(".reply > .prose") == ["one two"]
    assert "stopped after 2 tokens" in page.texts(".reply .foot")[0]
    assert page.value("$('text').value") == "meanwhile\n"
    server.replies("three")
    page.key("Enter")
    replied(page, 2)
    assert roles_and_texts(server.requests[1]) == [("user", "x"), ("assistant", "one two"), ("user", "meanwhile")]
    assert "1 token" in page.texts(".reply .foot")[1]


def test_a_reply_that_is_stopped_before_it_begins_gives_the_text_back(page: Page, server: ScriptedServer) -> None:
    never = threading.Event()
    server.replies(never)
    page.send("x")
    page.type("y")
    page.value("$('send').click()")
    page.wait(IDLE)
    never.set()
    assert page.value("$('text').value") == "x\n\ny"
    assert page.texts(".message") == []
    assert page.texts("#list .title") == []


def test_after_an_error_the_text_is_there_to_be_sent_again(page: Page, server: ScriptedServer) -> None:
    server.refuses(400, "the prompt is too long")
    page.send("first")
    page.wait("document.querySelector('.problem')")
    assert page.texts(".problem") == ["the prompt is too long"]
    assert page.value("$('text').value") == "first"
    assert page.texts(".message") == []
    server.scripts.put((502, None))
    page.key("Enter")
    page.wait("document.querySelector('.problem')?.textContent.includes('null') || document.querySelector('.problem')")
    server.replies("yes")
    page.key("Enter")
    replied(page)
    assert page.value("$('text').value") == ""
    assert page.texts(".problem") == []
    assert [roles_and_texts(request) for request in server.requests] == [[("user", "first")]] * 3


def test_a_lost_connection_keeps_what_came(page: Page, server: ScriptedServer) -> None:
    server.replies("half", Lost)
    page.send("x")
    replied(page)
    assert page.texts(".reply > .prose") == ["half"]
    assert page.texts(".problem") == ["The connection was lost; the reply is incomplete."]
    server.replies("more", {"error": {"message": "the server is stopping"}})
    page.send("y")
    replied(page, 2)
    assert page.texts(".problem")[1] == "the server is stopping"
    assert roles_and_texts(server.requests[1]) == [("user", "x"), ("assistant", "half"), ("user", "y")]
    server.close()
    page.send("z")
    page.wait("document.querySelector('#talk > .problem')")
    assert page.texts("#talk > .problem") == ["The server cannot be reached. Is it still running?"]
    assert page.value("$('text').value") == "z"
    assert len(page.texts(".message")) == 4


def test_a_message_is_edited_and_a_reply_made_again(page: Page, server: ScriptedServer) -> None:
    """Where that fails, all is as before, and the edited text is still there."""
    for number in "12":
        server.replies(f"reply {number}")
        page.send(f"message {number}")
        replied(page, int(number))
    server.replies("reply 3")
    page.value("[...document.querySelectorAll('.reply button')].at(-1).click()")
    page.wait(f"{IDLE} && document.querySelectorAll('.reply > .prose')[1]?.textContent === 'reply 3'")
    assert len(page.texts(".message")) == 4
    assert roles_and_texts(server.requests[2]) == roles_and_texts(server.requests[1])
    server.refuses(400, "no")
    page.value("document.querySelector('.user .idle').click()")
    page.type(" edited")
    page.key("Enter")
    page.wait("document.querySelector('.problem')")
    assert page.texts(".reply > .prose") == ["reply 1", "reply 3"]
    assert page.value("document.activeElement.value") == "message 1 edited"
    server.replies("reply 4")
    page.key("Enter")
    replied(page)
    assert page.texts(".said") == ["message 1 edited"]
    assert page.texts(".reply > .prose") == ["reply 4"]
    assert roles_and_texts(server.requests[4]) == [("user", "message 1 edited")]
    page.value("document.querySelector('.user .idle').click()")
    page.key("Escape")
    assert page.texts(".said") == ["message 1 edited"]


def test_chats_are_kept_renamed_deleted_and_brought_back(page: Page, server: ScriptedServer) -> None:
    for number in "12":
        server.replies(f"reply {number}")
        page.send(f"message {number}\nmore")
        replied(page)
        page.value("document.querySelector('.new').click()")
    page.open(server.url)
    assert page.texts("#list .title") == ["message 2", "message 1"]
    page.value("document.querySelectorAll('#list .title')[1].click()")
    assert page.texts(".said") == ["message 1\nmore"]
    assert page.texts(".reply > .prose") == ["reply 1"]
    page.value(
        "document.querySelectorAll('#list .more')[1].click(); document.querySelector('[data-do=rename]').click()"
    )
    page.type("named")
    page.key("Enter")
    page.reload()
    assert page.texts("#list .title") == ["message 2", "named"]
    assert page.texts(".reply > .prose") == ["reply 1"]  # the chat that was open is open
    page.value(
        "document.querySelectorAll('#list .more')[1].click(); document.querySelector('[data-do=remove]').click()"
    )
    assert page.texts("#list .title") == ["message 2"]
    assert page.texts(".message") == []
    assert page.value("Object.keys(localStorage).filter(key => key.includes('chat:')).length") == 1
    page.value("document.querySelector('.undo').click()")
    page.open(server.url)
    assert page.texts("#list .title") == ["message 2", "named"]


def test_what_came_of_a_reply_outlives_the_page(page: Page, server: ScriptedServer) -> None:
    """Before the first token, the text is kept as a draft."""
    never = threading.Event()
    server.replies("half", never)
    page.send("x")
    page.wait("document.querySelector('.reply')?.textContent === 'half'")
    page.open(server.url)
    assert page.texts("#list .title") == ["x"]
    page.value("document.querySelector('#list .title').click()")
    assert "stopped after 1 token" in page.texts(".reply .foot")[0]
    server.replies(never)
    page.send("y")
    page.wait("running")
    page.open(server.url)
    never.set()
    assert page.value("$('text').value") == "y"
    page.value("document.querySelector('#list .title').click()")
    assert len(page.texts(".message")) == 2


def test_another_chat_stops_the_reply(page: Page, server: ScriptedServer) -> None:
    never = threading.Event()
    server.replies("half", never)
    page.send("x")
    page.wait("document.querySelector('.reply')?.textContent === 'half'")
    page.value("document.querySelector('.new').click()")
    page.wait(IDLE)
    never.set()
    assert page.texts(".message") == []
    page.value("document.querySelector('#list .title').click()")
    assert "stopped after 1 token" in page.texts(".reply .foot")[0]


def test_a_chat_that_is_deleted_while_its_reply_runs_stays_deleted(page: Page, server: ScriptedServer) -> None:
    never = threading.Event()
    server.replies("half", never)
    page.send("x")
    page.wait("document.querySelector('.reply')?.textContent === 'half'")
    page.value("document.querySelector('#list .more').click(); document.querySelector('[data-do=remove]').click()")
    page.wait(IDLE)
    never.set()
    assert page.texts("#list .title") == []
    assert page.value("Object.keys(localStorage).filter(key => key.includes('chat:'))") == []


def test_chats_are_exported(browser: Browser, page: Page, server: ScriptedServer, tmp_path: Path) -> None:
    browser.call(
        "Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path), browserContextId=page.context
    )
    call = {"index": 0, "id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    server.replies({"reasoning_content": "hm"}, "**yes**", {"tool_calls": [call]})
    page.send("a/b: what?")
    replied(page)
    del call["index"]
    for kind, name in (("json", "ab what.json"), ("markdown", "ab what.md")):
        page.value(f"document.querySelector('#list .more').click(); document.querySelector('[data-do={kind}]').click()")
        page.wait_for(lambda name=name: (tmp_path / name).exists() and (tmp_path / name).stat().st_size)
    assert json.loads((tmp_path / "ab what.json").read_text(encoding="utf-8")) == {
        "title": "a/b: what?", "model": "small <model>", "messages": [
            {"role": "user", "content": "a/b: what?"},
            {"role": "assistant", "content": "**yes**", "reasoning_content": "hm", "tool_calls": [call]},
        ],
    }  # fmt: skip
    assert (tmp_path / "ab what.md").read_text(encoding="utf-8") == (
        "# a/b: what?\n\n## You\n\na/b: what?\n\n## small <model>\n\n"
        "<details><summary>Thought</summary>\n\nhm\n\n</details>\n\n"
        '**yes**\n\n```json\n{\n  "name": "f",\n  "arguments": "{}"\n}\n```\n'
    )


def test_the_page_says_when_the_browser_keeps_no_more(page: Page, server: ScriptedServer) -> None:
    page.value("""(() => { for (let size = 1 << 22; size; size >>= 1) {
        try { for (let i = 0; ; i++) localStorage.setItem(`other${size}.${i}`, 'x'.repeat(size)); } catch {}
    } })()""")  # fmt: skip
    server.replies("yes")
    page.send("x")
    replied(page)
    assert "storage for this page is full" in page.texts("#unkept")[0]
    assert page.texts(".reply > .prose") == ["yes"]
    page.value("for (const key of Object.keys(localStorage)) localStorage.removeItem(key)")
    server.replies("again")
    page.send("y")
    replied(page, 2)
    assert page.value("$('unkept').hidden")
    page.open(server.url)
    assert page.texts("#list .title") == ["x"]


def test_there_is_a_bound_to_the_chats_that_are_kept(page: Page, server: ScriptedServer) -> None:
    page.value("""for (let i = 0; i < MOST_CHATS; i++) {
        const messages = [{role: 'user', content: ''}, {role: 'assistant', content: ''}];
        write(kept, `chat:${i}`, {id: String(i), title: `chat ${i}`, updated: i, messages});
    }""")
    page.open(server.url)
    assert len(page.texts("#list .title")) == 200
    server.replies("yes")
    page.send("x")
    replied(page)
    assert page.texts("#unkept") == ["This chat is not kept: there are 200 already. Delete some, or export it."]
    page.value(
        "[...document.querySelectorAll('#list .more')].at(-1).click();"
        "document.querySelector('[data-do=remove]').click()"
    )
    assert page.value("$('unkept').hidden")
    page.open(server.url)
    assert page.texts("#list .title")[0] == "x"
    assert len(page.texts("#list .title")) == 200


def test_the_page_works_where_the_browser_keeps_nothing(open_page: Callable[..., Page], server: ScriptedServer) -> None:
    forbidden = "Object.defineProperty(window, '{}', {{get() {{ throw new DOMException('no', 'SecurityError'); }}}});"
    page = open_page(before=forbidden.format("localStorage") + forbidden.format("sessionStorage"))
    assert "This browser keeps nothing for this page" in page.texts("#unkept")[0]
    server.replies("yes")
    page.send("x")
    replied(page)
    assert page.texts("#list .title") == ["x"]


def test_windows_share_their_chats(open_page: Callable[..., Page], server: ScriptedServer) -> None:
    first = open_page()
    second = first.window(server.url)
    server.replies("yes")
    first.send("x")
    replied(first)
    second.wait("document.querySelector('#list .title')")
    second.value("document.querySelector('#list .title').click()")
    server.replies("more")
    first.send("y")
    replied(first, 2)
    second.wait("document.querySelectorAll('.message').length === 4")


def test_settings_show_the_servers_defaults_and_are_sent(page: Page, server: ScriptedServer) -> None:
    """The key is kept for the window only."""
    names = ["temperature", "top_k", "top_p", "min_p", "repeat_penalty"]
    page.wait("fields.top_k.placeholder")
    assert page.value(f"{names}.map(name => fields[name].placeholder)") == ["0.6", "20", "0.95", "0", "1"]
    values = {"system": "Be brief.", "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.1,
              "max_tokens": 7, "seed": 5, "key": "secret"}  # fmt: skip
    page.value("$('options').click()")
    for name, value in values.items():
        page.value(f"fields.{name}.focus()")
        page.type(str(value))
    page.value("fields.unthinking.click()")
    page.key("Escape")
    page.open(server.url)
    server.replies("yes")
    page.send("x")
    replied(page)
    (request,) = server.requests
    assert roles_and_texts(request) == [("system", "Be brief."), ("user", "x")]
    numbers = {name: value for name, value in values.items() if name not in ("system", "key")}
    assert {name: request[name] for name in numbers} == numbers
    assert request["chat_template_kwargs"] == {"enable_thinking": False}
    assert server.authorizations == ["Bearer secret"]
    assert "secret" not in page.value("JSON.stringify(localStorage)")
    page.value("$('options').click(); $('defaults').click(); fields.unthinking.click(); $('settings').close()")
    server.replies("yes")
    page.send("y")
    replied(page, 2)
    assert server.requests[1].keys() == {"messages", "stream", "stream_options"}


def test_a_wrong_setting_is_not_taken_silently(page: Page) -> None:
    page.value("$('options').click(); fields.top_p.value = '2'; document.querySelector('#settings .main').click()")
    assert page.value("$('settings').open && document.activeElement === fields.top_p && !fields.top_p.validity.valid")


def test_without_the_servers_properties_the_page_does_without(
    open_page: Callable[..., Page], server: ScriptedServer
) -> None:
    server.props = None
    page = open_page()
    page.wait("fields.top_k.placeholder")
    assert page.value("[fields.top_k.placeholder, fields.unthinking.parentNode.hidden]") == ["the server's", True]


def test_a_missing_key_is_asked_for(page: Page, server: ScriptedServer) -> None:
    server.refuses(401, "the API key is missing or wrong; send it as Authorization: Bearer KEY")
    page.send("x")
    page.wait("document.querySelector('.problem')")
    assert page.texts(".problem") == ["The server asks for an API key. Enter it in the settings."]


@pytest.mark.parametrize("clipboard", [True, False], ids=["clipboard", "without TLS"])
def test_messages_and_code_are_copied(
    browser: Browser, open_page: Callable[..., Page], server: ScriptedServer, clipboard: bool
) -> None:
    page = open_page()
    browser.call(
        "Browser.grantPermissions",
        permissions=["clipboardReadWrite", "clipboardSanitizedWrite"],
        browserContextId=page.context,
    )
    page.value("globalThis.clipboard = navigator.clipboard")
    if not clipboard:
        page.value("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    server.replies("<think>hm</think>*a*\n```\nb\n  c\n```")
    page.send("my *text*")
    replied(page)
    copied = []
    for selector in (".user", ".code", ".reply .foot"):
        page.value(f"document.querySelector('{selector} button').focus()")
        page.key("Enter")
        page.wait(f"document.querySelector('{selector} button').textContent === 'Copied'")
        copied.append(page.value("clipboard.readText()"))
    assert copied == ["my *text*", "b\n  c", "*a*\n```\nb\n  c\n```"]


@pytest.mark.parametrize("width", [390, 1280])
def test_everything_is_done_with_the_keyboard(
    open_page: Callable[..., Page], server: ScriptedServer, width: int
) -> None:
    page = open_page(width)
    server.replies("```\nx\n```\nyes")
    page.type("one")  # the field has the focus from the beginning
    page.key("Enter", SHIFT)
    page.type("two")
    page.key("Enter")
    replied(page)
    assert roles_and_texts(server.requests[0]) == [("user", "one\ntwo")]

    page.tab_to("it.ariaLabel === 'Settings'")
    page.key("Enter")
    page.wait("$('settings').open")
    page.tab_to("it.name === 'seed'")
    page.type("4")
    page.key("Enter")
    page.wait("!$('settings').open")
    assert page.value("document.activeElement.id") == "options"

    server.replies("again")
    page.tab_to("it.ariaLabel === 'Regenerate the reply'")
    page.key(" ")
    page.wait(f"{IDLE} && document.querySelector('.reply > .prose')?.textContent === 'again'")
    assert server.requests[1]["seed"] == 4

    page.tab_to("it.ariaLabel === 'Edit your message'")
    page.key("Enter")
    page.key("Escape")
    assert page.value("document.activeElement.ariaLabel") == "Edit your message"

    if width < 800:
        assert page.value("getComputedStyle($('side')).display") == "none"
        page.tab_to("it.id === 'drawer'")
        page.key("Enter")
        page.wait("$('side').contains(document.activeElement) && $('column').inert")
        page.key("Escape")
        page.wait("document.activeElement.id === 'drawer' && !$('column').inert")
        page.key("Enter")
        page.wait("$('side').contains(document.activeElement)")
    page.tab_to("it.matches('.more')")
    page.key("Enter")
    page.wait("document.activeElement.dataset.do === 'rename'")
    page.key("Escape")
    page.wait("document.activeElement.matches('.more')")
    page.key("Enter")
    page.wait("document.activeElement.dataset.do === 'rename'")
    page.key("Enter")
    page.type("named")
    page.key("Escape")
    assert page.texts("#list .title") == ["one"]
    assert page.value("document.activeElement.textContent") == "one"
    page.key("Tab")
    page.key("Enter")
    page.wait("document.activeElement.dataset.do === 'rename'")
    page.tab_to("it.dataset.do === 'remove'")
    page.key("Enter")
    page.wait("document.activeElement.textContent === 'Undo'")
    assert page.texts("#list .title") == []
    page.key("Enter")
    page.wait("document.activeElement.textContent === 'one'")
    page.key("Enter")
    page.wait("document.activeElement.id === 'text' && !document.querySelector(':popover-open')")


# of all texts that are seen: those whose contrast is below 4.5, or 3 for large ones
LOW_CONTRAST = """(() => {
    const parse = color => { const [r, g, b, a = 1] = color.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
    const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
    const luminance = ([r, g, b]) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
    const low = [];
    for (const node of document.querySelectorAll('body *')) {
        const style = getComputedStyle(node);
        const isEmpty = node.matches('textarea, input') && node.placeholder && !node.value;
        if (!isEmpty && ![...node.childNodes].some(child => child.nodeType === 3 && child.data.trim())) continue;
        if (node.closest('script, template, .unseen, :disabled')) continue;
        if (!node.checkVisibility({opacityProperty: true})) continue;
        let paper = node;
        while (paper && parse(getComputedStyle(paper).backgroundColor)[3] === 0) paper = paper.parentElement;
        const ink = getComputedStyle(node, isEmpty ? '::placeholder' : null).color;
        const colors = [ink, getComputedStyle(paper).backgroundColor];
        const [less, more] = colors.map(color => luminance(parse(color))).sort((a, b) => a - b);
        const size = parseFloat(style.fontSize), contrast = (more + .05) / (less + .05);
        const isLarge = size >= 24 || size >= 18.66 && style.fontWeight >= 700;
        if (contrast < (isLarge ? 3 : 4.5)) low.push([node.outerHTML.slice(0, 80), contrast]);
    }
    return low;
})()"""
STILL = """document.addEventListener('DOMContentLoaded', () => {
    const style = document.createElement('style');
    style.textContent = '* { transition: none !important; animation: none !important; }';
    document.head.append(style);
});"""
SMALL_TARGETS = """[...document.querySelectorAll('button, input, summary')].filter(node => node.checkVisibility())
    .map(node => [node.outerHTML.slice(0, 80), node.getBoundingClientRect()])
    .filter(([_, box]) => box.width && (box.height < 18 || box.width < 18))"""


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_and_can_be_read(
    open_page: Callable[..., Page], server: ScriptedServer, width: int, scheme: str
) -> None:
    """In seven states, no text is pale, nothing sticks out, and what a finger is to hit is large enough; wide code and
    tables scroll in themselves."""
    page = open_page(width, scheme, STILL)
    seen = []

    def check(state: str) -> None:
        seen.append(state)
        assert page.value(LOW_CONTRAST) == [], state
        assert page.value("document.documentElement.scrollWidth <= innerWidth"), state
        assert page.value(SMALL_TARGETS) == [], state

    check("empty")
    long = "word_" * 200
    call = {"index": 0, "id": "1", "type": "function", "function": {"name": long, "arguments": long}}
    server.replies(
        {"reasoning_content": MARKDOWN},
        MARKDOWN + f"\n{long}\n\n```\n{long}\n```\n\n|{'a|' * 60}\n|{'-|' * 60}\n",
        {"tool_calls": [call]},
    )
    page.send(long)
    replied(page)
    page.value("document.querySelector('.thought').open = true")
    check("chat")
    assert page.value(
        "document.querySelector('.reply > .prose').scrollWidth <= document.querySelector('main').clientWidth"
    )
    for selector in (
        ".reply > .prose > .code:nth-last-child(2) pre",
        ".reply > .prose > .scroll:last-child",
        ".call pre",
    ):
        assert page.value(f"(node => node.scrollWidth > node.clientWidth)(document.querySelector('{selector}'))")
    page.value("document.querySelector('.user .idle').click()")
    check("edit")
    page.key("Escape")
    page.value("$('options').click()")
    check("settings")
    page.key("Escape")
    if width == 390:
        page.value("$('drawer').click()")
        page.wait("$('column').inert")
    page.value("document.querySelector('#list .more').click()")
    check("menu")
    page.value("document.querySelector('[data-do=remove]').click()")
    check("deleted")
    page.value("document.querySelector('.undo').click(); document.querySelector('#list .title').click()")
    server.replies("half", Lost)
    page.send("x")
    replied(page, 2)
    server.refuses(400, f"no {long}")
    page.send("y")
    page.wait("document.querySelector('#talk > .problem')")
    check("problem")
    assert len(seen) == 7
    dark = page.value("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")


def test_a_reader_of_the_screen_hears_when_a_reply_begins_and_ends(page: Page, server: ScriptedServer) -> None:
    """And not every token; whatever can be pressed or filled in has a name."""
    page.value(
        "globalThis.said = [];"
        "new MutationObserver(() => said.push($('status').textContent)).observe($('status'), {childList: true})"
    )
    server.replies(*"many parts")
    page.send("x")
    replied(page)
    said = page.value("said")
    assert said[0] == "The model is replying."
    assert said[1].startswith("The reply is complete: 10 tokens")
    assert len(said) == 2
    assert page.value(
        "$('talk').closest('[aria-live], [role=log]') === null && $('talk').querySelector('[aria-live]') === null"
    )
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    pressed = [
        node
        for node in nodes
        if not node["ignored"] and node["role"]["value"] in ("button", "textbox", "spinbutton", "checkbox")
    ]
    assert len(pressed) >= 10
    assert [node for node in pressed if not node["name"]["value"]] == []


def test_motion_is_reduced_where_that_is_asked_for(browser: Browser, page: Page, server: ScriptedServer) -> None:
    going_on = threading.Event()
    server.replies(going_on)
    page.send("x")
    page.wait("document.querySelector('.waiting')")
    animation = "getComputedStyle(document.querySelector('.waiting'), '::before').animationName"
    assert page.value(animation) == "breathe"
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    assert page.value(animation) == "none"
    assert page.value("getComputedStyle($('send')).transitionDuration") == "0s"
    going_on.set()
    replied(page)
