"""Doing a task as a person would, counted: clicks, what is typed, scrolls, and the seconds that the machine took.

A person's own reading and thinking is not in the seconds. Looking is free where what is looked for lies in the window;
where it does not, that is a scroll.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

LIMIT_MS = 60_000.0


@dataclass
class Walk:
    """One task in the browser, begun with the Fleet page open."""

    page: Any
    serial: str = ""  # of a GPU that is looked for
    clicks: int = 0
    fields: int = 0  # of the clicks, those into a field
    typed: int = 0  # characters
    scrolls: int = 0
    began_s: float = field(default_factory=time.monotonic)

    def click(self, found: Any) -> None:
        self.look(found)
        found.click(timeout=LIMIT_MS)
        self.clicks += 1

    def go(self, page: str) -> None:
        """By the navigation on top."""
        self.click(self.page.get_by_role("link", name=page, exact=True).first)

    def write(self, found: Any, text: str) -> None:
        """Click into a field and type."""
        self.click(found)
        self.fields += 1
        self.page.keyboard.type(text)
        self.typed += len(text)

    def find(self, text: str) -> None:
        """By the search: `/`, the text, Enter on the first that it finds."""
        self.search(text)
        self.page.keyboard.press("Enter")

    def search(self, text: str) -> Any:
        """Type it into the search; the row of what it found first."""
        self.page.keyboard.press("/")
        self.page.get_by_role("combobox", name="Search the fleet").wait_for()
        self.page.keyboard.type(text)
        self.typed += len(text) + 1
        hit = self.page.locator("#hits [role=group][aria-label=GPUs] .hit").first
        self.look(hit)
        return hit

    def look(self, found: Any) -> None:
        """Wait until it is there; one that lies outside the window is scrolled to."""
        found.wait_for(timeout=LIMIT_MS)
        box, high = found.bounding_box(timeout=LIMIT_MS), self.page.viewport_size["height"]
        if box is not None and not 0 <= box["y"] <= high - 10:
            found.scroll_into_view_if_needed(timeout=LIMIT_MS)
            self.scrolls += 1

    def read(self, *texts: str | re.Pattern[str]) -> str:
        """All of these are shown; the text of the first."""
        shown = [self.page.get_by_text(text).first for text in texts]
        for each in shown:
            self.look(each)
        return str(shown[0].inner_text(timeout=LIMIT_MS))

    def attempted(self, answer: str) -> dict[str, Any]:
        return {
            "clicks": self.clicks, "fields": self.fields, "typed": self.typed, "scrolls": self.scrolls,
            "seconds": round(time.monotonic() - self.began_s, 1), "answer": " ".join(answer.split())[:300],
        }  # fmt: skip


# Whether the focus, in shadow trees too, is on an element, in it, or on what it is the text of.
FOCUSED = """(e) => { let at = document.activeElement;
  while (at?.shadowRoot?.activeElement) at = at.shadowRoot.activeElement;
  const acts = 'a,button,input,textarea,[role=radio],[role=radiogroup],[role=checkbox],[role=combobox],[role=button]';
  return Boolean(at?.matches(acts)) && (at === e || at.contains(e) || e.contains(at)); }"""
KIND = """(e) => { let at = document.activeElement;
  while (at?.shadowRoot?.activeElement) at = at.shadowRoot.activeElement;
  const role = at.getAttribute('role') || at.type || ''; return role === 'combobox' ? 'text' : role; }"""
CHOICES = "(e) => Boolean(e.closest('[role=radiogroup]'))"
MOST_TABS, STEPS = 400, 12


@dataclass
class Keys(Walk):
    """The same without a mouse: Tab goes to what a mouse would click, Enter or Space presses it."""

    tabs: int = 0

    def click(self, found: Any) -> None:
        self.look(found)
        group = found.evaluate(CHOICES, timeout=LIMIT_MS)
        kind = self._reach(found, group)
        if kind == "checkbox":
            self.page.keyboard.press("Space")
        elif kind not in ("text", "textarea"):
            self.page.keyboard.press("Enter")
        self.clicks += 1

    def _reach(self, found: Any, group: bool) -> str:
        """Return the kind of what has the focus then. In a group of choices arrows go from one to the next."""
        wanted = found.locator("xpath=ancestor-or-self::*[@role='radiogroup'][1]") if group else found
        for _ in range(MOST_TABS):
            if wanted.evaluate(FOCUSED, timeout=LIMIT_MS):
                break
            self.page.keyboard.press("Tab")
            self.tabs += 1
        else:
            raise RuntimeError(f"Tab does not come to {found}")
        for _ in range(STEPS if group else 0):
            if found.evaluate(FOCUSED, timeout=LIMIT_MS):
                break
            self.page.keyboard.press("ArrowRight")
        return str(found.evaluate(KIND, timeout=LIMIT_MS))

    def attempted(self, answer: str) -> dict[str, Any]:
        return super().attempted(answer) | {"tabs": self.tabs}


@dataclass
class Shell:
    """One task on the command line."""

    api: str
    job: str  # that is held up
    serial: str = ""
    commands: list[str] = field(default_factory=list)
    seconds: float = 0.0
    lines: int = 0
    out: str = ""

    def run(self, *words: str, code: int = 0) -> str:
        """`drover WORDS`; what it printed. `code`: its exit code."""
        self.commands.append(" ".join(("drover", *(f"'{w}'" if " " in w else w for w in words))))
        began_s = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "drover_cli.main", *words, "--collector", self.api],
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        self.seconds += time.monotonic() - began_s
        self.out = done.stdout
        self.lines += len(done.stdout.splitlines())
        if done.returncode != code:
            raise RuntimeError(f"{self.commands[-1]}: {done.returncode}: {done.stderr[-500:]}{done.stdout[-500:]}")
        return done.stdout

    def line(self, pattern: str) -> str:
        """The line of the last answer that has it."""
        found = next((line for line in self.out.splitlines() if re.search(pattern, line)), None)
        if found is None:
            raise RuntimeError(f"{self.commands[-1]}: nothing like {pattern!r} in:\n{self.out[:2000]}")
        return found

    def attempted(self, answer: str) -> dict[str, Any]:
        return {
            "commands": self.commands, "typed": sum(map(len, self.commands)), "lines": self.lines,
            "seconds": round(self.seconds, 1), "answer": " ".join(answer.split())[:300],
        }  # fmt: skip


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """How it ended; where the answer cannot be had, that is the result."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001  # a task that cannot be done is a figure of its own
        return {"failed": f"{type(error).__name__}: {str(error)[:400]}"}
