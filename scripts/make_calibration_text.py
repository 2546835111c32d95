"""Make the texts of `bridge/quantize/calibration_text` that nobody wrote by hand.

    python scripts/make_calibration_text.py

prose.txt, scripts.txt and prompts.txt there were written for this project. This script makes the others, always the
same from the same tree: made-up articles, conversations, tables, lists, and code; part of the code and the technical
prose are this project's own. All of them have this project's licence.

What they are made of is in calibration/: words.json, and templates.txt, a text after each line `=== NAME`. In a
template the following stand for other text:

    «a|b|c»         one of these
    «1..9»          a whole number from 1 to 9; «1..9:02» in a format of Python's, «0..9:.2f» a decimal
    «year+3..9»     the given number `year` and 3 to 9
    «town:<16»      what is given by that name, in a format; «Town» begins its words with capitals
    «towns»         one of the words of that kind, or another template
"""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "bridge" / "quantize" / "calibration_text"
SIZE = 40_000  # bytes of each text

_SOURCES = Path(__file__).with_name("calibration")
WORDS: dict[str, Any] = json.loads((_SOURCES / "words.json").read_text(encoding="utf-8"))
_SECTIONS = re.split(r"^=== (\w+)\n", (_SOURCES / "templates.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
TEMPLATES = {name: text.removesuffix("\n") for name, text in zip(_SECTIONS[1::2], _SECTIONS[2::2], strict=True)}
_RANGE = re.compile(r"(?:(\w+)\+)?([\d.]+?)\.\.([\d.]+)")


class Author(random.Random):
    """Random numbers, and the texts that they choose."""

    def write(self, name: str, /, **given: Any) -> str:
        """The template of a name, filled in from left to right."""
        return self.fill(TEMPLATES[name], **given)

    def fill(self, template: str, /, **given: Any) -> str:
        """A text whose «...» are filled in."""
        return re.sub(r"«(.*?)»", lambda match: self._value(match[1], given), template)

    def _value(self, inside: str, given: dict[str, Any]) -> str:
        if "|" in inside:
            return self.choice(inside.split("|"))
        what, _, spec = inside.partition(":")
        if bounds := _RANGE.fullmatch(what):
            draw: Callable[..., Any] = self.uniform if spec.endswith("f") else self.randint
            number = given.get(bounds[1] or "", 0) + draw(*(json.loads(end) for end in bounds.groups()[1:]))
            return format(number, spec)
        name = what.lower()
        if name in given:
            value = given[name]() if callable(given[name]) else given[name]
        elif name in WORDS:
            value = self.choice(WORDS[name])
        else:
            value = self.write(name) if name in TEMPLATES else {"title": self.title, "initial": self.initial}[name]()
        return format(value.title() if what != name else value, spec)

    def title(self) -> str:
        """The title of a book or a paper."""
        return self.choice(self.write("titles").split("\n"))

    def initial(self) -> str:
        return self.write("person")[0]


def main() -> None:
    for name in WRITERS:
        (FOLDER / name).write_text(text_of(name), encoding="utf-8")
    (FOLDER / "technical.txt").write_text(technical(), encoding="utf-8")
    for file in sorted(FOLDER.iterdir()):
        print(f"{file.stat().st_size:8} {file.name}")


def text_of(name: str) -> str:
    """The text of one of the files WRITERS."""
    author, parts, size = Author(name), list[str](), 0
    while size < SIZE:
        parts.append(WRITERS[name](author))
        size += len(parts[-1].encode()) + 2
    return ("\n" if name.endswith(".jsonl") else "\n\n").join(parts) + "\n"


def article(a: Author) -> str:
    kind = a.choice(["town", "person", "animal", "event", "work"])
    if kind == "town":
        town, river, (trade, other) = a.fill("«towns»"), a.fill("«rivers»"), a.sample(WORDS["trades"], 2)
        fields = {"town": town, "river": river, "trade": trade, "other": other}
        fields |= {"year": a.randint(1050, 1650), "people": a.randint(800, 90_000)}
        heading, *sentences = a.write("town_article", **fields).split("\n")
        more = a.sample(sentences[2:], a.randint(1, 3))
        return f"{heading}\n\n{' '.join(sentences[:2])}\n\n{' '.join(more)}"
    if kind == "person":
        name, field, born = a.write("person"), a.fill("«fields»"), a.randint(1790, 1950)
        text = a.write("person_article", name=name, family=name.split()[1], field=field, born=born)
        sentences = text.split("\n")
        return " ".join([*sentences[:2], *a.sample(sentences[2:], a.randint(1, 3))])
    if kind == "animal":
        place, animal, colour = (a.fill(f"«{words}»") for words in ("towns", "animals", "colours"))
        return a.write("animal_article", place=place, animal=animal, colour=colour)
    if kind == "event":
        town, amount = a.fill("«towns»"), a.randint(12, 900)
        return a.write("event_article", town=town, amount=amount, travellers=lambda: f"{a.randint(2, 95) * 100:,}")
    return a.write("work_article")


def conversation(a: Author) -> str:
    kind = a.choice(["sum", "shop", "plan", "explain", "code", "friends"])
    if kind == "explain":
        question, answer = a.choice(WORDS["explained"])
    else:
        question, answer = a.write(f"{kind}_chat", **topic(kind, a)).split("\n", 1)
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if a.random() < 0.5:
        messages += [
            {"role": "user", "content": a.choice(WORDS["follow_ups"])},
            {"role": "assistant", "content": a.choice(WORDS["replies"])},
        ]
    return json.dumps({"messages": messages}, ensure_ascii=False)


def topic(kind: str, a: Author) -> dict[str, Any]:
    """The fields that fill a conversation's template."""
    if kind == "sum":
        count, price, thing = a.randint(3, 19), a.randint(2, 40), a.fill("«things»")
        return {"count": count, "price": price, "thing": thing, "cost": count * price, "change": 1000 - count * price}
    if kind == "shop":
        return dict(zip(("main", "other", "spice", "side"), a.sample(WORDS["foods"], 4), strict=True))
    if kind == "plan":
        town, days = a.fill("«towns»"), a.randint(2, 4)
        plan = "\n".join(a.write("day_of_plan", day=day) for day in range(1, days + 1))
        return {"town": town, "days": days, "plan": plan}
    if kind == "code":
        name, field = a.fill("«total|mean|largest|count»"), a.fill("«price|weight|age|score»")
        bodies = {"total": "sum(values)", "mean": "sum(values) / len(values)", "largest": "max(values)"}
        return {"name": name, "field": field, "body": bodies.get(name, "len(values)")}
    return {name: a.fill(f"«{words}»") for name, words in (("a", "first"), ("b", "first"), ("thing", "things"))}


def table(a: Author) -> str:
    kinds = [markdown_table, csv_table, log_lines, timetable, json_table]
    return a.choice([*kinds, lambda a: a.write("settings_file")])(a)


def markdown_table(a: Author) -> str:
    names = ["name", "town", "year", "price", "weight (g)", "share", "rank"]
    columns = a.sample(names, a.randint(3, 5))
    rows = [[a.write("cells").split("\n")[names.index(column)] for column in columns] for _ in range(a.randint(4, 12))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [columns, ["---"] * len(columns), *rows])


def csv_table(a: Author) -> str:
    sign = a.choice([",", ";", "\t"])
    rows = [["id", "date", "item", "quantity", "unit_price"]]
    for i in range(a.randint(5, 14)):
        day = a.fill("20«10..25»-«1..12:02»-«1..28:02»")
        number = 1000 + i * a.randint(1, 9)
        rows.append([str(number), day, *a.fill("«things»,«1..60»,«0.5..200:.2f»").split(",")])
    return "\n".join(sign.join(row) for row in rows)


def log_lines(a: Author) -> str:
    hour, lines = a.randint(0, 22), []
    for minute in sorted(a.sample(range(60), a.randint(5, 10))):
        level, message = a.fill("«INFO|INFO|DEBUG|WARNING|ERROR»"), a.choice(WORDS["log_messages"])
        lines.append(a.fill(TEMPLATES["log_line"] + message, hour=hour, minute=minute, level=level))
    return "\n".join(lines)


def timetable(a: Author) -> str:
    lines = [f"{'station':<16}{'arrives':>8}{'departs':>9}{'km':>6}"]
    minutes, far = a.randint(300, 900), 0
    for town in a.sample(WORDS["towns"], a.randint(4, 8)):
        leave = minutes + a.randint(1, 6)
        lines.append(f"{town:<16}{minutes // 60:>5}:{minutes % 60:02}{leave // 60:>6}:{leave % 60:02}{far:>6}")
        minutes, far = leave + a.randint(9, 50), far + a.randint(8, 60)
    return "\n".join(lines)


def json_table(a: Author) -> str:
    rows = [
        {
            "id": a.randint(1, 9999),
            "name": a.write("person"),
            "tags": a.sample(WORDS["trades"], a.randint(0, 3)),
            "active": a.random() < 0.5,
            "score": round(a.uniform(0, 10), 2),
        }
        for _ in range(a.randint(2, 5))
    ]
    return json.dumps({"page": a.randint(1, 9), "results": rows}, indent=a.choice([None, 2, 4]), ensure_ascii=False)


def list_(a: Author) -> str:
    return a.choice([shopping_list, steps_list, glossary, references, agenda, sums_list])(a)


def shopping_list(a: Author) -> str:
    heading = a.write("shopping_list")
    foods = a.sample(WORDS["foods"], a.randint(4, 9))
    return "\n".join([heading, *(a.write("shopping_item", food=food) for food in foods)])


def steps_list(a: Author) -> str:
    heading, *steps = a.write("steps_list", thing=a.fill("«things»")).split("\n")
    chosen = [s for s in steps if a.random() < 0.75]
    return f"{heading}\n\n" + "\n".join(f"{i}. {step}" for i, step in enumerate(chosen, 1))


def glossary(a: Author) -> str:
    terms = WORDS["terms"]
    words = sorted(a.sample(sorted(terms), a.randint(4, 8)))
    return "\n".join(f"{a.choice([word, f'**{word}**'])}: {terms[word]}" for word in words)


def references(a: Author) -> str:
    numbers = range(1, a.randint(4, 9))
    return "References\n\n" + "\n".join(a.write("reference", i=i) for i in numbers)


def agenda(a: Author) -> str:
    heading = a.write("agenda")
    times = [f"{9 + i // 2}:{i % 2 * 30:02}" for i in range(a.randint(4, 8))]
    return "\n".join([heading, *(a.write("agenda_item", time=time) for time in times)])


def sums_list(a: Author) -> str:
    lines = []
    for _ in range(a.randint(4, 9)):
        x, y, sign = a.randint(2, 999), a.randint(2, 99), a.choice("+-*")
        lines.append(f"{x} {sign} {y} = {x + y if sign == '+' else x - y if sign == '-' else x * y}")
    return "\n".join(lines)


def code(a: Author) -> str:
    kind = a.choice(["own", "own", "c", "javascript", "sql", "shell", "html", "rust"])
    if kind == "own":
        return own_python(a)
    names = ["a", "b", "c"] if kind != "html" else []
    return a.write(kind, **dict(zip(names, a.sample(WORDS["code_names"], len(names)), strict=True)))


def own_python(a: Author) -> str:
    """Some functions of this project in a row."""
    file = a.choice(sorted((ROOT / "bridge").rglob("*.py")))
    parts = re.split(r"\n\n\n(?=def |class |@)", file.read_text(encoding="utf-8"))
    first = a.randrange(len(parts))
    return "\n\n\n".join(parts[first : first + 2])[:2500]


def technical() -> str:
    """This project's documentation, without its links and raw HTML."""
    names = ["architecture", "checkpoints", "formats", "limits", "scale-out", "python"]
    text = "\n\n".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in names)
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)[:SIZE]


WRITERS: dict[str, Callable[[Author], str]] = {
    "articles.txt": article, "chats.jsonl": conversation, "code.txt": code, "lists.txt": list_, "tables.txt": table,
}  # fmt: skip

if __name__ == "__main__":
    main()
