"""Verdicts: stable codes, each with a reason and a remedy in words."""

from __future__ import annotations

import dataclasses
import re
import string

import pytest

from tide_strategies.detect import FALLBACKS, OK, Verdict, fallback

#: Codes are never reused or renamed: they are in logs, in scripts and on the page. New ones are added here.
PUBLISHED = {
    *("TIDE-F001", "TIDE-F002", "TIDE-F003", "TIDE-F004", "TIDE-F005", "TIDE-F006", "TIDE-F007", "TIDE-F008"),
    *("TIDE-F009", "TIDE-F010", "TIDE-F011", "TIDE-F012", "TIDE-F013", "TIDE-F014", "TIDE-F015", "TIDE-F016"),
    *("TIDE-F017", "TIDE-F018"),
    *("TIDE-F020", "TIDE-F021", "TIDE-F022", "TIDE-F023", "TIDE-F024", "TIDE-F025", "TIDE-F026"),
    *("TIDE-F027", "TIDE-F028", "TIDE-F029"),
    *("TIDE-F030", "TIDE-F031", "TIDE-F032"),
    *("TIDE-F101", "TIDE-F102", "TIDE-F103"),
}


def details(code: str) -> int:
    """How many details the reason of a code takes."""
    return sum(field is not None for _, field, _, _ in string.Formatter().parse(FALLBACKS[code][0]))


def test_published_codes_stay() -> None:
    assert FALLBACKS.keys() == PUBLISHED
    assert all(re.fullmatch(r"TIDE-F\d{3}", code) for code in FALLBACKS)
    assert OK not in FALLBACKS


@pytest.mark.parametrize("code", sorted(FALLBACKS))
def test_every_code_makes_a_sentence_with_its_details(code: str) -> None:
    words = [f"detail-{i}" for i in range(details(code))]
    verdict = fallback(code, *words)
    assert verdict.code == code
    assert not verdict.ok
    assert all(w in verdict.reason for w in words)
    assert "{" not in verdict.reason
    assert len(verdict.reason.split()) >= 3
    assert verdict.remedy
    assert "{" not in verdict.remedy, "a remedy takes no details"
    assert verdict.reason == verdict.reason.strip()
    assert not verdict.reason.endswith(".")
    assert not verdict.remedy.endswith(".")
    assert str(verdict) == f"{code} {verdict.reason}: stock collectives are used; {verdict.remedy}"


def test_details_may_hold_braces() -> None:
    assert "{0} {}" in fallback("TIDE-F020", "{0} {}").reason


def test_missing_details_and_unknown_codes_are_faults_of_the_program() -> None:
    with pytest.raises(IndexError):
        fallback("TIDE-F003", "one of two")
    with pytest.raises(KeyError):
        fallback("TIDE-F999")


def test_the_verdict_of_an_eligible_group() -> None:
    verdict = Verdict()
    assert verdict.ok
    assert (verdict.code, verdict.remedy, str(verdict)) == (OK, "", OK)
    with pytest.raises(dataclasses.FrozenInstanceError):
        verdict.code = "TIDE-F001"  # type: ignore[misc]
