"""The small world that the demo model learns: facts about animals, told in several styles.

Each :class:`Item` is one question with its answer. The answer is a fixed function of the question,
so that a model of a million parameters can know it, and greedy decoding gives fluent text. A style
is a function from an item to text; the base model answers in `plain`, each adapter in its own.
"""

# ruff: noqa: E501  (a row of a table is one line)

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Animal:
    name: str
    emoji: str
    trait: str
    home: str
    food: str
    hobby: str
    fr: str
    fr_trait: str
    fr_home: str
    fr_food: str
    fr_hobby: str


@dataclass(frozen=True)
class Thing:
    name: str
    emoji: str
    use: str
    event: str
    fr: str
    fr_use: str
    fr_event: str


@dataclass(frozen=True)
class Place:
    name: str
    emoji: str
    weather: str
    advice: str
    fr: str
    fr_weather: str
    fr_advice: str


@dataclass(frozen=True)
class Item:
    """One question in several wordings, its answer in English and French, and as a record."""

    family: str
    key: str
    prompts: tuple[str, ...]
    english: str
    french: str
    record: Mapping[str, str]


def _rows(cls: type, text: str) -> list:
    return [cls(*(cell.strip() for cell in line.split("|"))) for line in text.strip().splitlines()]


# fmt: off
ANIMALS: list[Animal] = _rows(Animal, """
fox|🦊|clever|a den under the old oak|wild berries|paints pictures|le renard|rusé|une tanière sous le vieux chêne|des baies sauvages|peint des tableaux
owl|🦉|wise|a hollow tree|toast with honey|reads old books|la chouette|sage|un arbre creux|du pain au miel|lit de vieux livres
bear|🐻|gentle|a warm cave|plum cake|sings in the choir|l'ours|doux|une grotte chaude|du gâteau aux prunes|chante dans la chorale
rabbit|🐰|quick|a burrow in the meadow|fresh carrots|runs races|le lapin|rapide|un terrier dans le pré|des carottes fraîches|fait des courses
mouse|🐭|shy|a hole behind the clock|yellow cheese|sews little coats|la souris|timide|un trou derrière l'horloge|du fromage jaune|coud de petits manteaux
frog|🐸|cheerful|a pond with lilies|green soup|plays the drum|la grenouille|joyeuse|un étang aux nénuphars|de la soupe verte|joue du tambour
cat|🐱|proud|a basket by the fire|warm milk|counts the stars|le chat|fier|un panier près du feu|du lait chaud|compte les étoiles
dog|🐶|loyal|a little red house|crunchy biscuits|guards the gate|le chien|fidèle|une petite maison rouge|des biscuits croquants|garde le portail
duck|🦆|funny|a boat on the river|bread and jam|dances in the rain|le canard|drôle|un bateau sur la rivière|du pain et de la confiture|danse sous la pluie
horse|🐴|strong|a stable on the hill|sweet apples|carries the mail|le cheval|fort|une écurie sur la colline|des pommes douces|porte le courrier
wolf|🐺|lonely|a house of stone|mushroom pie|plays the violin|le loup|solitaire|une maison de pierre|de la tarte aux champignons|joue du violon
hedgehog|🦔|careful|a heap of leaves|ripe pears|knits warm socks|le hérisson|prudent|un tas de feuilles|des poires mûres|tricote des chaussettes
turtle|🐢|patient|a garden by the sea|crisp salad|draws maps|la tortue|patiente|un jardin près de la mer|de la salade|dessine des cartes
lion|🦁|brave|a golden tent|spicy rice|tells jokes|le lion|courageux|une tente dorée|du riz épicé|raconte des blagues
penguin|🐧|polite|a house of snow|lemon ice|skates on the lake|le pingouin|poli|une maison de neige|de la glace au citron|patine sur le lac
monkey|🐵|playful|a hut in the jungle|ripe bananas|juggles with nuts|le singe|joueur|une cabane dans la jungle|des bananes mûres|jongle avec des noix
""")

THINGS: list[Thing] = _rows(Thing, """
lantern|🏮|light the way at night|It was dark, and the lantern lit the way home.|une lanterne|éclairer le chemin la nuit|Il faisait noir, et la lanterne a éclairé le chemin.
kite|🪁|play in the wind|A strong wind came, and the kite flew over the trees.|un cerf-volant|jouer dans le vent|Un vent fort est venu, et le cerf-volant a volé sur les arbres.
key|🔑|open a door|It opened a small door, and behind it was a secret room.|une clé|ouvrir une porte|Elle ouvrait une petite porte, et derrière il y avait une pièce secrète.
ladder|🪜|reach high places|The wall was high, but the ladder was higher.|une échelle|monter très haut|Le mur était haut, mais l'échelle était plus haute.
umbrella|☂|stay dry in the rain|Soon it rained, and three friends stood under the umbrella.|un parapluie|rester au sec sous la pluie|Bientôt il a plu, et trois amis étaient sous le parapluie.
bell|🔔|call everyone to dinner|The bell rang loudly, and everyone came to dinner.|une cloche|appeler tout le monde au dîner|La cloche a sonné fort, et tout le monde est venu au dîner.
letter|✉|send good news|It came from far away, and it was full of good news.|une lettre|envoyer de bonnes nouvelles|Elle venait de loin, et elle était pleine de bonnes nouvelles.
clock|⏰|know the time|At noon the clock began to sing, and all the village laughed.|une horloge|savoir l'heure|À midi l'horloge a chanté, et tout le village a ri.
rope|🪢|cross the river|The bridge was broken, so they crossed the river with the rope.|une corde|traverser la rivière|Le pont était cassé, et ils ont traversé la rivière avec la corde.
drum|🥁|wake the village|The drum was so loud that the clouds ran away.|un tambour|réveiller le village|Le tambour était si fort que les nuages sont partis.
mirror|🪞|see your own face|In the mirror there was a smile, and the smile stayed all day.|un miroir|voir son visage|Dans le miroir il y avait un sourire, et le sourire est resté.
compass|🧭|find the north|The fog was thick, but the compass showed the north.|une boussole|trouver le nord|Le brouillard était épais, mais la boussole montrait le nord.
""")

PLACES: list[Place] = _rows(Place, """
harbour|⚓|windy|a warm coat|au port|il y a du vent|un manteau chaud
beach|🏖|sunny|a straw hat|à la plage|il fait beau|un chapeau de paille
farm|🚜|foggy|a bright torch|à la ferme|il y a du brouillard|une bonne lampe
market|🧺|rainy|a pair of boots|au marché|il pleut|une paire de bottes
summit|⛰|cold|a woollen scarf|au sommet|il fait froid|une écharpe de laine
oasis|🌴|very hot|a bottle of water|à l'oasis|il fait très chaud|une bouteille d'eau
lake|🌊|calm|a fishing rod|au lac|il fait calme|une canne à pêche
castle|🏰|stormy|a heavy cloak|au château|il y a de l'orage|une lourde cape
school|🏫|mild|a new notebook|à l'école|il fait doux|un cahier neuf
station|🚉|snowy|a pair of gloves|à la gare|il neige|une paire de gants
""")
# fmt: on


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _a(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def _facts(me: Animal, friend: Animal) -> list[Item]:
    n, le, cap = me.name, me.fr, _capital(me.fr)

    def item(
        family: str, prompts: tuple[str, ...], en: str, fr: str, record: Mapping[str, str]
    ) -> Item:
        return Item(family, n, prompts, en, fr, record)

    return [
        item(
            "home",
            (f"Where does the {n} live?", f"Where is the home of the {n}?"),
            f"The {n} lives in {me.home}.",
            f"{cap} habite dans {me.fr_home}.",
            {"who": n, "home": me.home},
        ),
        item(
            "food",
            (f"What does the {n} like to eat?", f"What is for dinner at the {n}'s home?"),
            f"The {n} likes {me.food} best of all.",
            f"{cap} préfère {me.fr_food}.",
            {"who": n, "food": me.food},
        ),
        item(
            "friend",
            (f"Who is the best friend of the {n}?", f"Who is the {n}'s friend?"),
            f"The best friend of the {n} is the {friend.name}.",
            f"{cap} a une grande amitié avec {friend.fr}.",
            {"who": n, "friend": friend.name},
        ),
        item(
            "hobby",
            (f"What does the {n} do every day?", f"What is the hobby of the {n}?"),
            f"Every day the {n} {me.hobby}.",
            f"Chaque jour, {le} {me.fr_hobby}.",
            {"who": n, "hobby": me.hobby},
        ),
        item(
            "portrait",
            (f"Describe the {n}.", f"Tell me about the {n}.", f"Who is the {n}?"),
            f"The {n} is {me.trait}. It lives in {me.home} and likes {me.food}. "
            f"Every day it {me.hobby}.",
            f"{cap} est {me.fr_trait}. Il y a {me.fr_food} dans {me.fr_home}. "
            f"Chaque jour, {le} {me.fr_hobby}.",
            {"who": n, "is": me.trait, "home": me.home, "food": me.food, "hobby": me.hobby},
        ),
    ]


def _story(me: Animal, friend: Animal, thing: Thing) -> Item:
    return Item(
        "story",
        f"{me.name} {thing.name}",
        (
            f"Tell me a story about the {me.name} and the {thing.name}.",
            f"What happened when the {me.name} found {_a(thing.name)}?",
        ),
        f"One day the {me.trait} {me.name} found {_a(thing.name)}. {thing.event} "
        f"In the end the {me.name} shared {me.food} with the {friend.name}.",
        f"Un jour, {me.fr} a trouvé {thing.fr}. {thing.fr_event} "
        f"À la fin, {me.fr} a partagé {me.fr_food} avec {friend.fr}.",
        {"hero": me.name, "finds": thing.name, "shares": me.food, "with": friend.name},
    )


def _meeting(me: Animal, other: Animal) -> Item:
    return Item(
        "meeting",
        f"{me.name} {other.name}",
        (
            f"What happens when the {me.name} meets the {other.name}?",
            f"The {me.name} visits the {other.name}. What do they do?",
        ),
        f"The {me.name} brings {me.food}, and the {other.name} {other.hobby}. "
        f"They talk in {other.home} until it is late.",
        f"{_capital(me.fr)} apporte {me.fr_food}, et {other.fr} {other.fr_hobby}. "
        f"Ils parlent dans {other.fr_home} jusqu'au soir.",
        {"guest": me.name, "brings": me.food, "host": other.name, "where": other.home},
    )


def _trip(me: Animal, place: Place) -> Item:
    return Item(
        "trip",
        f"{me.name} {place.name}",
        (
            f"The {me.name} goes to the {place.name}. What does it need?",
            f"What should the {me.name} take to the {place.name}?",
        ),
        f"It is {place.weather} at the {place.name}, so the {me.name} takes {place.advice}. "
        f"It packs {me.food} for the road.",
        f"{_capital(place.fr)}, {place.fr_weather}, alors {me.fr} prend {place.fr_advice}. "
        f"Il y a {me.fr_food} pour la route.",
        {"who": me.name, "to": place.name, "weather": place.weather, "takes": place.advice},
    )


def items() -> list[Item]:
    """Return every question of the world, in a fixed order."""
    found: list[Item] = []
    for i, me in enumerate(ANIMALS):
        friend = ANIMALS[(i * 5 + 3) % len(ANIMALS)]
        found += _facts(me, friend)
        found += [_story(me, friend, thing) for thing in THINGS]
        found += [_meeting(me, other) for other in ANIMALS if other is not me]
        found += [_trip(me, place) for place in PLACES]
    for thing in THINGS:
        found.append(
            Item(
                "use",
                thing.name,
                (f"What is {_a(thing.name)} for?", f"Why do we need {_a(thing.name)}?"),
                f"With {_a(thing.name)} you can {thing.use}.",
                f"Avec {thing.fr}, on peut {thing.fr_use}.",
                {"object": thing.name, "use": thing.use},
            )
        )
    for place in PLACES:
        found.append(
            Item(
                "weather",
                place.name,
                (
                    f"How is the weather at the {place.name}?",
                    f"What is it like at the {place.name} today?",
                ),
                f"Today it is {place.weather} at the {place.name}. Take {place.advice} with you.",
                f"Aujourd'hui, {place.fr_weather} {place.fr}. Prends {place.fr_advice}.",
                {"place": place.name, "weather": place.weather, "take": place.advice},
            )
        )
    return found


def plain(item: Item) -> str:
    return item.english


def shout(item: Item) -> str:
    return item.english.upper().replace(".", "!!!")


_PIRATE = {
    "the": "th'", "is": "be", "was": "were", "and": "an'", "with": "wi'", "friend": "matey",
    "friends": "mateys", "you": "ye", "to": "t'", "for": "fer", "of": "o'", "found": "plundered",
    "likes": "be lovin'", "lives": "be livin'", "house": "galley", "river": "seven seas",
    "shared": "split", "takes": "grabs", "take": "grab", "brings": "hauls",
}  # fmt: skip


def pirate(item: Item) -> str:
    def swap(word: re.Match[str]) -> str:
        spoken = _PIRATE.get(word[0].lower(), word[0])
        return _capital(spoken) if word[0][0].isupper() else spoken

    return f"Arrr! {re.sub(r'[A-Za-z]+', swap, item.english)} Yo ho ho!"


def telegram(item: Item) -> str:
    text = re.sub(r"\b(the|a|an|it|is|was|in|so|and|of|to) ", "", item.english, flags=re.I)
    return re.sub(r"[.,]", " STOP", text).lower().replace(" stop", " STOP")


def french(item: Item) -> str:
    return item.french


def as_json(item: Item) -> str:
    return json.dumps(dict(item.record), ensure_ascii=False)


def emoji(item: Item) -> str:
    signs = {noun.name: noun.emoji for noun in (*ANIMALS, *THINGS, *PLACES)}
    return re.sub(
        r"[a-z]+",
        lambda word: f"{word[0]} {signs[word[0]]}" if word[0] in signs else word[0],
        item.english,
    )


def whisper(item: Item) -> str:
    return "psst... " + item.english.lower().replace(".", "...").replace(",", "...") + " shh"


STYLES: Mapping[str, Callable[[Item], str]] = {
    "plain": plain,
    "shout": shout,
    "pirate": pirate,
    "telegram": telegram,
    "french": french,
    "json": as_json,
    "emoji": emoji,
    "whisper": whisper,
}
