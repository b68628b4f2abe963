"""The words of stories.py: names, things, and the templates of each kind of sentence.

A template's wording is its identity: the split of a story is a hash of its templates' texts, so
that another wording moves stories to other splits. Slots of a template:

    {Name} who the story is about; {he} {He} {him} {his} of Name
    {Friend} of the other gender, so that no pronoun is ambiguous; {friend_him} of Friend
    {n} {k} {m} numbers; {things} {thing} {bag} {bags} {day} {place} {shop}
    {times} twice, 3 times …; {part} half, a third …
"""

_MEN = (
    "Tom Ben Omar Luis Ivan Noah Paul Eric Hugo Kenji Raj Adam Leo Mark Sam Jack Theo Finn "
    "Victor Daniel Peter Milan Oscar David Ahmed Carl Felix Martin Simon Kwame"
)
_WOMEN = (
    "Anna Mia Lena Sofia Priya Grace Nora Emma Julia Mei Clara Zoe Alice Ruth Ella Hana Lucy "
    "Maria Olivia Sarah Tara Ida Laura Nina Rosa Amara Eva Helen Jane Fatima"
)
NAMES = {"he": _MEN.split(), "she": _WOMEN.split()}
"""First names by the pronoun that stands for them."""

PRONOUNS = {
    "he": {"he": "he", "He": "He", "him": "him", "his": "his"},
    "she": {"he": "she", "He": "She", "him": "her", "his": "her"},
}

_THINGS = (
    "marble sticker shell button bead stamp coin card pencil crayon postcard badge ribbon pebble "
    "feather acorn bookmark magnet token ticket pen candle envelope eraser ring walnut lemon apple "
    "orange plum cookie muffin pear peanut chestnut bean almond biscuit key whistle cork pin "
    "chocolate seed pinecone medal bolt screw nail picture bracelet"
)
THINGS = _THINGS.split()
"""Things that form their plural with an s."""

BAGS = {
    "bag": "bags",
    "basket": "baskets",
    "box": "boxes",
    "bucket": "buckets",
    "carton": "cartons",
    "jar": "jars",
    "packet": "packets",
    "pouch": "pouches",
    "sack": "sacks",
    "tin": "tins",
}
"""Containers of things, each with its plural."""

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
PLACES = ("school", "the park", "the library", "the club", "the station", "a party", "the fair")
SHOPS = ("the market", "the corner shop", "a flea market", "the new store", "a yard sale")
PARTS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth"}

OPENINGS = (
    "{Name} has {n} {things}.",
    "{Name} owns {n} {things}.",
    "{Name} starts the week with {n} {things}.",
    "There are {n} {things} in {Name}'s {bag}.",
    "{Name} counts {his} {things} on {day} and finds that there are {n}.",
    "{Name} keeps {n} {things} in a {bag}.",
    "In the morning, {Name} has {n} {things}.",
    "{Name} brings {n} {things} to {place}.",
    "{Name} opens a {bag} and finds {n} {things} in it.",
    "On {Name}'s table there are {n} {things}.",
    "{Friend} gives {Name} {n} {things} as a present.",
    "{Name} buys {n} {things} at {shop}.",
    "{Name} packs {n} {things} for a trip.",
    "At first, {Name} has {n} {things}.",
    "{Name} comes to {place} with {n} {things}.",
    "{Name}'s {bag} holds {n} {things}.",
)
"""Templates that give Name n things."""

GROUPS = (
    "{Name} has {k} {bags} with {m} {things} in each.",
    "{Name} buys {k} {bags} of {things}. Each {bag} holds {m} {things}.",
    "There are {k} {bags} on {Name}'s table, and each of them holds {m} {things}.",
    "{Name} fills {k} {bags} with {m} {things} each.",
    "For {k} days, {Name} gets {m} {things} a day.",
    "Each of {Name}'s {k} friends gives {him} {m} {things}.",
    "{Name} lays out {k} rows of {m} {things}.",
    "Every day for {k} days, {Name} puts {m} {things} into a {bag} that was empty at first.",
    "{Name} finds {k} {bags}, and there are {m} {things} in each {bag}.",
    "{Name} makes {k} piles of {m} {things}.",
    "At {shop}, {Name} buys {k} {bags}, each with {m} {things} in it.",
    "{Friend} hands {Name} {k} {bags} with {m} {things} in every one.",
    "{Name} carries {k} {bags} home. In each {bag} there are {m} {things}.",
    "On {day}, {Name} visits {k} shops and buys {m} {things} in each.",
)
"""Templates that give Name k times m things, in place of an opening."""

GAINS = (
    "{He} buys {n} more.",
    "{Friend} gives {him} {n} more.",
    "Then {he} finds {n} more {things}.",
    "On the way home, {he} picks up {n} more.",
    "{He} gets another {n} {things} from {Friend}.",
    "Later, {Friend} brings {him} {n} more {things}.",
    "{He} wins {n} more in a game.",
    "In the afternoon, {he} gets {n} more {things}.",
    "A neighbor hands {him} {n} more.",
    "The next day, {n} more {things} arrive for {him} in the mail.",
    "{He} trades a book for {n} more {things}.",
    "{Friend} no longer needs {n} {things} and passes them on to {him}.",
    "{He} goes to {shop} and comes back with {n} more.",
    "After lunch, {he} discovers {n} more {things} under the bed.",
    "For {his} birthday, {he} gets {n} more {things}.",
)
"""Templates that add n to what Name has."""

LOSSES = (
    "{He} gives {n} of them to {Friend}.",
    "{He} loses {n} of them.",
    "Then {he} sells {n} {things}.",
    "{Friend} takes {n} of them.",
    "On the way home, {he} drops {n} {things} and cannot find them again.",
    "{He} hands {n} of the {things} to {Friend}.",
    "Later, {he} passes {n} {things} on to a neighbor.",
    "{He} throws {n} of them away because they are damaged.",
    "{Friend} asks for {n} {things}, and {he} gives them to {friend_him}.",
    "A dog runs off with {n} of them.",
    "{He} uses up {n} of them for a school project.",
    "{He} mails {n} of them to {Friend}.",
    "The next day, {he} trades {n} {things} for a book.",
    "{He} misplaces {n} {things} and never sees them again.",
    "In the evening, {he} gives away {n} of them.",
)
"""Templates that take n from what Name has."""

MULTIPLES = (
    "By the end of the month, {he} has {times} as many.",
    "A year later, {he} has {times} as many {things}.",
    "{He} collects more until {he} has {times} as many {things} as before.",
    "After a lucky week, {his} number of {things} is {times} as large.",
    "{Friend} helps {him} find more, and soon {he} has {times} as many {things}.",
    "Over the summer, the number of {his} {things} grows to {times} what it was.",
    "By {day}, {his} supply of {things} is {times} as big.",
    "Then {he} gets enough new {things} to have {times} as many.",
    "A magician waves a wand, and now {he} has {times} as many {things}.",
    "Then {his} family gives {him} so many that {he} now owns {times} as many.",
    "When {he} counts again a week later, {he} has {times} as many as before.",
    "The next time {Friend} visits, {he} has {times} as many {things}.",
    "With some luck, {he} turns them into {times} as many {things}.",
)
"""Templates that multiply what Name has by k."""

SHARES = (
    "{He} keeps {part} of them and gives the rest away.",
    "{He} sorts them into {k} equal piles and keeps only one pile.",
    "{He} splits the {things} equally into {k} {bags} and keeps only one {bag}.",
    "Then {he} gives away all but {part} of {his} {things}.",
    "The {things} are shared equally by {k} children, and {he} is one of them.",
    "{He} makes {k} equal groups of {things} and keeps only the first group.",
    "After a while, only {part} of the {things} are left.",
    "{He} belongs to a team of {k}, and the team shares {his} {things} equally.",
    "{He} lays the {things} out in {k} equal rows and keeps one row.",
    "{He} is in a group of {k} people, and they all share the {things} equally.",
    "{He} puts the same number of {things} into each of {k} {bags} and keeps one of the {bags}.",
    "{He} holds on to {part} of the {things} and sells the others.",
    "{Friend} leaves {him} {part} of the {things} and takes the rest.",
)
"""Templates that leave Name one part of k equal ones."""

MORE = (
    "{Friend} has {n} more {things} than {Name} has now. How many {things} does {Friend} have?",
    "{Name} now has {n} fewer {things} than {Friend}. How many {things} does {Friend} own?",
    "{Name} needs {n} more {things} to have as many as {Friend}. "
    "How many {things} does {Friend} have?",
    "{Friend} counts {n} more {things} than {Name} has now. How many {things} does {Friend} count?",
)
"""Templates that ask for what Friend has, n more than Name."""

FEWER = (
    "{Friend} has {n} fewer {things} than {Name} has now. How many {things} does {Friend} have?",
    "{Name} now has {n} more {things} than {Friend}. How many {things} belong to {Friend}?",
    "{Friend} needs {n} more {things} to have as many as {Name} has now. "
    "How many {things} does {Friend} have?",
    "{Friend} counts {n} fewer {things} than {Name} has now. "
    "How many {things} does {Friend} count?",
)
"""Templates that ask for what Friend has, n fewer than Name."""

DIFFERENCES = (
    "{Friend} has {n} {things}. How many more {things} does {Name} have now than {Friend}?",
    "{Friend} owns {n} {things}. By how many {things} is {Name} ahead of {friend_him} now?",
    "{Friend} has just {n} {things}. How many fewer {things} does {Friend} have than {Name} now?",
    "{Friend} has collected {n} {things} so far. How many more {things} does {Friend} need to have "
    "as many as {Name} has now?",
)
"""Templates that ask by how many Name is ahead of Friend's n."""

TIMES_AS_MANY = (
    "{Friend} has {times} as many {things} as {Name} has now. "
    "How many {things} does {Friend} have?",
    "{Friend}'s collection is {times} as large as the one that {Name} has now. "
    "How many {things} are in {Friend}'s collection?",
)
"""Templates that ask for what Friend has, k times what Name has."""

QUESTIONS = (
    "How many {things} does {Name} have now?",
    "How many {things} does {he} have in the end?",
    "How many {things} does {Name} end up with?",
    "What is the number of {things} that {Name} has now?",
    "How many {things} belong to {Name} at the end?",
    "Find the number of {things} that {he} has now.",
    "In the end, how many {things} does {Name} have?",
    "Work out how many {things} {Name} has at the end.",
)
"""Templates that ask for what Name has."""
