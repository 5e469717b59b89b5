"""How states look. Colours are those of Okabe and Ito, which stay apart for colour-blind eyes; a sign or a word always
goes with them.

Streamlit's light and dark themes are given the same colours, and the browser components get them from `palette`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drover_core.model.events import Health, Severity


@dataclass(frozen=True, slots=True)
class ColorPair:
    """A state on the screen: its word, its sign inside a cell, its colour on a light and on a dark page."""

    label: str
    sign: str
    light: str
    dark: str
    icon: str


# Healthy is pale on purpose: what needs an operator must stand out. Unknown has no colour: it is hatched.
HEALTH: dict[Health, ColorPair] = {
    Health.HEALTHY: ColorPair("healthy", "", "#9fd8c6", "#1b5a49", "check_circle"),
    Health.SUSPECT: ColorPair("suspect", "?", "#e69f00", "#e69f00", "help"),
    Health.CONFIRMED: ColorPair("confirmed", "!", "#d55e00", "#f0662b", "error"),
    Health.DRAINING: ColorPair("draining", "d", "#56b4e9", "#56b4e9", "logout"),
    Health.DRAINED: ColorPair("drained", "D", "#0072b2", "#3d9bd6", "block"),
    Health.VALIDATING: ColorPair("validating", "V", "#f0e442", "#f0e442", "rule"),
    Health.REPAIR: ColorPair("repair", "R", "#cc79a7", "#cc79a7", "build"),
    Health.UNKNOWN: ColorPair("unknown", "", "#8a8f98", "#7d838c", "do_not_disturb_on"),
}

SEVERITY: dict[Severity, ColorPair] = {
    Severity.CRITICAL: ColorPair("CRITICAL", "!", "#b34700", "#f0662b", "error"),
    Severity.WARNING: ColorPair("WARNING", "?", "#8a5d00", "#e69f00", "warning"),
    Severity.INFO: ColorPair("INFO", "i", "#0072b2", "#56b4e9", "info"),
}

# Lines of a chart, by GPU slot; four solid, four dashed, so that colour is not their only difference.
LINES_LIGHT = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7a7200", "#444b55")
LINES_DARK = ("#4aa8e0", "#e69f00", "#1fc296", "#e08fbf", "#8fd0f5", "#f0662b", "#f0e442", "#c3c9d2")

STREAMLIT: dict[str, Any] = {
    "theme.light.primaryColor": "#0072b2",
    "theme.light.backgroundColor": "#ffffff",
    "theme.light.secondaryBackgroundColor": "#f3f5f7",
    "theme.light.textColor": "#16191d",
    "theme.light.borderColor": "#d5d9de",
    "theme.light.redColor": SEVERITY[Severity.CRITICAL].light,
    "theme.light.orangeColor": SEVERITY[Severity.WARNING].light,
    "theme.light.greenColor": "#00795a",
    "theme.light.blueColor": "#0072b2",
    "theme.light.codeTextColor": "#16191d",
    "theme.dark.primaryColor": "#56b4e9",
    "theme.dark.backgroundColor": "#101317",
    "theme.dark.secondaryBackgroundColor": "#1a1f25",
    "theme.dark.textColor": "#e8ebef",
    "theme.dark.borderColor": "#333a43",
    "theme.dark.redColor": SEVERITY[Severity.CRITICAL].dark,
    "theme.dark.orangeColor": SEVERITY[Severity.WARNING].dark,
    "theme.dark.greenColor": "#1fc296",
    "theme.dark.blueColor": "#56b4e9",
    "theme.dark.codeTextColor": "#e8ebef",
    "theme.baseRadius": "4px",
    "theme.baseFontSize": 14,
}


def css() -> dict[str, dict[str, str]]:
    """The names by which Streamlit's components know the colours above, for a component that is there before it."""
    names = {"text": "textColor", "background": "backgroundColor", "border": "borderColor"}
    return {
        shade: {f"--st-{word}-color": STREAMLIT[f"theme.{shade}.{key}"] for word, key in names.items()}
        | {"--st-font": '"Source Sans", sans-serif'}
        for shade in ("light", "dark")
    }


@dataclass(frozen=True, slots=True)
class Stroke:
    """A GPU's line in the charts, by its slot."""

    light: str
    dark: str
    dashed: bool


def line(slot: int) -> Stroke:
    return Stroke(LINES_LIGHT[slot % 8], LINES_DARK[slot % 8], slot // 4 % 2 == 1)


def palette() -> dict[str, Any]:
    """The colours for the browser components, by state and page theme."""
    return {
        "health": {
            str(state): {"label": look.label, "sign": look.sign, "light": look.light, "dark": look.dark}
            for state, look in HEALTH.items()
        }
    }


def health_of(word: str) -> Health:
    """A health from the wire. A word of a newer collector is unknown, never healthy."""
    try:
        return Health(word)
    except ValueError:
        return Health.UNKNOWN
