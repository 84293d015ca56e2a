"""Suggestions: parts of error messages: the nearest known name for an unknown one, and the value that was found."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping


def did_you_mean(name: str, known: Iterable[str], synonyms: Mapping[str, str] | None = None) -> str:
    """The end of an error message about an unknown name: a suggestion, or "" if no known name is similar.

    ``synonyms`` maps names from other libraries to names in ``known``. They are preferred to similar names.

        >>> did_you_mean("gama", ["gamma", "tau"])
        "; did you mean 'gamma'?"
        >>> did_you_mean("n_steps", ["num_steps", "tau"], {"n_steps": "num_steps"})
        "; did you mean 'num_steps'?"
        >>> did_you_mean("colour", ["gamma", "tau"])
        ''
    """
    names = list(known)
    suggestion = (synonyms or {}).get(name)
    if suggestion not in names:
        by_lower_case = {known_name.lower(): known_name for known_name in names}
        matches = difflib.get_close_matches(name.lower(), by_lower_case, n=1, cutoff=0.6)
        suggestion = by_lower_case[matches[0]] if matches else None
    return f"; did you mean {suggestion!r}?" if suggestion is not None else ""


def describe_unknown(what: str, unknown: Iterable[str], known: Iterable[str], hint: Callable[[str], str]) -> str:
    """The error message for names that are not known: each with its ``hint``, then all known names.

    ``what`` is the kind of name in the plural. ``hint(name)`` is a suggestion such as that of ``did_you_mean``, or "".

        >>> known = ["gamma", "tau"]
        >>> describe_unknown("rl_cfg keys", ["gama", "colour"], known, lambda name: did_you_mean(name, known))
        "unknown rl_cfg keys: 'colour', 'gama' (did you mean 'gamma'?); known are gamma, tau"
    """
    hints = {name: hint(name).removeprefix("; ") for name in sorted(unknown)}
    names = [f"{name!r} ({hints[name]})" if hints[name] else repr(name) for name in hints]
    return f"unknown {what}: {', '.join(names)}; known are {', '.join(sorted(known))}"


def excerpt(value: object) -> str:
    """The representation of a value, shortened to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
