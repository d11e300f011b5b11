from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from miles_envs.rewards import Grader, extract_boxed, math_equal
from miles_envs.rewards.math import is_equivalent
from scripted_model import question, said

FORMS = [
    (r"\boxed{5}", "5"),
    (r"\fbox{42}", "42"),
    (r"so $\boxed {7}$.", "7"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"\boxed{\text{(A)}}", r"\text{(A)}"),
    (r"\boxed{x^{2^{3}}+\sqrt{y}}", r"x^{2^{3}}+\sqrt{y}"),
    (r"\boxed{5} … \boxed{7}", "7"),
    (r"\boxed{5} … \fbox{8}", "8"),
    (r"\boxed5", "5"),
    (r"\boxed\pi", r"\pi"),
    ("\\boxed{\n 3 }", "3"),
    (r"\boxed{}", ""),
    (r"\boxed{7", None),
    (r"\boxed{5} and then \boxed{7", None),
    (r"\boxed{\}", None),
    (r"\boxedsome{5}", None),
    ("maybe 42", None),
    ("", None),
]


@pytest.mark.parametrize(("text", "content"), FORMS)
def test_the_content_of_the_last_box_is_found(text, content):
    assert extract_boxed(text) == content


balanced = st.recursive(
    st.text("ab1+ ", max_size=4), lambda inner: st.lists(inner, max_size=3).map(lambda x: "{" + "".join(x) + "}")
)


@given(before=st.text("ab{}", max_size=8), content=balanced, after=st.text("ab}", max_size=8))
def test_any_balanced_content_comes_out_whole(before, content, after):
    assert extract_boxed(f"{before}\\boxed{{{content}}}{after}") == content.strip()


@pytest.mark.parametrize(
    ("answer", "label", "reward"),
    [
        (r"Answer: \boxed{5}", "5", 1),
        (r"Answer: \boxed{5}", 5, 1),
        (r"Answer: \boxed{5}", r"\boxed{5}", 1),
        (r"\boxed{0}", 0, 1),
        (r"\boxed{\frac{1}{2}}", "0.5", 1),
        (r"\boxed{1{,}000}", "1000", 1),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1),
        (r"\boxed{\text{Tuesday}}", r"\text{Tuesday}", 1),
        (r"\boxed{5} no, \boxed{7}", "5", 0),
        (r"\boxed{6}", "5", 0),
        ("maybe 42", "42", 0),
        (r"\boxed{42", "42", 0),
        (r"\boxed{}", "42", 0),
        (r"\boxed{]]\frac{{}", "42", 0),
    ],
)
def test_the_boxed_answer_is_compared_as_mathematics(answer, label, reward):
    assert math_equal(question(label=label), said(answer)) == reward


def test_equal_text_needs_no_parser(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    assert is_equivalent(r"\left( 1,\, 2 \right)", "(1,2)")
    with pytest.raises(ImportError, match=r"pip install 'miles-envs\[math\]'"):
        is_equivalent("1/2", "0.5")


def test_grading_from_a_thread_equals_grading_from_the_main_thread():
    cases = [(r"\boxed{\frac{1}{2}}", "0.5"), (r"\boxed{3}", "0.5")]

    async def grade():
        grader = Grader(math_equal)
        try:
            return [
                (await grader.grade(question(label=label), said(answer), sample="x")).reward for answer, label in cases
            ]
        finally:
            await grader.aclose()

    results = []
    thread = threading.Thread(target=lambda: results.append(asyncio.run(grade())))
    thread.start()
    thread.join(timeout=100)
    assert results == [asyncio.run(grade())] == [[1.0, 0.0]]
    inside: list[float] = []
    thread = threading.Thread(target=lambda: inside.append(math_equal(question(label="0.5"), said(cases[0][0]))))
    thread.start()
    thread.join(timeout=100)
    assert inside == [1.0]
