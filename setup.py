"""Build the compiled modules (see protocol/process/compiled.py).

If there is no compiler, or Python's headers are missing, setuptools says so and installs the rest.
"""

import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
from protocol.process.compiled import checksum, sources  # noqa: E402

MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in ("model_worker", "protocol", "supervisor")
    for path in (ROOT / package).rglob("*.pyx")
)

extensions = cythonize(
    [
        Extension(
            name,
            [f"{name.replace('.', '/')}.pyx"],
            depends=[str(path.relative_to(ROOT)) for path in sources(name)],
            define_macros=[("MODELCTL_SOURCES", f"{checksum(name)}u")],
            extra_compile_args=["-O2", "-g0"],
        )
        for name in MODULES
    ],
    build_dir="build",
    language_level=3,
    compiler_directives={"boundscheck": True, "wraparound": False},
)
for extension in extensions:
    extension.optional = True  # cythonize makes new ones, without what it does not know
setup(ext_modules=extensions, options={"build_ext": {"parallel": len(extensions)}})
