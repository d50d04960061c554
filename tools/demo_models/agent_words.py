"""Random words, names, values and results for the conversations of the model ``agent``.

Two thirds of the words are made up, so that the model learns to copy any word, and not to know these.
"""

import json
import random
import re
from typing import Any, Final

_HELD_OUT = (
    "weather paris rome oslo lima zürich city location multiply add price stock symbol forecast temperature unit "
    "celsius population country capital ann"
)
HELD_OUT: Final = frozenset(_HELD_OUT.split())
"""Words that the training text never has, so that prompts with them show that the model copies what it never saw."""

_COMMON = (
    "account address age airport album amount animal answer area author balance bank book border box branch bridge "
    "budget building bus button cable calendar camera car card case chain chapter chart chat church circle class "
    "client clock cloud coach code coin color column company contact contract corner cost course court currency "
    "customer data date day deadline delay delivery depth desk device diameter direction director distance doctor "
    "document door draft driver duration east email engine entry error event exam factory family farm field file film "
    "flag flight flow folder font food form frame garden gate goal group growth guest guide harbor head height "
    "history hotel house image index income invoice island issue item job key lake language law length letter level "
    "library license limit line list load lock mail manager map market mass material meal meeting member memory menu "
    "message method metal mile minute model moment month moon motor mountain museum music name network news nickname "
    "night north note number object ocean office opening order origin owner page paper parcel park part party pass "
    "path payment people period person phone photo picture place plan planet plant player poem point policy port "
    "position post power prefix president printer process product profile profit program project quality quantity "
    "query question queue radio radius rain range rank rate rating reason record region rent report request reserve "
    "result revenue reward river road role room route row rule salary sale sample schedule school score screen sea "
    "season seat secret section sender sensor series server service session shape share ship shop side sign signal "
    "size snow song sound source space speed sport square staff stage star start state station status step stone "
    "storage store storm story street string student subject sum sun supply surface table target task tax team term "
    "test text theme ticket tide time title token tone tool topic total tower town track trade traffic trail train "
    "travel tree trend trip truck tube type update user value vector version video view village visit voice volume "
    "wage wall water wave website week weight west width wind window winner word work world worker writer year zone"
)
COMMON: Final = tuple(_COMMON.split())
_OF_TOOLS: Final = ("get", "find", "read", "fetch", "lookup", "search", "show", "check", "api", "info")
_SPOKEN: Final = frozenset((*COMMON, *_OF_TOOLS))
_SHORT_WORDS = (
    "the a of for in with from to and this that returns gives finds reads current given one all new last as text by "
    "about any local each into used"
)
_SENTENCE_WORDS: Final = tuple(_SHORT_WORDS.split())
_VOWELS: Final = "aeiou"
_CONSONANTS: Final = "bcdfghjklmnpqrstvwxyz"
_ACCENTED: Final = "áàâäåæéèêëíîïóôöøúûüý" + "çčďğłñňřśšťžźß"


def word(rng: random.Random) -> str:
    """Return a word in small ASCII letters: a common one, one of syllables, or letters in any order."""
    while True:
        kind = rng.random()
        if kind < 0.35:
            made = rng.choice(COMMON)
        elif kind < 0.75:
            made = "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.randint(1, 3)))
            made += rng.choice(_CONSONANTS) if rng.random() < 0.6 or len(made) < 4 else ""
        else:
            made = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 8)))
        if made not in HELD_OUT and made not in _SENTENCE_WORDS and made not in ("like", "at"):
            return made


def is_spoken(made: str) -> bool:
    """Return whether a word is a common one, one of syllables, or a single letter."""
    return made in _SPOKEN or bool(re.fullmatch(f"(?:[{_CONSONANTS}][{_VOWELS}])+[{_CONSONANTS}]?|[a-z]", made))


def words(rng: random.Random, n: int) -> list[str]:
    """Return ``n`` different words."""
    found: list[str] = []
    while len(found) < n:
        if (made := word(rng)) not in found:
            found.append(made)
    return found


def value(rng: random.Random) -> str:
    """Return a value as a user writes it: mostly a name, and also codes, words and names beyond ASCII."""
    kind = rng.random()
    if kind < 0.5:
        return word(rng).capitalize()
    if kind < 0.65:
        return f"{word(rng).capitalize()} {word(rng).capitalize()}"
    if kind < 0.75:
        return word(rng)
    if kind < 0.82:
        return word(rng)[:4].upper()
    if kind < 0.9:
        letters = word(rng)[:2].upper()
        return f"{letters}{rng.choice(('', '-'))}{rng.randint(1, 9999)}"
    if kind < 0.95:
        made = list(word(rng))
        made[rng.randrange(len(made))] = rng.choice(_ACCENTED)
        return "".join(made).capitalize()
    return "".join(chr(rng.randint(0x3042, 0x3093)) for _ in range(rng.randint(2, 4)))


def number(rng: random.Random) -> str:
    """Return an integer of one to five digits, some of them negative."""
    drawn = rng.randint(0, 10 ** rng.randint(1, 5) - 1)
    return str(-drawn if rng.random() < 0.08 else drawn)


def typed_value(rng: random.Random, schema: dict[str, Any]) -> str:
    """Return a value of the schema's type, as a user writes it."""
    match schema["type"]:
        case "integer":
            return number(rng)
        case "number":
            return number(rng) + (
                rng.choice((".5", ".25", f".{rng.randint(1, 9)}", f".{rng.randint(0, 9)}{rng.randint(1, 9)}"))
                if rng.random() < 0.5
                else ""
            )
        case "boolean":
            return rng.choice(("true", "false"))
    if "enum" in schema:
        return str(rng.choice(schema["enum"]))
    return value(rng)


def sentence(rng: random.Random, least: int = 2, most: int = 12) -> str:
    """Return words in any order, with a capital letter and a full stop."""
    made = [rng.choice(_SENTENCE_WORDS) if rng.random() < 0.45 else word(rng) for _ in range(rng.randint(least, most))]
    return " ".join(made).capitalize() + "."


def result(rng: random.Random) -> str:
    """Return what a tool may answer: words, numbers, a sentence without its full stop, or a small JSON object."""
    kind = rng.random()
    if kind < 0.4:
        return " ".join(words(rng, rng.choice((1, 1, 1, 2, 3))))
    if kind < 0.6:
        return number(rng) + (f".{rng.randint(0, 99)}" if rng.random() < 0.3 else "")
    if kind < 0.7:
        measured = f"{number(rng)} {rng.choice((word(rng), '°C', '%', 'km', '€'))}"
        return f"{measured}, {word(rng)}" if rng.random() < 0.5 else measured
    if kind < 0.75:
        return f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}"
    if kind < 0.8:
        return value(rng)
    if kind < 0.9:
        return sentence(rng, 3, 8 if rng.random() < 0.9 else 40).rstrip(".")
    found = {key: rng.choice((word(rng), int(number(rng)), True)) for key in words(rng, rng.randint(1, 3))}
    return json.dumps(found)
