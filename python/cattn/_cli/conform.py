"""``python -m cattn conform``: what another attention holds of cattn's laws."""

import argparse
import os
import sys

from cattn._cli.files import STDOUT, Command, InputError
from cattn._cli.messages import encodable, tell
from cattn.nn._files import errors_name, printable
from cattn.testing._conform import Law, conform, find_function, table

# What is tried without a name, by the headings of the README's table.
USUAL = {
    "cattn": "cattn:scaled_dot_product_attention",
    "PyTorch": "torch.nn.functional:scaled_dot_product_attention",
    "JAX": "jax.nn:dot_product_attention",
    "onnxruntime": "onnxruntime:Attention",
    "NumPy by hand": "cattn._cli.info:textbook",
}

_DESCRIPTION = """\
Calls attention functions on the vectors and on arrays made for each law, and prints what holds. Below the table stands
the first number that differs. The exit code is 0 if all laws hold that a function can be asked for, and 1 if not.

  cattn conform my_model.layers:attention
  cattn conform torch.nn.functional:scaled_dot_product_attention jax.nn:dot_product_attention
  cattn conform                   cattn's own, and those of PyTorch, JAX, onnxruntime and NumPy by hand

A function takes query, key and value, of NumPy or PyTorch, and options by the names that cattn or PyTorch gives them.
It is not asked for an option that it lacks. onnxruntime:Attention is the operator."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add = parser.add_argument
    add(
        "functions", nargs="*", metavar="MODULE:FUNCTION", help="what to call; a module of this directory, or installed"
    )
    add("--is-causal", action="store_true", help="the functions are causal by themselves")
    add("--bits", action="store_true", help="also ask for the bits of the vectors, as for a port of cattn")


def _run(options: argparse.Namespace) -> int:
    """Carry out the command."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found: dict[str, list[Law]] = {}
    for heading, name in ({name: name for name in options.functions} or USUAL).items():
        try:
            found[heading] = conform(find_function(name), is_causal=options.is_causal, bits=options.bits)
        except ModuleNotFoundError as error:
            if options.functions:
                raise InputError(f"{name}: there is no module {error.name}") from error
            tell(f"{heading} is left out: there is no module {error.name}")
        except (ValueError, TypeError) as error:
            raise InputError(f"{name}: {error}") from error
        except (Exception, SystemExit) as error:
            raise InputError(f"{name}: importing it raised {type(error).__name__}: {error}") from error
    with errors_name(STDOUT):
        print("\n".join(encodable(printable(line)) for line in table(found).splitlines()))
    every = [law.holds for laws in found.values() for law in laws]
    return int(False in every or True not in every)


CONFORM = Command("what another attention holds of cattn's laws", _DESCRIPTION, (), _add_arguments, _run)
