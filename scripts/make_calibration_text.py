"""Make the texts of `bridge/quantize/calibration_text` that nobody wrote by hand.

    python scripts/make_calibration_text.py

prose.txt, scripts.txt and prompts.txt there were written for this project. This script makes the others, always the
same from the same tree: made-up articles, conversations, tables, lists, and code; part of the code and the technical
prose are this project's own. All of them have this project's licence.
"""

# ruff: noqa: E501

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "bridge" / "quantize" / "calibration_text"
SIZE = 40_000  # bytes of each text

FIRST = [
    "Anna",
    "Boris",
    "Chiara",
    "Daniel",
    "Elif",
    "Fatima",
    "Gustav",
    "Hana",
    "Ivan",
    "Julia",
    "Kofi",
    "Lena",
    "Mateo",
    "Nadia",
    "Omar",
    "Priya",
    "Quentin",
    "Rosa",
]
FIRST += [
    "Samuel",
    "Tomoko",
    "Ulrich",
    "Vera",
    "Wei",
    "Ximena",
    "Yusuf",
    "Zofia",
    "Aisha",
    "Bram",
    "Carmen",
    "Dmitri",
    "Esther",
    "Farid",
    "Greta",
    "Hugo",
    "Ingrid",
]
LAST = [
    "Abara",
    "Bergström",
    "Castro",
    "Dvořák",
    "Eriksen",
    "Fontaine",
    "García",
    "Haddad",
    "Ivanova",
    "Jansen",
    "Kimura",
    "Lindqvist",
    "Moreau",
    "Novak",
]
LAST += [
    "Okonkwo",
    "Petrov",
    "Quispe",
    "Rossi",
    "Schneider",
    "Tanaka",
    "Ueda",
    "Vargas",
    "Weber",
    "Xu",
    "Yilmaz",
    "Zimmermann",
    "Brandt",
    "Costa",
    "Duarte",
]
TOWNS = [
    "Aldermoor",
    "Brennfeld",
    "Castelrosso",
    "Dunmere",
    "Eskholm",
    "Falkenau",
    "Grünwald",
    "Harrowby",
    "Issenheim",
    "Jaskovo",
    "Kestrel",
]
TOWNS += [
    "Lindale",
    "Marovia",
    "Northwick",
    "Ostrava-on-Lea",
    "Port",
    "Penhale",
    "Quarrington",
    "Ravensund",
    "Saltford",
    "Tarnby",
    "Ullerö",
]
RIVERS = [
    "the Arle",
    "the Bessel",
    "the Corva",
    "the Drin",
    "the Ember",
    "the Fossa",
    "the Grell",
    "the Halse",
    "the Inver",
    "the Jessa",
]
TRADES = [
    "wool",
    "salt",
    "timber",
    "glass",
    "copper",
    "paper",
    "herring",
    "barley",
    "clocks",
    "leather",
    "coal",
    "linen",
    "porcelain",
    "cider",
    "amber",
]
THINGS = [
    "lamp",
    "kettle",
    "notebook",
    "bicycle",
    "ladder",
    "umbrella",
    "compass",
    "violin",
    "teapot",
    "blanket",
    "camera",
    "suitcase",
    "lantern",
    "mirror",
]
FOODS = [
    "apples",
    "bread",
    "butter",
    "carrots",
    "coffee",
    "eggs",
    "flour",
    "garlic",
    "honey",
    "lentils",
    "milk",
    "olives",
    "onions",
    "pears",
    "rice",
    "salt",
]
FIELDS = [
    "geology",
    "botany",
    "music",
    "astronomy",
    "medicine",
    "engineering",
    "history",
    "law",
    "chemistry",
    "economics",
    "linguistics",
]
ANIMALS = [
    "finch",
    "otter",
    "beetle",
    "moth",
    "heron",
    "newt",
    "vole",
    "lizard",
    "crane",
    "bat",
    "trout",
    "snail",
    "hare",
    "owl",
    "salamander",
]
COLOURS = ["grey", "brown", "green", "white", "black", "yellow", "reddish", "blue", "pale", "spotted"]


def main() -> None:
    for name, make in MADE.items():
        dice = random.Random(name)
        parts: list[str] = []
        size = 0
        while size < SIZE:
            parts.append(make(dice))
            size += len(parts[-1].encode()) + 2
        text = ("\n" if name.endswith(".jsonl") else "\n\n").join(parts) + "\n"
        (FOLDER / name).write_text(text, encoding="utf-8")
    (FOLDER / "technical.txt").write_text(technical(), encoding="utf-8")
    for file in sorted(FOLDER.iterdir()):
        print(f"{file.stat().st_size:8} {file.name}")


def person(d: random.Random) -> str:
    return f"{d.choice(FIRST)} {d.choice(LAST)}"


def date(d: random.Random, least: int = 1780, most: int = 2020) -> str:
    months = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ]
    return f"{d.randint(1, 28)} {d.choice(months)} {d.randint(least, most)}"


def article(d: random.Random) -> str:
    return d.choice([town_article, person_article, animal_article, event_article, work_article])(d)


def town_article(d: random.Random) -> str:
    town, river, trade, other = d.choice(TOWNS), d.choice(RIVERS), *d.sample(TRADES, 2)
    year, people = d.randint(1050, 1650), d.randint(800, 90_000)
    found = [
        f"{town} is a town on {river}, {d.randint(4, 80)} km {d.choice(['north', 'south', 'east', 'west'])} of "
        f"{d.choice(TOWNS)}. At the last census it had {people:,} inhabitants, "
        f"{d.choice(['a few more', 'slightly fewer', 'a third more', 'about as many'])} than ten years before.",
        f"It is first mentioned in a charter of {year}, which grants its market to the {d.choice(['abbey', 'bishop', 'count', 'guild of weavers'])}. "
        f"For centuries the town lived by {trade} and {other}; "
        f"{d.choice(['a fire', 'a flood', 'the plague', 'a long siege'])} in {year + d.randint(60, 180)} destroyed all but "
        f"{d.randint(3, 60)} houses.",
        f"The railway arrived in {d.randint(1845, 1899)} and with it the first factory, which employed up to {d.randint(80, 2400)} people "
        f"until it closed in {d.randint(1958, 1996)}. Its halls now hold {d.choice(['a museum', 'flats', 'a school of music', 'a brewery', 'workshops'])}.",
        f"The church of St {d.choice(['Anne', 'Nicholas', 'Barbara', 'Martin', 'Giles'])} has a tower {d.randint(28, 96)} metres high, "
        f"and an organ that was rebuilt by {person(d)} in {d.randint(1700, 1930)}.",
        f"Every {d.choice(['spring', 'summer', 'autumn', 'second year'])} the {d.choice(['regatta', 'fair', 'procession', 'carnival'])} draws visitors from the whole valley.",
    ]
    return f"# {town}\n\n" + " ".join(found[:2]) + "\n\n" + " ".join(d.sample(found[2:], d.randint(1, 3)))


def person_article(d: random.Random) -> str:
    name, field, born = person(d), d.choice(FIELDS), d.randint(1790, 1950)
    family = name.split()[1]
    found = [
        f"{name} ({born} to {born + d.randint(41, 93)}) was a scholar of {field}, born in {d.choice(TOWNS)} as the "
        f"{d.choice(['only child', 'second of four children', 'youngest daughter', 'eldest son'])} of a {d.choice(['teacher', 'tailor', 'judge', 'farmer', 'sailor', 'printer'])}.",
        f"After two years in {d.choice(TOWNS)}, {family} turned from {d.choice(FIELDS)} to {field} under the influence of {person(d)}, whose lectures drew students from many countries.",
        f'The principal work, "{title(d)}" ({born + d.randint(25, 40)}), argues that {d.choice(CLAIMS)}.',
        f"Critics, above all {person(d)}, objected that {d.choice(CLAIMS)}; the quarrel went on for {d.choice(['three', 'five', 'almost ten', 'twenty'])} years.",
        f"{family} taught until {born + d.randint(55, 70)}, refused {d.choice(['two honours', 'a pension', 'the presidency of the academy'])}, and left {d.randint(3, 40)} boxes of unpublished notes.",
    ]
    return " ".join([*found[:2], *d.sample(found[2:], d.randint(1, 3))])


CLAIMS = [
    "small causes, repeated often enough, explain what large ones cannot",
    "the older maps had been right about the coast and wrong about the distances",
    "measurements made at night differ from those of the day by a constant",
    "no law was ever written before it had been broken",
    "words travel along rivers more easily than across them",
    "the sample had been chosen by somebody who already knew the answer",
    "prices follow the weather of the year before the last",
    "what had been called two species was one, seen in different seasons",
    "a theory that forbids nothing has nothing to say",
    "the instrument disturbs what it is meant to record",
]


def title(d: random.Random) -> str:
    return d.choice(
        [
            f"On the {d.choice(['Origin', 'Measure', 'Limits', 'Uses', 'History'])} of {d.choice(TRADES).title()}",
            f"The {d.choice(THINGS).title()} and the {d.choice(ANIMALS).title()}",
            f"{d.choice(['Notes', 'Letters', 'Lectures'])} from {d.choice(TOWNS)}",
            f"A {d.choice(['Short', 'Natural', 'Secret'])} History of {d.choice(FIELDS).title()}",
        ]
    )


def animal_article(d: random.Random) -> str:
    place, animal, colour = d.choice(TOWNS), d.choice(ANIMALS), d.choice(COLOURS)
    return (
        f"The {colour} {animal} of {place} is {d.randint(2, 90)} cm long and weighs {d.randint(5, 900)} g. It lives "
        f"{d.choice(['in reeds', 'under bark', 'in old walls', 'near cold springs', 'in the upper branches of oaks'])} at heights of "
        f"{d.randint(50, 900)} to {d.randint(1000, 2600)} m, and feeds on {d.choice(['seeds', 'insects', 'algae', 'berries', 'small crabs'])}. The female lays "
        f"{d.randint(1, 12)} eggs in {d.choice(['March', 'April', 'early June', 'late summer'])}; the young leave after {d.randint(9, 70)} days. "
        f"{d.choice(['Its numbers have fallen by half since', 'It was first described in', 'It was thought to be lost until'])} {d.randint(1850, 2015)}. "
        f"It differs from the {d.choice(COLOURS)} {animal} in the {d.choice(['shape of the bill', 'number of stripes', 'colour of the throat', 'length of the tail'])}."
    )


def event_article(d: random.Random) -> str:
    town, amount = d.choice(TOWNS), d.randint(12, 900)
    return (
        f"{town}, {date(d, 1950)}. {d.choice(['The council', 'The harbour office', 'The ministry', 'A court', 'The railway'])} announced on "
        f"{d.choice(['Monday', 'Tuesday', 'Wednesday', 'Thursday', 'Friday'])} that {d.choice(['the new bridge', 'the hospital', 'the northern line', 'the dam', 'the tunnel'])} will cost "
        f'{amount} million, {d.randint(3, 60)} percent more than planned. "{d.choice(["We were told otherwise", "Nobody is surprised", "It could have been worse", "The figures speak for themselves"])}," '
        f"said {person(d)}, who {d.choice(['leads the opposition', 'has lived there since 1981', 'built the first one', 'owns the mill'])}. "
        f"Work was to begin in {d.randint(2, 11)} months, but {d.choice(['heavy rain', 'a strike', 'a missing permit', 'the price of steel'])} has delayed it. "
        f"About {d.randint(2, 95) * 100:,} people use the road each day. {d.choice(['A decision is expected in the autumn.', 'Both sides have agreed to talk.', 'The matter will be debated again next week.'])}"
    )


def work_article(d: random.Random) -> str:
    return (
        f'"{title(d)}" is a {d.choice(["novel", "play", "string quartet", "film", "collection of stories"])} by {person(d)}, '
        f"{d.choice(['finished', 'first performed', 'published'])} in {d.randint(1860, 2019)}. It tells of {person(d)}, a {d.choice(['surveyor', 'nurse', 'smuggler', 'widow', 'student'])} "
        f"who returns to {d.choice(TOWNS)} after {d.randint(3, 40)} years and finds {d.choice(['the house sold', 'nobody who remembers', 'a brother who should be dead', 'the river gone'])}. "
        f"The {d.choice(['second part', 'ending', 'slow movement', 'first chapter'])} was {d.choice(['rewritten', 'cut', 'added'])} on the advice of {person(d)}. "
        f"Reviews were {d.choice(['cold', 'divided', 'warm', 'few'])}; {d.randint(2, 60)} years later it was {d.choice(['translated into nine languages', 'rediscovered', 'forbidden', 'adapted for the stage'])}."
    )


def conversation(d: random.Random) -> str:
    question, answer = d.choice([sum_chat, shop_chat, plan_chat, explain_chat, code_chat, friends_chat])(d)
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if d.random() < 0.5:
        messages += [
            {
                "role": "user",
                "content": d.choice(
                    [
                        "Thanks! And if I have only half the time?",
                        "Are you sure?",
                        "Can you make it shorter?",
                        "Why is that?",
                        "Great. What comes next?",
                    ]
                ),
            },
            {"role": "assistant", "content": d.choice(REPLIES)},
        ]
    return json.dumps({"messages": messages}, ensure_ascii=False)


REPLIES = [
    "Then leave out the second step. You lose a little quality, but nothing goes wrong.",
    "Yes. I checked it in two ways, and both give the same result. If you tell me where yours differs, I can look at that.",
    "In short: measure first, change one thing at a time, and keep what helped.",
    "Because each step depends on the one before it. If the first is wrong, the rest only looks right.",
    "Next, write down what you expect before you try it. That way you will notice if something else happens.",
]


def sum_chat(d: random.Random) -> tuple[str, str]:
    count, price, paid = d.randint(3, 19), d.randint(2, 40), 1000
    thing = d.choice(THINGS)
    return (
        f"I buy {count} {thing}s at {price} each and pay with {paid}. How much do I get back?",
        f"The {thing}s cost {count} x {price} = {count * price}. You get back {paid} - {count * price} = {paid - count * price}.",
    )


def shop_chat(d: random.Random) -> tuple[str, str]:
    foods = d.sample(FOODS, 4)
    return (
        f"I have {', '.join(foods[:3])} and {foods[3]} at home. What can I cook in {d.randint(2, 9) * 10} minutes?",
        f"Here is something simple with {foods[0]} and {foods[1]}:\n\n1. Heat a little oil in a pan over medium heat.\n2. Add the {foods[1]} and stir for "
        f"{d.randint(2, 8)} minutes.\n3. Add the {foods[0]} with {d.randint(100, 400)} ml of water, cover, and wait until it is soft.\n4. Season with {foods[2]}, and serve with {foods[3]}.\n\n"
        "If it becomes too dry, add a spoonful of water at a time.",
    )


def plan_chat(d: random.Random) -> tuple[str, str]:
    town, days = d.choice(TOWNS), d.randint(2, 4)
    lines = [
        f"- **Day {day}**: {d.choice(['the old market', 'the harbour', 'the museum', 'a walk along the river', 'the castle'])} in the morning, then {d.choice(['a boat trip', 'the botanical garden', 'a concert', 'coffee on the square', 'the bookshops'])}."
        for day in range(1, days + 1)
    ]
    return f"Plan {days} days in {town} for two people who like {d.choice(FIELDS)}.", "\n".join(
        ["Gladly!", "", *lines, "", f"Expect to spend about {d.randint(40, 160)} a day for each person."]
    )


def explain_chat(d: random.Random) -> tuple[str, str]:
    return d.choice(
        [
            (
                "Why do we see the flash before we hear the thunder?",
                "Light travels almost a million times as fast as sound. The flash reaches you at once; sound takes about three seconds for each kilometre. Count the seconds between them and divide by three, and you have the distance in kilometres.",
            ),
            (
                "What is an interest rate?",
                "It is the price of borrowing money, given as a share of the sum for each year. Borrow 1,000 at 5 percent, and after a year you owe 1,050. If the interest is not paid, the next year's is computed from 1,050, and so on: that is compound interest.",
            ),
            (
                "How do plants drink?",
                "Mostly they are pulled, not pushed. Water evaporates from the leaves, and because water molecules hold on to each other, the column in the fine tubes of the stem moves up to replace it. The roots take in more by osmosis.",
            ),
            (
                "What does a compiler do?",
                "It reads a program that people can understand and writes one that a machine can execute. Usually it goes through several stages: it checks the grammar, works out types, rewrites the program so that it runs faster, and at last chooses instructions and registers.",
            ),
            (
                "Is glass a liquid?",
                "No, although one often reads it. Glass is an amorphous solid: its atoms are not in a regular order, but they do not flow at room temperature. Old window panes are thicker at the bottom because of how they were made.",
            ),
            (
                "What is a p-value?",
                "It is the probability of data at least as extreme as yours, if the null hypothesis were true. It is not the probability that the hypothesis is true. A small p-value says that the data would be surprising; it does not say how large or how important an effect is.",
            ),
        ]
    )


def code_chat(d: random.Random) -> tuple[str, str]:
    name, field = d.choice(["total", "mean", "largest", "count"]), d.choice(["price", "weight", "age", "score"])
    body = {
        "total": "sum(values)",
        "mean": "sum(values) / len(values)",
        "largest": "max(values)",
        "count": "len(values)",
    }[name]
    return (
        f"Write a Python function that returns the {name} of the field {field!r} in a list of dictionaries.",
        f"```python\ndef {name}_{field}(rows):\n    values = [row[{field!r}] for row in rows if {field!r} in row]\n    return {body} if values else None\n```\n\n"
        f"Rows without `{field}` are skipped, and an empty list gives `None`. For example, `{name}_{field}([{{{field!r}: {d.randint(1, 9)}}}, {{{field!r}: {d.randint(10, 99)}}}])`.",
    )


def friends_chat(d: random.Random) -> tuple[str, str]:
    a, b, thing = d.choice(FIRST), d.choice(FIRST), d.choice(THINGS)
    return (
        f"Write a short dialogue between {a} and {b} about a lost {thing}.",
        f"{a}: Have you seen my {thing}? It was on the {d.choice(['shelf', 'table', 'stairs', 'piano'])} {d.choice(['this morning', 'yesterday', 'an hour ago'])}.\n"
        f"{b}: The {d.choice(COLOURS)} one? {d.choice(['I thought you had sold it.', 'You lent it to your sister.', 'I put it where it belongs.', 'Not since Tuesday.'])}\n"
        f"{a}: {d.choice(['I did no such thing!', 'Oh. That is true.', 'And where is that?', 'Then somebody has been here.'])}\n"
        f"{b}: {d.choice(['Look behind you.', 'Ask the neighbours, then.', 'Sit down, and think of where you last used it.', 'It will turn up. It always does.'])}",
    )


def table(d: random.Random) -> str:
    return d.choice([markdown_table, csv_table, log_lines, aligned_table, json_table, settings_file])(d)


def markdown_table(d: random.Random) -> str:
    columns = d.sample(["name", "town", "year", "price", "weight (g)", "share", "rank"], d.randint(3, 5))
    rows = [[cell(d, column) for column in columns] for _ in range(d.randint(4, 12))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [columns, ["---"] * len(columns), *rows])


def cell(d: random.Random, column: str) -> str:
    return {
        "name": person(d),
        "town": d.choice(TOWNS),
        "year": str(d.randint(1800, 2024)),
        "price": f"{d.uniform(1, 900):.2f}",
        "weight (g)": f"{d.randint(1, 9999):,}",
        "share": f"{d.uniform(0, 100):.1f}%",
        "rank": str(d.randint(1, 40)),
    }[column]


def csv_table(d: random.Random) -> str:
    sign = d.choice([",", ";", "\t"])
    rows = [["id", "date", "item", "quantity", "unit_price"]]
    for i in range(d.randint(5, 14)):
        day = f"20{d.randint(10, 25)}-{d.randint(1, 12):02}-{d.randint(1, 28):02}"
        rows.append(
            [
                str(1000 + i * d.randint(1, 9)),
                day,
                d.choice(THINGS),
                str(d.randint(1, 60)),
                f"{d.uniform(0.5, 200):.2f}",
            ]
        )
    return "\n".join(sign.join(row) for row in rows)


def log_lines(d: random.Random) -> str:
    hour, lines = d.randint(0, 22), []
    for minute in sorted(d.sample(range(60), d.randint(5, 10))):
        level = d.choice(["INFO", "INFO", "DEBUG", "WARNING", "ERROR"])
        what = d.choice(
            [
                "connection from 10.0.{}.{} accepted",
                "request {} took {} ms",
                "worker {} restarted after {} jobs",
                "cache holds {} of {} entries",
                "retry {} of {}",
            ]
        )
        lines.append(
            f"2025-{d.randint(1, 12):02}-11T{hour:02}:{minute:02}:{d.randint(0, 59):02}Z {level:7} {d.choice(['http', 'store', 'queue', 'auth'])}: "
            + what.format(d.randint(1, 255), d.randint(1, 999))
        )
    return "\n".join(lines)


def aligned_table(d: random.Random) -> str:
    lines = [f"{'station':<16}{'arrives':>8}{'departs':>9}{'km':>6}"]
    minutes, far = d.randint(300, 900), 0
    for town in d.sample(TOWNS, d.randint(4, 8)):
        leave = minutes + d.randint(1, 6)
        lines.append(f"{town:<16}{minutes // 60:>5}:{minutes % 60:02}{leave // 60:>6}:{leave % 60:02}{far:>6}")
        minutes, far = leave + d.randint(9, 50), far + d.randint(8, 60)
    return "\n".join(lines)


def json_table(d: random.Random) -> str:
    rows = [
        {
            "id": d.randint(1, 9999),
            "name": person(d),
            "tags": d.sample(TRADES, d.randint(0, 3)),
            "active": d.random() < 0.5,
            "score": round(d.uniform(0, 10), 2),
        }
        for _ in range(d.randint(2, 5))
    ]
    return json.dumps({"page": d.randint(1, 9), "results": rows}, indent=d.choice([None, 2, 4]), ensure_ascii=False)


def settings_file(d: random.Random) -> str:
    return (
        f"[server]\nhost = 127.0.0.{d.randint(1, 9)}\nport = {d.randint(1024, 65535)}\ntimeout = {d.randint(1, 90)}\n\n[store]\npath = /var/lib/{d.choice(THINGS)}\n"
        f"size_limit = {d.randint(1, 64)}G\ncompress = {d.choice(['yes', 'no'])}\n\n[log]\nlevel = {d.choice(['info', 'debug', 'error'])}\nkeep_days = {d.randint(3, 90)}"
    )


def list_(d: random.Random) -> str:
    return d.choice([shopping_list, steps_list, glossary, references, agenda, sums_list])(d)


def shopping_list(d: random.Random) -> str:
    return f"Shopping for {d.choice(['Saturday', 'the party', 'next week'])}:\n" + "\n".join(
        f"{d.choice(['-', '-', '*'])} {d.choice(['2 kg of', 'a bag of', 'some', '500 g of', 'plenty of'])} {food}"
        for food in d.sample(FOODS, d.randint(4, 9))
    )


def steps_list(d: random.Random) -> str:
    thing = d.choice(THINGS)
    steps = [
        f"Take the {thing} out of the box and check that nothing is missing.",
        "Remove the protective film.",
        f"Loosen the {d.randint(2, 8)} screws on the back, but do not take them out.",
        "Slide the cover to the left until it clicks.",
        f"Insert the parts marked {d.choice('ABCD')} and {d.choice('EFGH')}.",
        "Tighten the screws crosswise.",
        f"Wait for {d.randint(5, 60)} minutes before first use.",
        "Keep this sheet for later.",
    ]
    chosen = [s for s in steps if d.random() < 0.75]
    return f"How to set up your {thing}\n\n" + "\n".join(f"{i}. {step}" for i, step in enumerate(chosen, 1))


def glossary(d: random.Random) -> str:
    terms = {
        "abutment": "the part of a bridge that carries its end",
        "bearing": "the direction of a point, as an angle from north",
        "cadence": "the chords that end a phrase",
        "delta": "land built by a river at its mouth",
        "estuary": "the mouth of a river that the tide enters",
        "flux": "what flows through a surface in a given time",
        "gable": "the upper part of a wall under a sloping roof",
        "hull": "the body of a ship",
        "isobar": "a line through places of equal pressure",
        "joist": "a beam that carries a floor",
        "keel": "the lowest timber of a ship",
        "loess": "fine soil left by the wind",
        "moraine": "stones carried and left by a glacier",
        "nave": "the long central part of a church",
        "ore": "rock from which a metal is won",
        "plinth": "the block on which a column stands",
    }
    return "\n".join(
        f"{d.choice(['', '**'])}{word}: {terms[word]}".replace("**" + word, f"**{word}**")
        for word in sorted(d.sample(sorted(terms), d.randint(4, 8)))
    )


def references(d: random.Random) -> str:
    return "References\n\n" + "\n".join(
        f"[{i}] {person(d)[0]}. {d.choice(LAST)} and {person(d)[0]}. {d.choice(LAST)}. {title(d)}. Journal of {d.choice(FIELDS).title()}, {d.randint(1, 80)}({d.randint(1, 12)}):{d.randint(1, 300)}-{d.randint(301, 600)}, {d.randint(1930, 2024)}."
        for i in range(1, d.randint(4, 9))
    )


def agenda(d: random.Random) -> str:
    return f"Agenda, {date(d, 2015, 2025)}, room {d.randint(1, 400)}\n" + "\n".join(
        f"{9 + i // 2}:{i % 2 * 30:02} {d.choice(['Report', 'Budget', 'Questions', 'Election', 'Coffee', 'Plan', 'Repairs', 'Guests'])} ({d.choice(FIRST)})"
        for i in range(d.randint(4, 8))
    )


def sums_list(d: random.Random) -> str:
    lines = []
    for _ in range(d.randint(4, 9)):
        a, b, sign = d.randint(2, 999), d.randint(2, 99), d.choice("+-*")
        lines.append(f"{a} {sign} {b} = {a + b if sign == '+' else a - b if sign == '-' else a * b}")
    return "\n".join(lines)


def code(d: random.Random) -> str:
    return d.choice([own_python, own_python, c_code, javascript, sql, shell, html, rust])(d)


def own_python(d: random.Random) -> str:
    """Some functions of this project in a row."""
    file = d.choice(sorted((ROOT / "bridge").rglob("*.py")))
    parts = re.split(r"\n\n\n(?=def |class |@)", file.read_text(encoding="utf-8"))
    at = d.randrange(len(parts))
    return "\n\n\n".join(parts[at : at + 2])[:2500]


def words(d: random.Random) -> tuple[str, str, str]:
    return tuple(d.sample(["count", "item", "node", "price", "row", "value", "user", "event", "index", "block"], 3))  # type: ignore[return-value]


def c_code(d: random.Random) -> str:
    a, b, c = words(d)
    return f"""#include <stdio.h>
#include <stdlib.h>

struct {a} {{
    int {b};
    double {c};
    struct {a} *next;
}};

/* Insert a {a} in front of the list; returns the new head. */
static struct {a} *push(struct {a} *head, int {b}, double {c}) {{
    struct {a} *made = malloc(sizeof *made);
    if (made == NULL) {{
        perror("malloc");
        exit({d.randint(1, 9)});
    }}
    made->{b} = {b};
    made->{c} = {c};
    made->next = head;
    return made;
}}

int main(void) {{
    struct {a} *list = NULL;
    for (int i = 0; i < {d.randint(4, 99)}; i++)
        list = push(list, i, i * {d.uniform(0, 9):.2f});
    for (struct {a} *at = list; at != NULL; at = at->next)
        printf("%d: %.2f\\n", at->{b}, at->{c});
    return 0;
}}"""


def javascript(d: random.Random) -> str:
    a, b, c = words(d)
    return f"""export async function load{a.title()}s(url, {{ limit = {d.randint(5, 100)}, signal }} = {{}}) {{
  const response = await fetch(`${{url}}?limit=${{limit}}`, {{ signal }});
  if (!response.ok) {{
    throw new Error(`${{response.status}} ${{response.statusText}}`);
  }}
  const {{ results }} = await response.json();
  return results
    .filter(({{ {b} }}) => {b} > {d.randint(0, 50)})
    .map(({{ {b}, {c} }}) => ({{ {b}, {c}: {c} ?? null }}))
    .sort((x, y) => y.{b} - x.{b});
}}"""


def sql(d: random.Random) -> str:
    a, b, c = words(d)
    return f"""CREATE TABLE {a}s (id INTEGER PRIMARY KEY, {b} TEXT NOT NULL, {c} REAL DEFAULT {d.randint(0, 9)}, made DATE);

SELECT {b}, COUNT(*) AS n, AVG({c}) AS mean
FROM {a}s
LEFT JOIN {b}s ON {b}s.id = {a}s.id
WHERE made >= '20{d.randint(10, 25)}-01-01' AND {c} BETWEEN {d.randint(0, 9)} AND {d.randint(10, 99)}
GROUP BY {b}
HAVING n > {d.randint(1, 9)}
ORDER BY mean DESC
LIMIT {d.randint(1, 50)};"""


def shell(d: random.Random) -> str:
    a, b, _ = words(d)
    return f"""#!/bin/sh
set -eu
for {a} in "$@"; do
    if [ ! -f "${a}" ]; then
        echo "${a}: no such file" >&2
        continue
    fi
    {b}=$(wc -l < "${a}")
    [ "${b}" -gt {d.randint(10, 900)} ] && gzip -{d.randint(1, 9)} "${a}"
done
du -sh . | sort -h | tail -n {d.randint(1, 20)}"""


def html(d: random.Random) -> str:
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{title(d)}</title>
<style>
  body {{ margin: {d.randint(1, 4)}rem; font: {d.randint(12, 20)}px/1.5 serif; }}
  .note {{ color: #{d.randrange(1 << 24):06x}; border-left: {d.randint(1, 5)}px solid; }}
</style></head>
<body>
  <h1>{d.choice(TOWNS)}</h1>
  <p class="note">Open from {d.randint(7, 11)} to {d.randint(14, 20)}, except on <a href="/days?id={d.randint(1, 99)}">holidays</a>.</p>
  <ul><li>{d.choice(THINGS)}</li><li>{d.choice(FOODS)}</li></ul>
</body>
</html>"""


def rust(d: random.Random) -> str:
    a, b, c = words(d)
    return f"""#[derive(Debug, Clone, PartialEq)]
pub struct {a.title()} {{
    pub {b}: u{d.choice([8, 16, 32, 64])},
    {c}: Option<String>,
}}

impl {a.title()} {{
    pub fn parse(line: &str) -> Result<Self, String> {{
        let mut parts = line.splitn(2, '{d.choice(":,;=")}');
        let {b} = parts.next().ok_or("empty")?.trim().parse().map_err(|e| format!("{{e}}"))?;
        Ok(Self {{ {b}, {c}: parts.next().map(str::to_owned) }})
    }}
}}"""


def technical() -> str:
    """This project's documentation, without its links and raw HTML."""
    names = ["architecture", "checkpoints", "formats", "limits", "scale-out", "python"]
    text = "\n\n".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in names)
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)[:SIZE]


MADE: dict[str, Callable[[random.Random], str]] = {
    "articles.txt": article,
    "chats.jsonl": conversation,
    "code.txt": code,
    "lists.txt": list_,
    "tables.txt": table,
}

if __name__ == "__main__":
    main()
