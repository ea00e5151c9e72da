"""Builds the native library with the packages; all else is in pyproject.toml."""

import shutil
from glob import glob
from pathlib import Path

import build_backend  # pallas_kernels/native/build_backend.py, by pyproject.toml's backend-path
from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


class BuildNative(build_ext):
    """Builds in place, so that Python in a clone has it too, and copies it into a wheel."""

    def run(self):
        """See `build_backend`. A failure is a warning, and goes into the wheel as well.

        `--plat-name` chooses a target, for which a failure is an error.
        """
        if self.editable_mode:
            self.build_in_place(build_backend.own_levels())
            return
        folder = Path(self.build_lib, "pallas_kernels/native")
        folder.mkdir(parents=True, exist_ok=True)
        for old in build_backend.built(folder):
            old.unlink()
        wheel = self.get_finalized_command("bdist_wheel")
        if not wheel.plat_name_supplied:
            self.build_in_place()
            for made in build_backend.built():
                shutil.copy2(made, folder)
        elif target := build_backend.TARGETS.get(wheel.plat_name):
            build_backend.build(folder, target=target)
        else:
            known = ", ".join(build_backend.TARGETS)
            raise ValueError(f"--plat-name must be one of {known}, got {wheel.plat_name!r}")

    def build_in_place(self, chosen=()):
        """Builds these sets of instructions; without them all."""
        if reason := build_backend.try_build(chosen):
            self.warn(f"stree-jax's native library is not built, so XLA runs instead: {reason}")

    def get_outputs(self):
        """Nothing that an editable install could look for."""
        return []

    def get_output_mapping(self):
        """See `get_outputs`."""
        return {}


class PlatformWheel(bdist_wheel):
    """One wheel for each platform: the library does not know Python's ABI."""

    def get_tag(self):
        """Such as py3-none-manylinux_2_28_x86_64."""
        return "py3", "none", super().get_tag()[2]


setup(
    packages=[*find_packages(include=["pallas_kernels*", "stree_jax*"]), "stree_jax.convert"],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
    ext_modules=[
        Extension(
            "pallas_kernels.native.libstree",
            sources=sorted(glob("pallas_kernels/*/*.cc")),
            depends=sorted(glob("pallas_kernels/*/*.h")),
        )
    ],
)
