"""``python -m cattn``: a walk through causal attention, and commands on files: ``attend``, ``view`` and others.

Exit codes: 0 done, 1 a failure while running (disk, memory) or, of ``conform``, a law that does not hold, 2 bad
arguments or input files, 130 interrupted.
"""

import argparse
import contextlib
import errno
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import cattn
from cattn._cli import attend, conform, info, walk, weights
from cattn._cli.files import STDOUT, InputError, mark_pipes, number_pipes
from cattn._cli.messages import finish, tell
from cattn.nn._files import errors_name

COMMANDS = {
    "example": walk.EXAMPLE,
    "attend": attend.COMMAND,
    "view": weights.VIEW,
    "statistics": weights.STATISTICS,
    "plot": weights.PLOT,
    "conform": conform.CONFORM,
}


# What argparse takes for the value of an option although it begins with a minus: a number, or several with commas.
_NEGATIVE = re.compile(r"-(\.?\d.*|inf(inity)?|nan)", re.IGNORECASE)


class _Parser(argparse.ArgumentParser):
    """A parser whose options take negative numbers in every spelling that float and int read; so do subparsers."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._negative_number_matcher = _NEGATIVE

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += _question([str(value)], map(str, action.choices or ()))
            raise

    def _match_argument(self, action: argparse.Action, pattern: str) -> int:
        try:
            return super()._match_argument(action, pattern)
        except argparse.ArgumentError as error:
            if action.dest == "window":
                error.message += f", {action.help}: as in --window 3 0"
            raise


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands, which shtab makes completions from."""
    parser = _Parser(
        prog="cattn",
        description="Causal attention for NumPy arrays. Without a command: a walk through it on a six-token sentence.",
    )
    parser.add_argument("--version", action="version", version=f"cattn {cattn.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, command in COMMANDS.items():
        form = argparse.RawDescriptionHelpFormatter
        command.add_arguments(
            commands.add_parser(name, help=command.help, description=command.description, formatter_class=form)
        )
    commands.add_parser("info", help="system, versions, kernels, threads: quote them in bug reports")
    return parser


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Input files may stand on both sides of an option, which argparse alone does not allow."""
    parser = make_parser()
    options, rest = parser.parse_known_args(mark_pipes(arguments))
    if options.command == "attend":
        options.inputs += [argument for argument in rest if argument == "-" or not argument.startswith("-")]
        rest = [argument for argument in rest if argument not in options.inputs]
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}{_close(rest, parser, options.command)}")
    number_pipes(options, COMMANDS[options.command].inputs if options.command in COMMANDS else ())
    return options


def _close(rest: Sequence[str], parser: argparse.ArgumentParser, command: str | None) -> str:
    """Return the options that misspelt ones look like, as a question, or ""."""
    used = parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and command is not None:
            used = action.choices[command]
    known = [option for action in used._actions for option in action.option_strings]
    return _question([word.partition("=")[0] for word in rest], known)


def _question(words: Sequence[str], known: Iterable[str]) -> str:
    """Return the known words that these look like, as a question, or ""."""
    import difflib  # imported here, because only errors need it

    names = list(known)
    found = [near for word in words for near in difflib.get_close_matches(word, names, n=1, cutoff=0.7)]
    return f": did you mean {' '.join(found)}?" if found else ""


def _is_closed_pipe(error: BaseException) -> bool:
    """Return whether the reader of the output is gone. The C library of Windows calls that an invalid argument."""
    return isinstance(error, BrokenPipeError) or (
        sys.platform == "win32"
        and isinstance(error, OSError)
        and error.errno == errno.EINVAL
        and error.filename in (None, str(STDOUT))
    )


def _run(arguments: Sequence[str]) -> int:
    try:
        options = _parse(attend.complete_causal(arguments))
    except SystemExit as stop:  # argparse has printed the message
        return stop.code if isinstance(stop.code, int) else 2
    if options.command in COMMANDS:
        return COMMANDS[options.command].run(options) or 0
    if options.command == "info":
        with errors_name(STDOUT):
            info.run()
    else:
        with errors_name(STDOUT):
            walk.run()
            print(info.measure(), walk.NEXT, sep="\n\n", flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        finish(sys.stdout)
        return code
    except InputError as error:
        tell(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        tell("interrupted; nothing was written")
        return 130
    except (OSError, MemoryError) as error:
        with contextlib.suppress(OSError):
            finish(sys.stdout)
        if not _is_closed_pipe(error):  # as in `python -m cattn | head`
            tell(f"error: {str(error) or 'out of memory'}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
