"""The command line: `python -m benchmarks --help`."""

import argparse
import dataclasses
import datetime as dt
import shlex
import sys
import warnings
from pathlib import Path

from benchmarks._compare import compare, comparison_table, exit_status, machines_differ
from benchmarks._report import Report, load_report, make_report
from benchmarks._settings import Plan
from benchmarks._tables import figure_table
from benchmarks.suites import all_suites

_DEFAULT_OUTPUT = Path("benchmarks/results")
_SUITES = ("throughput", "breakdown", "host", "compile", "memory", "scaling", "learning")
_EPILOG = """\
other commands:
  python -m benchmarks compare OLD.json NEW.json [--tolerance 0.1]
                        new over old, figure by figure; exit status 1 if one got worse
  python -m benchmarks plot RESULT.json [--output DIR] [--format svg]
                        draws the figures of a file again
"""


def main(arguments: list[str]) -> int:
    """Runs a command and returns its exit status."""
    commands = {"compare": _compare, "plot": _plot}
    if arguments and arguments[0] in commands:
        return commands[arguments[0]](arguments[1:])
    return _run(arguments)


def _run(arguments: list[str]) -> int:
    options = _run_parser().parse_args(arguments)
    plan = Plan(
        repeats=1 if options.quick else options.repeats,
        seconds=0.05 if options.quick else options.seconds,
        envs=tuple(options.envs),
        networks=tuple(options.networks),
        quick=options.quick,
        peers=tuple(options.peers),
        seeds=1 if options.quick else options.seeds,
        total_steps=options.total_steps,
    )
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # the peers give many
    warnings.filterwarnings("ignore", category=FutureWarning)
    suites = all_suites()
    started = dt.datetime.now().astimezone()
    figures, settings = [], {}
    for name in options.suites or suites:
        print(f"{name}:", flush=True)
        found = suites[name](plan)
        print(f"\n{figure_table(found.figures)}\n", flush=True)
        figures += found.figures
        settings |= {setting.name: dataclasses.asdict(setting) for setting in found.settings}
    report = make_report(
        figures,
        plan,
        settings,
        started.isoformat(timespec="seconds"),
        shlex.join(["python", "-m", "benchmarks", *arguments]),
    )
    _write(report, options.output, options.name or f"{started:%Y%m%d-%H%M%S}")
    return 0


def _write(report: Report, folder: Path, name: str) -> None:
    path = folder / f"{name}.json"
    report.save(path)
    print(f"written: {path}")
    _draw(report, folder / name, "svg")


def _draw(report: Report, folder: Path, suffix: str) -> None:
    from benchmarks._plots import draw

    try:
        for path in draw(report, folder, suffix):
            print(f"written: {path}")
    except ImportError:
        print('no pictures: matplotlib is missing; `pip install "eqx-ppo[benchmarks]"` brings it')


def _compare(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks compare")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument(
        "--tolerance", type=float, default=0.1, help="change for the worse that is noise (0.1)"
    )
    options = parser.parse_args(arguments)
    old, new = load_report(options.old), load_report(options.new)
    comparisons = compare(old, new, options.tolerance)
    warning = machines_differ(old, new)
    if warning is not None:
        print(f"{warning}\n")
    print(comparison_table(comparisons))
    return exit_status(comparisons)


def _plot(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks plot")
    parser.add_argument("result", type=Path)
    parser.add_argument("--output", type=Path, help="folder (beside the file, of its name)")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    options = parser.parse_args(arguments)
    folder = options.output or options.result.with_suffix("")
    _draw(load_report(options.result), folder, options.format)
    return 0


def _run_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description="Measures this library next to others and to its floors.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan = Plan()
    add = parser.add_argument
    add("suites", nargs="*", metavar="SUITE", help=f"{', '.join(_SUITES)}; all by default")
    add("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    add("--repeats", type=int, default=plan.repeats, help=f"timings of each ({plan.repeats})")
    add("--seconds", type=float, default=plan.seconds, help=f"of a timing ({plan.seconds})")
    add("--envs", nargs="*", default=[], metavar="ENV", help="of Playground; Pendulum, Recall")
    add("--networks", nargs="*", default=[], choices=("mlp", "lstm"), help="kinds of network")
    add("--peers", nargs="*", default=plan.peers, choices=plan.peers, help="whom to run")
    add("--seeds", type=int, default=plan.seeds, help=f"runs of `learning` ({plan.seeds})")
    add("--total-steps", type=int, default=plan.total_steps, help="of a run of `learning`")
    add("--output", type=Path, default=_DEFAULT_OUTPUT, help=f"folder ({_DEFAULT_OUTPUT})")
    add("--name", help="of the file; the time by default")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
