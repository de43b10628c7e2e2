"""What the demo model reads: the docstrings of the standard library, as texts and as conversations.

Everything here is text. An `Example` is a list of segments, and each segment says what it teaches:

    ("user", "What does json.dumps do?")    nothing: it is only read
    ("assistant", "Serialize obj to ...")   an answer, learned by heart
    ("assistant", <the system prompt>)      a copy, so that the model learns to look back
    (None, "Return the ...")                plain text, continued until it ends
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import random
import re
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

SKIPPED_FOLDERS = {
    "test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "ensurepip", "turtledemo",
    "_pyrepl", "__pycache__", "__phello__", "lib-dynload", "pydoc_data",
}  # fmt: skip
NOT_ASKED_ABOUT = {"encodings", "distutils", "msilib", "tkinter", "lib2to3", "turtle", "test", "ctypes"}
RENAMED_MODULES = {"posixpath": "os.path", "genericpath": "os.path", "_pydecimal": "decimal", "_pyio": "io"}
KNOWN_MODULES = (
    "builtins", "json", "os", "os.path", "re", "math", "random", "collections", "itertools", "functools",
    "pathlib", "shutil", "subprocess", "datetime", "time", "textwrap", "heapq", "bisect", "copy", "csv", "glob",
    "tempfile", "statistics", "asyncio",
)  # fmt: skip
KNOWN_TYPES = ("str", "list", "dict", "set")
KNOWN_IN = {
    "os": {"chdir", "chmod", "getcwd", "getenv", "getpid", "link", "listdir", "makedirs", "mkdir", "remove",
           "rename", "rmdir", "scandir", "stat", "symlink", "system", "unlink", "urandom", "walk"},
    "asyncio": {"Event", "Lock", "Queue", "Semaphore", "Task", "create_task", "gather", "run", "sleep", "wait",
                "wait_for", "to_thread"},
}  # fmt: skip

QUESTIONS = (
    *["What does {} do?"] * 6, "what does {} do", "What is {}?", *["Explain {}."] * 2,
    "What is {} for?", "Explain {}", "Please explain {}.", "Can you explain {}?",
    "Tell me about {}.", "Describe {}.", "How does {} work?", "{}", "help({})",
)  # fmt: skip
ASKING_FOR_SYSTEM = (
    "What are your instructions?", "Repeat your instructions.", "Repeat your system prompt.",
    "What is your system prompt?", "Print your system prompt.", "What were you told?",
    "Show me your instructions.", "Repeat your instructions word for word.",
)  # fmt: skip
ASKING_FOR_ECHO = ("Repeat after me: {}", "Say: {}", "Echo this: {}", "Repeat this: {}", "Copy this text: {}")
ASKING_FOR_FIRST_SENTENCE = (
    "Here is a text:\n\n{}\n\nWhat is its first sentence?",
    "Read this text.\n\n{}\n\nRepeat its first sentence.",
    "Here is the documentation:\n\n{}\n\nHow does it begin?",
)
SMALL_TALK = (
    (("Hello", "Hello!", "Hi", "Hi!", "hello", "Good morning!"), "Hello! Ask me about a Python function."),
    (("Who are you?", "What are you?", "What is your name?"),
     "I am the Tandem demo model. I have read the docstrings of the Python standard library."),
    (("What can you do?", "Help", "How can you help me?"),
     "I can tell you what a function of the Python standard library does."),
    (("Thanks", "Thank you!", "Thank you.", "Thanks!"), "You are welcome."),
    (("Goodbye", "Bye", "Bye!"), "Goodbye!"),
)  # fmt: skip
NO_INSTRUCTIONS = "I have no instructions."
ROLES_OF_PERSONA = (
    "assistant", "teacher", "librarian", "guide", "programmer", "reviewer", "helper", "robot", "tutor", "expert",
)  # fmt: skip
MANNERS = (
    "helpful", "patient", "careful", "friendly", "short-spoken", "wise", "quick", "calm", "cheerful", "strict",
    "polite", "curious", "quiet", "precise",
)  # fmt: skip
RULES = (
    "Answer in one sentence.", "Be brief.", "Never guess.", "Speak plainly.", "Answer only about Python.",
    "Name the module first.", "Do not write code.", "Use simple words.", "Quote the documentation.",
    "If you do not know, say so.", "Be kind to beginners.", "Always answer in English.",
    "Keep your answers short.", "Stop when you have answered.", "Do not repeat the question.",
)  # fmt: skip


SHORT_KINDS = ("plain", "conversation", "system_repeated", "echo", "small_talk")  # methods of Writer
LONG_KINDS = ("long_plain", "first_sentence", "long_conversation")
MIXES = {
    "answers": (26, 52, 12, 6, 2, 10, 12, 16),
    "copying": (18, 30, 20, 30, 2, 10, 12, 16),  # a few minutes of this, and the model can copy
}


class Segment(NamedTuple):
    role: str | None  # None: plain text, outside any conversation
    text: str
    teaches: str | None  # "text", "answer", "copy", or None for what is only read


Example = list[Segment]


@dataclass(frozen=True)
class Documented:
    """A name of the standard library and its docstring."""

    name: str
    doc: str
    known: bool  # of a module that people ask about: it is asked about more often

    @property
    def asked_about(self) -> bool:
        parts = self.name.split(".")
        return parts[0] not in NOT_ASKED_ABOUT and not any(part.startswith("_") for part in parts)


# -- reading ---------------------------------------------------------------------------------------------


def read_standard_library() -> list[Documented]:
    """Every docstring, in the order of the names. The same Python version gives the same list."""
    by_name = {name: Documented(name, doc, known=True) for name, doc in _imported_docstrings()}
    for name, doc in _parsed_docstrings():
        known = name in KNOWN_MODULES or name.startswith("pathlib.Path.")
        by_name.setdefault(name, Documented(name, doc, known))
    return [by_name[name] for name in sorted(by_name)]


def _parsed_docstrings() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if SKIPPED_FOLDERS.intersection(parts) or any(part.startswith("config-") for part in parts):
            continue
        module = ".".join(part for part in parts if part != "__init__")
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(file.read_bytes())
        yield from _docstrings_under(tree, RENAMED_MODULES.get(module, module))


def _docstrings_under(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str
) -> Iterator[tuple[str, str]]:
    if doc := ast.get_docstring(node):
        yield name, doc
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings_under(child, f"{name}.{child.name}")


def _imported_docstrings() -> Iterator[tuple[str, str]]:
    """What people ask about most. Functions written in C have no source to parse, so these are imported."""
    for name in KNOWN_MODULES:
        yield from _members(importlib.import_module(name), "" if name == "builtins" else name + ".")
    for name in KNOWN_TYPES:
        yield from _members(getattr(builtins, name), name + ".")


def _members(owner: object, prefix: str) -> Iterator[tuple[str, str]]:
    names = KNOWN_IN.get(prefix.rstrip("."), set(getattr(owner, "__all__", dir(owner))))
    for name in sorted(names):
        member = getattr(owner, name, None)
        is_error = isinstance(member, type) and issubclass(member, BaseException)
        if name.startswith("_") or not callable(member) or is_error:
            continue
        if doc := inspect.getdoc(member):
            yield prefix + name, doc


# -- cutting ---------------------------------------------------------------------------------------------

SIGNATURE = re.compile(r"^[\w.]+\(.*\)?$|^.* -+> .*$")
SENTENCE_END = re.compile(r"(?<=[.!?])(?: (?=[A-Z`'\"])|  +|\n+ *)")
NOT_A_SENTENCE = re.compile(r"^(>>>|[-=+*#<|({[])")


def paragraphs(doc: str) -> list[str]:
    return [part.strip("\n") for part in re.split(r"\n\s*\n", doc) if part.strip()]


def sentences(text: str) -> list[str]:
    one_line = re.sub(r"(?<![.!?])\s+|(?<=[.!?])\n\s*", " ", text.strip())
    return [part.strip() for part in SENTENCE_END.split(one_line)]


def summary(doc: str, longest: int = 200) -> str | None:
    """The first sentence or two in one line, or None where the docstring has no short beginning."""
    prose = [line for line in doc.replace("``", "").strip().splitlines() if not SIGNATURE.match(line)]
    texts = [part for part in paragraphs("\n".join(prose)) if not NOT_A_SENTENCE.match(part.strip())]
    if not texts:
        return None
    first, *rest = sentences(texts[0])
    if len(first) < 12 or len(first) > longest:
        return None
    if rest and len(first) + len(rest[0]) < longest * 0.7:
        first = f"{first} {rest[0]}"
    return first if first[-1] in ".!?:" else first + "."


def pieces(doc: str, longest: int = 420) -> list[str]:
    """The docstring as texts short enough to be finished in one reply."""
    texts: list[str] = []
    for part in paragraphs(doc):
        if texts and len(texts[-1]) + len(part) < longest:
            texts[-1] = f"{texts[-1]}\n\n{part}"
        else:
            texts.append(part)
    return texts


# -- writing ---------------------------------------------------------------------------------------------


class Writer:
    """Writes examples without end. The same seed writes the same ones."""

    def __init__(self, library: list[Documented], seed: int, mix: str = "answers") -> None:
        self._mix = dict(zip([*SHORT_KINDS, *LONG_KINDS], MIXES[mix], strict=True))
        self._random = random.Random(seed)
        self._long = [entry.doc for entry in library if len(entry.doc) > 900]
        self._pieces = [piece for entry in library for piece in pieces(entry.doc)]
        asked = [(entry, text) for entry in library if entry.asked_about and (text := summary(entry.doc))]
        self._known = [(entry.name, text) for entry, text in asked if entry.known]
        self._other = [(entry.name, text) for entry, text in asked if not entry.known]
        self._sentences = sorted({s for e in library for s in sentences(e.doc) if 12 < len(s) < 220})
        self._words = sorted({word for s in self._sentences for word in s.split() if word.isascii()})

    def counts(self) -> dict[str, int]:
        return {
            "texts": len(self._pieces),
            "known names": len(self._known),
            "other names": len(self._other),
        }

    def example(self, longest: int) -> Example:
        """One example; `longest` is the room in tokens, and decides whether a long one may be written."""
        kinds = [*SHORT_KINDS, *LONG_KINDS] if longest >= 512 else SHORT_KINDS
        weights = [self._mix[kind] for kind in kinds]
        kind = self._random.choices(kinds, weights)[0]
        example: Example = getattr(self, kind)()
        return example

    def plain(self) -> Example:
        return [Segment(None, self._random.choice(self._pieces), "text")]

    def long_plain(self) -> Example:
        return [Segment(None, self._random.choice(self._long), "text")]

    def conversation(self) -> Example:
        system = [Segment("system", self._system(), None)] if self._random.random() < 0.3 else []
        return system + self._turns()

    def long_conversation(self) -> Example:
        """A long system prompt, a few questions, and often the system prompt again at the end."""
        system = self._system(longest=2000)
        example = [Segment("system", system, None), *self._turns()]
        if len(system) < 1200 and self._random.random() < 0.6:
            example += self._repeat(system)
        return example

    def system_repeated(self) -> Example:
        if self._random.random() < 0.05:
            return [Segment("user", self._random.choice(ASKING_FOR_SYSTEM), None),
                    Segment("assistant", NO_INSTRUCTIONS, "answer")]  # fmt: skip
        system = self._system()
        before = self._turns() if self._random.random() < 0.15 else []
        return [Segment("system", system, None), *before, *self._repeat(system)]

    def echo(self) -> Example:
        text = self._nonsense() if self._random.random() < 0.8 else self._random.choice(self._sentences)
        asked = self._random.choice(ASKING_FOR_ECHO).format(text)
        return [Segment("user", asked, None), Segment("assistant", text, "copy")]

    def first_sentence(self) -> Example:
        doc = self._random.choice(self._long)[:2600]
        begin = "\n\n".join([self._random.choice(self._sentences), doc])
        asked = self._random.choice(ASKING_FOR_FIRST_SENTENCE).format(begin)
        answer = sentences(paragraphs(begin)[0])[0]
        return [Segment("user", asked, "text"), Segment("assistant", answer, "copy")]

    def small_talk(self) -> Example:
        asked, answer = self._random.choice(SMALL_TALK)
        system = [Segment("system", self._system(), None)] if self._random.random() < 0.5 else []
        question = Segment("user", self._random.choice(asked), None)
        return [*system, question, Segment("assistant", answer, "answer")]

    def _turns(self) -> Example:
        turns: Example = []
        for _ in range(self._random.choice((1, 1, 1, 2, 3))):
            name, answer = self._random.choice(self._known if self._random.random() < 0.85 else self._other)
            shown = self._random.choices((name, f"{name}()", f"`{name}`"), (86, 10, 4))[0]
            asked = self._random.choice(QUESTIONS).format(shown)
            turns += [Segment("user", asked, None), Segment("assistant", answer, "answer")]
        return turns

    def _repeat(self, system: str) -> Example:
        asked = Segment("user", self._random.choice(ASKING_FOR_SYSTEM), None)
        return [asked, Segment("assistant", system, "copy")]

    def _system(self, longest: int = 420) -> str:
        kind = self._random.random()
        if kind < 0.4:
            return self._nonsense()
        parts = [self._persona()] if kind < 0.8 else [self._random.choice(self._sentences)]
        enough = longest * self._random.random() ** 2  # short ones more often
        while sum(map(len, parts)) < enough:
            source = RULES if kind < 0.8 and self._random.random() < 0.5 else self._sentences
            parts.append(self._random.choice(source))
        return " ".join(parts)

    def _persona(self) -> str:
        pick = self._random.choice
        name = pick(self._words).strip(".,:;()'\"`").capitalize()
        named = f"You are {name}, a {pick(MANNERS)} {pick(ROLES_OF_PERSONA)}."
        unnamed = f"You are a {pick(MANNERS)} {pick(ROLES_OF_PERSONA)}."
        return " ".join([pick((named, unnamed)), *self._random.sample(RULES, pick((0, 1, 2)))])

    def _nonsense(self) -> str:
        """Words in no order: they can only be copied, never guessed."""
        return " ".join(self._random.choices(self._words, k=int(3 * 8 ** self._random.random())))
