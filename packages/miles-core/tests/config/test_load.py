from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from miles_core.config import Config, ConfigError, load_config, to_dict, to_toml
from miles_core.config.keys import NAME, leaves
from miles_core.config.layers import find_file, parse_value, recipe_names

MINIMAL = ["--model.path", "m", "--env.target", "task:make"]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """`write(name, text)` in the directory that the test runs in."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return name

    return write


def problems_of(*words: str, kind="rl") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(words, kind=kind)
    return [str(problem) for problem in caught.value.problems]


def test_later_files_win_over_earlier_ones_and_flags_over_files(write):
    base = write("base.toml", '[model]\npath = "m"\n[env]\ntarget = "t:t"\n[rollout]\ngroup_size = 4\nretries = 3')
    mine = write("mine.toml", "[rollout]\ngroup_size = 6\nmax_staleness = 2\n[rollout.sampling]\ntop_p = 0.9")
    loaded = load_config(
        ["@", base, f"@{mine}", "--rollout.sampling.top-p=0.5", "--rollout.max-staleness", "0"], kind="rl"
    )
    rollout = loaded.config.rollout
    assert (rollout.group_size, rollout.retries, rollout.max_staleness, rollout.sampling.top_p) == (6, 3, 0, 0.5)
    assert loaded.sources["rollout", "group_size"] == "mine.toml"
    assert loaded.sources["rollout", "retries"] == "base.toml"
    assert loaded.sources["rollout", "max_staleness"] == "--rollout.max-staleness"
    assert [file.name for file in loaded.files] == ["base.toml", "mine.toml"]


def test_every_problem_is_told_at_once_with_its_place_and_what_to_do(write):
    bad = write(
        "b.toml",
        """
        [run]
        nmae = "x"
        [rollout]
        temperature = 1.0
        max_staleness = -1
        [rollout.sampling]
        top_p = 2.0
        [train]
        ranks = "two"
        [train.loss]
        normalization = "tokens"
        clip_low = 3.0
        [train.optimizer]
        betas = [0.9]
        lr = -1.0
        [engines.big]
        tpp = 2
        [moniter]
        console = "rich"
        """,
    )
    told = problems_of("@", bad, "--rollout.group-size", "--eval.sampling.temperature", "hot", "stray")
    assert told == [
        "stray is no setting. Write `@ FILE` for a file, `--key value` for a key.",
        "--rollout.group-size needs a value.",
        "b.toml: run.nmae is no key. Did you mean run.name?",
        "b.toml: rollout.sampling.top_p is 2.0; it must lie in (0, 1].",
        "b.toml: rollout.temperature is no key. Did you mean rollout.sampling.temperature or "
        "eval.sampling.temperature?",
        "b.toml: engines.big.tpp is no key. Did you mean engines.big.tp?",
        'b.toml: train.ranks is "two"; it must be: whole number.',
        "b.toml: train.optimizer.betas is [0.9]; it must be: list of 2: number, number.",
        "b.toml: train.loss.normalization is 'tokens'; it must be one of episode, token, dr_grpo. Did you mean token?",
        '--eval.sampling.temperature is "hot"; it must be: number.',
        "b.toml: moniter is no key. Did you mean monitor?",
        "b.toml: rollout.max_staleness is -1; it must be at least 0.",
        "b.toml: train.optimizer.lr is -1.0; it must be 0 or more.",
        "b.toml: train.loss.clip_low is 3.0; it must be between 0 and 1.",
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--train.ranks", "true"], "--train.ranks is true; it must be: whole number."),
        (["--train.ranks", "1.5"], "--train.ranks is 1.5; it must be: whole number."),
        (["--eval.at-start", "1"], "--eval.at-start is 1; it must be: true or false."),
        (["--rollout.sampling.stop", "x"], '--rollout.sampling.stop is "x"; it must be: list of text.'),
        (["--rollout", "5"], "--rollout is 5; it must be: a table."),
        (["--env.args", "5"], "--env.args is 5; it must be: table."),
        (["--nothing.like.it", "5"], "--nothing.like.it"),
    ],
)
def test_a_wrong_type_is_told_with_the_right_one(words, told):
    assert any(problem.startswith(told) for problem in problems_of(*MINIMAL, *words))


def test_a_value_is_read_as_the_type_of_its_key():
    config = load_config(
        [
            *MINIMAL,
            *("--run.name", "12", "--eval.at-start=false", "--monitor.tensorboard", "--train.optimizer.lr", "1e-4"),
            *("--train.optimizer.max-grad-norm", "none", "--rollout.sampling.stop", '["a", "b"]', "--run.seed", "-3"),
            *("--env.args.n", "3", "--env.args.name", "foo", "--env.args.nested.flag", "true"),
            *("--engines.my-engine.options.mem-fraction-static", "0.8", "--engines.my-engine.options.x", "true"),
        ]
    ).config
    assert config.run.name == "12"
    assert config.run.seed == -3
    assert config.eval.at_start is False
    assert config.monitor.tensorboard is True
    assert (config.train.optimizer.lr, config.train.optimizer.max_grad_norm) == (1e-4, None)
    assert config.rollout.sampling.stop == ("a", "b")
    assert config.env.args == {"n": 3, "name": "foo", "nested": {"flag": True}}
    assert config.engines["my-engine"].options == {"mem-fraction-static": 0.8, "x": True}


def test_none_in_a_file_unsets_what_an_earlier_file_set(write):
    base = write("base.toml", '[eval]\nnum_prompts = 5\n[model]\npath = "m"')
    mine = write("mine.toml", '[eval]\nnum_prompts = "none"\n[model]\npath = "none"\nbuilder = "b:b"')
    config = load_config(["@", base, "@", mine]).config
    assert config.eval.num_prompts is None
    assert config.model.path is None


def test_engines_of_a_file_replace_the_default_one():
    config = load_config(["--engines.big.tp", "2"]).config
    assert list(config.engines) == ["big"]
    assert list(load_config([]).config.engines) == ["rollout"]


def test_a_file_that_is_not_toml_is_named_with_the_line_and_other_problems_are_told_too(write):
    broken = write("broken.toml", "[run]\nname = \n")
    told = problems_of("@", broken, "--run.stesp", "5")
    assert told[0].startswith("broken.toml is not TOML: Invalid value (at line 2")
    assert told[1:] == ["--run.stesp is no key. Did you mean run.steps?"]


def test_a_missing_file_names_the_recipes():
    (told,) = problems_of("@", "absent.toml", kind=None)
    assert told.startswith("absent.toml is neither a file nor a recipe.")


def test_every_shipped_recipe_loads_by_its_name():
    for name in recipe_names():
        assert find_file(name) is not None
        load_config(["@", name], kind="rl")


def test_a_bare_name_is_the_recipe_and_a_suffix_makes_it_a_file(write):
    write("quickstart", "")
    write("quickstart.toml", "")
    assert find_file("quickstart").parent.name == "recipes"
    assert find_file("quickstart.toml").read_text() == ""
    assert find_file("./quickstart").read_text() == ""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model.max-context", "256", "--rollout.sampling.max-tokens", "256"], "no token is left for the prompt"),
        (["--model.max-context", "9000"], "train.token_budget is 8192 but model.max_context is 9000"),
        (["--rollout.sampling.temperature", "0"], "the 8 siblings of a group would be alike"),
        (["--train.loss.kind", "sft"], "which ignores rewards"),
        (["--train.minibatches", "200"], "is 200 but a batch has 128 episodes (16 groups of 8)"),
        (["--train.ranks", "200"], "train.ranks is 200 but a batch has only 128 episodes"),
        (["--sync.way", "store", "--sync.store", "/x"], 'sync.way is "store", but no engine of a run has a follower'),
        (["--engines.e.role", "teacher"], 'no table with role = "rollout"'),
        (["--eval.mode", "dedicated"], 'eval.mode is "dedicated" but no table [engines.NAME] has role = "eval"'),
        (["--engines.judge.role", "eval"], 'engines.judge.role is "eval" but eval.mode is "shared"'),
        (
            ["--eval.datasets.a.samples-per-prompt", "0"],
            "eval.datasets.a.samples-per-prompt is 0; it must be at least 1",
        ),
        (["--eval.datasets.a.split", "t", "--eval.num-prompts", "4"], "eval.num-prompts is 4 beside 1 tables"),
        (["--eval.mode", "external"], "eval.mode is 'external' but `external` is not set"),
        (["--engines.e.role", "teacher"], 'engines.e.role is "teacher"; `miles rl` starts engines with role'),
        (["--engines.a.tp", "1", "--engines.b.tp", "1"], "engines.b is a second table"),
        (["--sft.steps", "5"], "sft.data is not set but sft.steps is 5"),
        (["--model.builder", "b:b"], "set one of them"),
        (["--model.builder-args.x", "1"], "there is no `builder` to take them"),
        (["--ray.address", "auto", "--ray.num-cpus", "2"], "Remove one of them"),
        (["--run.name", "a/b"], "it names a directory"),
    ],
)
def test_sections_that_do_not_fit_together_are_told_with_the_numbers(words, told):
    assert any(told in problem for problem in problems_of(*MINIMAL, *words))


def test_what_a_command_needs_is_asked_for():
    assert problems_of(kind="rl") == [
        "model.path is not set. Set it to a Hugging Face folder, or model.builder to an import string.",
        "env.target is not set. Set it to `module:function` that returns an environment.",
    ]
    assert [told.split(" is ")[0] for told in problems_of(kind="sft")] == ["model.path", "sft.steps", "sft.data"]


def test_a_key_that_is_wrong_is_not_told_to_be_missing_too():
    assert problems_of("--model.path", "5 5", "--env.target", "t:t", "--env.target.x", "3") == [
        '--env.target.x: env.target is {"x": 3}; it must be: text | "none".'
    ]


def test_a_tracker_that_is_not_installed_is_told_before_anything_starts(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (told,) = problems_of(*MINIMAL, "--monitor.trackio.enabled")
    assert told == (
        "--monitor.trackio.enabled: monitor.trackio is on but trackio is not installed: "
        "pip install 'miles-core[trackio]'."
    )


def test_settings_of_a_file_that_this_command_does_not_read_warn(write):
    both = write("both.toml", "[rollout]\nretries = 2\n[train.loss]\nclip_low = 0.1\n[sft]\nbatch_size = 8")
    sft = load_config(
        ["@", both, "--model.path", "m", "--sft.steps", "1", "--sft.data", "d:d", "--run.name", "x"], kind="sft"
    )
    assert sft.warnings == (
        "rollout: no effect, `miles sft` starts no engines and runs no environments.",
        "train.loss: no effect, `miles sft` has its own loss, and sft.steps, sft.optimizer and sft.schedule.",
    )
    rl = load_config([*MINIMAL, "@", both, "--eval.at-start=false", "--eval.at-end=false"], kind="rl")
    assert rl.warnings == (
        "eval is off: nothing will tell learning from overfitting.",
        "sft.batch_size: no effect, sft.steps is 0.",
    )


def test_how_servers_are_started_has_no_effect_on_those_that_run_already(write):
    file = write("engines.toml", '[engines.far]\nurls = ["http://host:1"]\nthreads = 1\n[engines.here]\nrole = "eval"')
    assert load_config(["@", file]).warnings == ("engines.far.threads: no effect, the servers of `urls` run already.",)
    told = problems_of("@", file, "--engines.far.context-length", "9", "--engines.here.threads", "2", kind=None)
    assert told == ["--engines.far.context-length has no effect: the servers of `urls` run already."]


def test_flags_that_this_command_does_not_read_are_refused():
    sft = ("--model.path", "m", "--sft.steps", "1", "--sft.data", "d:d")
    assert problems_of(*sft, "--rollout.retries", "2", "--train.optimizer.lr=1e-5", kind="sft") == [
        "--rollout.retries has no effect: `miles sft` starts no engines and runs no environments.",
        "--train.optimizer.lr has no effect: `miles sft` has its own loss, and sft.steps, sft.optimizer and "
        "sft.schedule.",
    ]
    assert problems_of(*MINIMAL, "--sft.batch-size", "8") == ["--sft.batch-size has no effect: sft.steps is 0."]


def test_modules_are_looked_for_beside_the_files_then_here(write, tmp_path):
    (tmp_path / "task").mkdir()
    inner = write("task/t.toml", "")
    assert load_config(["@", inner]).import_paths == (str(tmp_path / "task"), str(tmp_path))


@given(st.text(max_size=20))
def test_any_text_becomes_a_value_or_stays_text(text):
    assert parse_value(text, str) == text
    parse_value(text, int | None)


def test_words_are_laid_over_the_configuration_that_a_run_kept() -> None:
    first = load_config([*MINIMAL, "--rollout.group-size", "4", "--run.steps", "7"], kind="rl")
    stored = json.loads(json.dumps(to_dict(first.config)))
    assert load_config([], kind="rl", stored=stored).config == first.config
    again = load_config(["--run.steps", "9", "--train.optimizer.lr", "1e-4"], kind="rl", stored=stored)
    assert (again.config.run.steps, again.config.train.optimizer.lr) == (9, 1e-4)
    assert again.config.rollout == first.config.rollout
    assert again.warnings == first.warnings, "what a run kept in full was not all given"
    with pytest.raises(ConfigError, match=r"run\.steps.*must be at least 1"):
        load_config(["--run.steps", "0"], kind="rl", stored=stored)


def test_datasets_of_the_evaluation_are_tables_with_names_of_the_users_choice(write):
    words = [*MINIMAL, "--eval.datasets.gsm8k.split", "test", "--eval.datasets.gsm8k.sampling.temperature", "0"]
    config = load_config(words, kind="rl").config
    assert config.eval.all_datasets["gsm8k"].split == "test"
    assert config.eval.all_datasets["gsm8k"].sampling.temperature == 0


def test_engines_of_the_evaluation_go_with_its_mode():
    words = [*MINIMAL, "--eval.mode", "dedicated", "--engines.rollout.count", "1", "--engines.judge.role", "eval"]
    assert load_config(words, kind="rl").config.engines["judge"].role == "eval"
    (told,) = problems_of(*MINIMAL, "--eval.overlap", "skip")
    assert told.startswith('--eval.overlap is "skip" but eval.mode is "shared": training waits for each evaluation')
    kept = json.loads(json.dumps(to_dict(load_config(MINIMAL).config)))
    kept["eval"]["overlap"] = "skip"  # a run that was started when that was allowed
    assert load_config([], kind="rl", stored=kept).config.eval.overlap == "skip"


def test_every_key_of_the_resolved_configuration_may_be_given(write):
    text = to_toml(load_config(MINIMAL, kind="rl").config)
    assert load_config(["@", write("resolved.toml", text)], kind="rl").config == load_config(MINIMAL).config


def test_a_key_that_no_table_has_is_refused_in_every_table():
    for key in leaves(Config):
        if NAME in key.path or len(key.path) < 2:
            continue
        flag = "--" + ".".join((*key.path[:-1], "zzz"))
        assert any(problem.startswith(f"{flag} is no key.") for problem in problems_of(flag, "1", kind=None)), flag
    assert problems_of("--engines.x.zzz", "1", "--eval.datasets.x.zzz", "1", kind=None)[0].startswith(
        "--engines.x.zzz is no"
    )
