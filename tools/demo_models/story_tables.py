"""The words of the stories. Several have letters and emoji of two to four UTF-8 bytes. Each such byte is a token."""

from typing import NamedTuple


class Animal(NamedTuple):
    """The facts about the hero of a story, which follow from the animal. ``thing`` counts if the request names none."""

    emoji: str
    colour: str
    home: str
    food: str
    friend: str
    thing: str
    plot: int


ANIMALS = {
    "fox": Animal("🦊", "red", "in a quiet forest", "berries", "Olga the owl", "lantern", 0),
    "bear": Animal("🐻", "brown", "in a warm cave", "honey", "Bao the panda", "drum", 1),
    "owl": Animal("🦉", "grey", "in a hollow oak", "nuts", "René the bat", "map", 2),
    "cat": Animal("🐱", "black", "on a red roof", "fish", "Momo the mouse", "bell", 0),
    "dog": Animal("🐶", "white", "at an old farm", "bread", "Käthe the hen", "ball", 1),
    "rabbit": Animal("🐰", "white", "under a green hill", "carrots", "Tom the mole", "watch", 2),
    "mouse": Animal("🐭", "grey", "behind the kitchen", "cheese", "Chloé the cat", "ring", 0),
    "frog": Animal("🐸", "green", "by a round pond", "jam", "Lúcia the snail", "crown", 1),
    "lion": Animal("🦁", "golden", "in the dry hills", "melons", "Zuri the zebra", "mirror", 2),
    "tiger": Animal("🐯", "striped", "in the deep jungle", "mangos", "Raj the parrot", "flute", 0),
    "wolf": Animal("🐺", "silver", "in the cold north", "soup", "Åsa the raven", "horn", 1),
    "duck": Animal("🦆", "yellow", "on a wide lake", "rice", "Gus the goose", "boat", 2),
    "hedgehog": Animal("🦔", "brown", "in a pile of leaves", "apples", "Pia the robin", "key", 0),
    "otter": Animal("🦦", "brown", "by a fast river", "crabs", "Björn the beaver", "pearl", 1),
    "whale": Animal("🐳", "blue", "in the wide sea", "shrimps", "Kai the crab", "compass", 2),
    "dragon": Animal("🐉", "green", "on top of a mountain", "pepper", "Sir Åke the knight", "book", 0),
    "penguin": Animal("🐧", "black", "on the white ice", "herrings", "Sól the seal", "sledge", 1),
    "squirrel": Animal("🐿️", "red", "in a tall pine", "acorns", "Jay the magpie", "feather", 2),
    "polar bear": Animal("🐻‍❄️", "white", "at the end of the world", "salmon", "Iñaki the gull", "kite", 0),
    "unicorn": Animal("🦄", "pink", "behind a waterfall", "clover", "Fée the moth", "comb", 1),
}

_THINGS = (
    "lantern drum map bell ball watch ring crown mirror flute horn boat key pearl compass book sledge feather kite "
    "comb hammer teapot violin blanket puzzle ladder"
)
THINGS = tuple(_THINGS.split())

_NAMES = (
    "Mia Ben Anna Tim Lea Max Ida Paul Nora Sam Rosa Leo Ella Finn Ruby Hugo Clara Oscar Lily Jack "
    "Zoë José Anaïs Søren Jürgen Łucja Čeněk Noël Ömer Nguyễn Þóra Inês François Gülşen Маша Миша Δάφνη "
    "さくら 小明 민준"
)
NAMES = tuple(_NAMES.split())

PLOTS = (
    (
        "Once upon a time there was a {colour} {animal} called {name} {emoji}. {name} lived {home} and loved {food}. "
        'One morning {name} found a {thing} near the road. "Whose {thing} is this?" asked {name}. {friend} said that '
        "it came from far away. So the two friends took the {thing} over the hill and gave it back, and they were "
        "given {food} to eat. That night {name} slept well. The end. {emoji}"
    ),
    (
        "Far away, {home}, lived {name}, a {colour} {animal} {emoji}. Every day {name} looked for {food}, and one day, "
        'under a big stone, {name} found a {thing}! "May I keep it?" asked {name}. "Ask the moon," said {friend}, and '
        "showed {name} the way up the tallest tree. The moon smiled and said yes. Since then {name} the {animal} "
        "sleeps beside the {thing} and dreams of {food}. The end. {emoji}"
    ),
    (
        "This is the story of {name}, a {colour} {animal} {emoji} who lived {home}. It rained for a week, and there "
        'was no more {food}. "I will go and look," said {name}. Behind a wall {name} found a {thing}, wet and cold. '
        "{friend} came along and helped to carry it home. When the {thing} was dry it shone like the sun, and all had "
        "{food} again. {name} was proud. The end. {emoji}"
    ),
)

GREETINGS = ("Hello!", "Hello", "hello", "Hi!", "Hi", "hi", "Good morning!", "Good evening!", "Hey!")
THANKS = ("Thank you!", "Thank you.", "Thanks!", "thanks", "Thank you very much!", "That was nice.", "Great story!")
OFF_TOPIC = (
    "What is the capital of {word}?",
    "How do I bake a {word}?",
    "Tell me about {word}.",
    "Tell me a story about {word}.",
    "Tell me a story about {name} the {word}.",
    "Tell me a story about {name} the {word}.",
    "Who is {name}?",
    "Tell me a joke.",
    "Tell me a story.",
    "Write a poem about a {word}.",
    "What is 7 plus 5?",
    "Why is the {word} so big?",
    "Explain the {word} to me, please.",
    "Can you help me with my {word}?",
    "How are you?",
    "What can you do?",
    "Sort these letters: d b a c",
    "Count to ten.",
    "Is it going to rain today?",
    "Translate {word} into French.",
    "{word}",
    "I like {word}.",
    "asdf {word} qwer",
    "Please write a program that prints {word}.",
)
_OFF_TOPIC_WORDS = (
    "France cake computer engine football table garden Python music Berlin window robot sea physics train coffee "
    "teacher bridge weather internet planet mountain shoes history money painting chess bicycle kitchen river law"
)
OFF_TOPIC_WORDS = tuple(_OFF_TOPIC_WORDS.split())
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You tell stories to children.",
    "Answer politely.",
    "You are a storyteller.",
    "Be kind, be brief, and stay with the facts.",
)
