"""Runs a file under Triton's interpreter and prints what its function `in_interpreter` returns, if it has one, as JSON:
`python interpreted.py FILE`, with TRITON_INTERPRET=1.

It takes half the time so, for the same results. As it is, the interpreter looks through all of triton.language at every
call of a kernel or of a function within one, for what it has to patch: the names are always the same, and here they are
looked up once. It computes every sum of integers a second time in int64, for an assertion that it makes only with
`debug`, which it never sets.
"""

import dataclasses
import functools
import gc
import inspect
import json
import runpy
import sys
from pathlib import Path

from triton import language
from triton.runtime import interpreter

np_dtype = interpreter._get_np_dtype
of_scalar = functools.cache(np_dtype)


def numpy_type(dtype):
    """Of a number's type, which has a hash; a block's has none."""
    return of_scalar(dtype) if type(dtype) is language.dtype else np_dtype(dtype)


def hasten() -> None:
    """Triton 3.6's interpreter; another version with other inner names runs as it is."""
    gc.freeze()  # what is imported stays; to look through it for garbage takes longer than a small kernel
    if list(inspect.signature(interpreter._patch_builtin).parameters) != ["pkg", "builder", "scope"]:
        return
    places = (language, language.core, language.math, language.tensor, language.core.tensor_descriptor_base)
    builtin = language.core.is_builtin
    names = {place: [name for name, member in inspect.getmembers(place) if builtin(member)] for place in places}
    usual = interpreter._patch_builtin

    def patch_builtin(place, builder, scope):
        if place not in names:
            return usual(place, builder, scope)
        for name in names[place]:
            member = getattr(place, name)
            if builtin(member):  # not patched yet by an outer call
                interpreter._patch_attr(place, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin
    interpreter._get_np_dtype = numpy_type
    for builder in (interpreter.interpreter_builder, interpreter.interpreter_semantic.builder):
        if not builder.options.debug:
            builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


if __name__ == "__main__":
    hasten()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).parent))
    names = runpy.run_path(sys.argv[0], run_name="__main__")
    if "in_interpreter" in names:
        print(json.dumps(names["in_interpreter"]()))
