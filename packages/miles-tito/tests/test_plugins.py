"""Import strings: what is wrong with one is said, what is wrong inside the user's code passes through."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from miles_tito.shared.plugins import ImportStringError, call, load


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the user's on the import path."""
    known = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_rewards.py").write_text("class Strict:\n    @staticmethod\n    def exact(): return 'exact'\n")
    (tmp_path / "broken.py").write_text("import my_rewards\nimport a_module_that_is_missing\n")
    (tmp_path / "raises.py").write_text("raise RuntimeError('no GPU here')\n")
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "grading.py").write_text(
        "def build(size, *, colour='red'):\n    if size < 0: raise TypeError('inside')\n    return size, colour\n"
    )
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


def test_a_dotted_attribute_is_found() -> None:
    assert load("os:path.join", what="x") is __import__("os").path.join


@pytest.mark.parametrize("target", ["", "os", "os:", ":join", ".relative:thing", "my_rewards.Strict"])
def test_a_malformed_string_shows_the_form(target: str) -> None:
    with pytest.raises(ImportStringError, match=r"`env.target` is .* write it as \"package.module:attribute\""):
        load(target, what="env.target")


def test_a_missing_module_names_its_neighbours(user_code: Path) -> None:
    with pytest.raises(
        ImportStringError, match=r"no module 'my_reward'\. Did you mean my_rewards.* beside the config file"
    ):
        load("my_reward:Strict", what="env.target")
    with pytest.raises(ImportStringError, match=r"no module 'my_package.gradin'\. Did you mean my_package.grading"):
        load("my_package.gradin:build", what="env.target")
    with pytest.raises(ImportStringError, match="no module 'my_pakage'"):
        load("my_pakage.grading:build", what="env.target")


def test_a_missing_attribute_names_the_nearest(user_code: Path) -> None:
    with pytest.raises(ImportStringError, match=r"my_rewards has no 'Strikt'\. Did you mean Strict\?"):
        load("my_rewards:Strikt", what="env.target")
    with pytest.raises(ImportStringError, match=r"my_rewards has no 'exakt'\. Did you mean exact\?"):
        load("my_rewards:Strict.exakt", what="env.target")


def test_an_error_inside_the_module_is_not_hidden(user_code: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        load("broken:anything", what="env.target")
    with pytest.raises(RuntimeError, match="no GPU here"):
        load("raises:anything", what="env.target")


def test_arguments_that_do_not_fit_are_told_with_the_signature(user_code: Path) -> None:
    assert call("my_package.grading:build", 3, keywords={"colour": "blue"}, what="env.target") == (3, "blue")
    with pytest.raises(
        ImportStringError, match=r"takes \(size, \*, colour='red'\).*unexpected keyword argument 'color'"
    ):
        call("my_package.grading:build", 3, keywords={"color": "blue"}, what="env.target")
    with pytest.raises(ImportStringError, match="missing a required argument: 'size'"):
        call("my_package.grading:build", keywords={}, what="env.target")
    with pytest.raises(
        ImportStringError, match=r"required argument: 'size'\. It has no argument 'colur'\. Did you mean colour\?"
    ):
        call("my_package.grading:build", keywords={"colur": "blue"}, what="env.target")
    with pytest.raises(ImportStringError, match="a str that cannot be called"):
        call("os:sep", keywords={}, what="env.target")


def test_a_type_error_inside_the_callable_is_the_users_own(user_code: Path) -> None:
    with pytest.raises(TypeError, match=r"^inside$"):
        call("my_package.grading:build", -1, keywords={}, what="env.target")


def test_a_builtin_without_a_signature_is_called(user_code: Path) -> None:
    assert call("builtins:dict", keywords={"a": 1}, what="env.target") == {"a": 1}
