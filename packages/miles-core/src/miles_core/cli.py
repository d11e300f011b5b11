"""The `miles` command. Nothing heavy is imported before the words are parsed: `miles --help` takes a few hundredths
of a second, which argparse allows and the usual command-line libraries do not.

Exit status: 0 done, 1 the run or a check failed, 2 the configuration or the command line is wrong, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

DONE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130

_OVERVIEW = """\
examples:
  miles quickstart                                    the whole loop on this machine, then the report
  miles rl @ my.toml --rollout.group-size 16          a file, and one key of it changed
  miles rl @ smollm2 @ my.toml --dry-run              a shipped recipe, a file over it; show the plan, start nothing
  miles config --docs                                 every key, its type, default and meaning

`@ FILE` reads a TOML file or a shipped recipe, `--dotted.key value` sets one key. Later words win, keys over files.
"""
_SETTINGS = """\
settings:
  @ FILE                a TOML file, or the name of a shipped recipe; repeat it to lay files over one another
  --dotted.key VALUE    set one key, e.g. --train.optimizer.lr 1e-5; `miles config --docs` lists them all
"""

_QUICKSTART = "watch a tiny model learn to use a tool, in minutes and without a GPU"

Handler = Callable[[argparse.Namespace, list[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = _parser()
    options, words = parser.parse_known_args(sys.argv[1:] if argv is None else list(argv))
    if options.handler is None:
        parser.print_help()
        return WRONG
    if words and not options.takes_settings:
        parser.error(f"`miles {options.command}` does not know: {' '.join(words)}")
    try:
        return _guarded(options.handler, options, words)
    except KeyboardInterrupt:
        return INTERRUPTED


def _guarded(handler: Handler, options: argparse.Namespace, words: list[str]) -> int:
    """Errors that Miles raises on purpose are told without a traceback."""
    from miles_tito.errors import MilesError

    try:
        return handler(options, words)
    except MilesError as error:
        from .config.problems import ConfigError

        print(str(error), file=sys.stderr)
        return WRONG if isinstance(error, ConfigError) else FAILED


def _start(kind: Literal["rl", "sft"], *recipe: str) -> Handler:
    """The handler that starts a run, or shows its plan."""

    def handler(options: argparse.Namespace, words: list[str]) -> int:
        from .config import load_config, to_dict
        from .config.plugins import check_plugins

        loaded = load_config([*recipe, *words], kind=kind)
        config = loaded.config
        for warning in loaded.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        sys.path[:0] = loaded.import_paths
        check_plugins(config, kind, sources=loaded.sources)
        if options.dry_run:
            from .run.dry_run import make_plan

            print(make_plan(config, kind))
            return DONE
        from .durable import rundir
        from .run.command import main as run_main

        paths = loaded.import_paths
        run_dir = rundir.create(
            Path(config.run.dir), config.run.name, config=to_dict(config), kind=kind, import_paths=paths
        )
        return run_main(config, kind, run_dir)

    return handler


def _resume(options: argparse.Namespace, words: list[str]) -> int:
    from .run.resume import resume

    accepted = options.accept_changes
    return resume(Path(options.run), words, steps=options.steps, more=options.more, accept_changes=accepted)


def _doctor(options: argparse.Namespace, words: list[str]) -> int:
    from .doctor import diagnose, to_json, to_text

    findings = diagnose(words, model=options.model)
    print(to_json(findings) if options.json else to_text(findings))
    return FAILED if any(finding.level == "fail" for finding in findings) else DONE


def _config(options: argparse.Namespace, words: list[str]) -> int:
    from .config import load_config, reference, to_toml

    if options.docs:
        print(reference(), end="")
        return DONE
    loaded = load_config(words)
    print(to_toml(loaded.config, sources=loaded.sources, explain=options.explain), end="")
    return DONE


def _report(options: argparse.Namespace, words: list[str]) -> int:
    from . import report

    out = Path(options.out) if options.out else None
    if len(options.runs) == 1:
        print(report.write(Path(options.runs[0]), out=out))
        return DONE
    page, text = report.write_comparison([Path(run) for run in options.runs], out=out)
    print(f"{text}\n\n{page}")
    return DONE


def _why(options: argparse.Namespace, words: list[str]) -> int:
    from .durable import ledger

    print(ledger.why(Path(options.run) / ledger.LEDGER, options.id))
    return DONE


def _ledger(options: argparse.Namespace, words: list[str]) -> int:
    import json

    from .durable import ledger

    path = Path(options.run) / ledger.LEDGER
    if options.sql is not None:
        columns, rows = ledger.query(path, options.sql)
        print(ledger.to_json(columns, rows) if options.json else ledger.table(columns, rows))
        return DONE
    found = ledger.overview(path)
    print(json.dumps(found, indent=2) if options.json else ledger.to_text(found))
    return FAILED if found["problems"] else DONE


def _chaos(options: argparse.Namespace, words: list[str]) -> int:
    print("`miles chaos` is `make chaos SEEDS=200` in a checkout of Miles: it is part of the tests.", file=sys.stderr)
    return WRONG


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Room for the longest command name before its help."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=110)


class _Version(argparse.Action):
    """Reads the version only when asked for: importlib.metadata is slow to import."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        parser.exit(message=f"miles {version('miles-core')}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="miles",
        usage="miles COMMAND [...]",
        description="Reinforcement-learning post-training for language models.",
        epilog=_OVERVIEW,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    parser.set_defaults(handler=None)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND [...]", dest="command")

    def add(name: str, handler: Handler, text: str, *, takes_settings: bool = True) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=_SETTINGS if takes_settings else None,
            formatter_class=_Formatter,
            allow_abbrev=False,
            usage=f"miles {name} [options] [@ FILE] [--dotted.key VALUE] ..." if takes_settings else None,
        )
        command.set_defaults(handler=handler, takes_settings=takes_settings)
        return command

    _add_runs(add)
    _add_readers(add)
    return parser


def _add_runs(add: Callable[..., argparse.ArgumentParser]) -> None:
    """What starts a run, or looks at its configuration before."""
    dry = "resolve and check the configuration, print processes and memory, start nothing"
    for name, handler, text in (
        ("rl", _start("rl"), "train with reinforcement learning"),
        ("sft", _start("sft"), "train on given conversations"),
        ("quickstart", _start("rl", "@", "quickstart"), _QUICKSTART),
    ):
        add(name, handler, text).add_argument("--dry-run", action="store_true", help=dry)
    resume = add("resume", _resume, "go on with a run that stopped, killed or finished", takes_settings=True)
    resume.usage = "miles resume RUN [--steps N | --more N] [@ FILE] [--dotted.key VALUE] ..."
    resume.add_argument("run", metavar="RUN", help="directory of the run, e.g. runs/quickstart")
    resume.add_argument("--steps", type=int, metavar="N", help="train up to step N in all")
    resume.add_argument("--more", type=int, metavar="N", help="train N steps beyond the newest committed one")
    resume.add_argument(
        "--accept-changes", action="store_true", help="go on although model, data or what is learned has changed"
    )
    doctor = add("doctor", _doctor, "find what would keep a run from working, and say the fix")
    doctor.add_argument("--model", metavar="DIR", help="check this model's chat template too")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    config = add("config", _config, "print the resolved configuration as TOML")
    config.add_argument("--explain", action="store_true", help="write each key's meaning over it")
    config.add_argument("--docs", action="store_true", help="print a reference of every key instead")


def _add_readers(add: Callable[..., argparse.ArgumentParser]) -> None:
    """What reads the directory of a run."""
    report = add(
        "report", _report, "write the report of a run, finished or not, or compare several", takes_settings=False
    )
    report.usage = "miles report RUN [RUN ...] [--out FILE]"
    report.add_argument("runs", metavar="RUN", nargs="+", help="directory of a run; several are compared to the first")
    report.add_argument(
        "--out", metavar="FILE", help="the page; by default report.html in the run, compare.html beside the first one"
    )
    why = add("why", _why, "tell what became of a prompt, a group, an episode or a sample", takes_settings=False)
    ledger = add(
        "ledger", _ledger, "show what became of everything a run issued, and whether it adds up", takes_settings=False
    )
    for command in (why, ledger):
        command.add_argument("run", metavar="RUN", help="directory of the run, e.g. runs/quickstart")
    why.add_argument("id", metavar="ID", help="of a prompt, group, episode or sample; its beginning is enough")
    ledger.add_argument("--sql", metavar="SELECT", help="a query of yours over the ledger's tables, instead")
    ledger.add_argument("--json", action="store_true", help="print JSON")
    add("chaos", _chaos, "moved: `make chaos`, in a checkout of Miles")
