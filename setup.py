"""Packaging of megalite; tool settings live in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def version() -> str:
    """The version, read without importing the package (which would need torch)."""
    found = re.search(r'^__version__ = "([^"]+)"', (HERE / "megalite" / "__init__.py").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError("megalite/__init__.py defines no __version__")
    return found[1]


# Formats of text and tokenizers that only some users have.
TEXT = ["pyarrow", "zstandard", "tokenizers", "tiktoken", "gigatoken"]
TEST = ["pytest>=8", "pytest-xdist", "hypothesis", "transformers>=4.50", "build", "setuptools>=77", *TEXT]
DEV = ["ruff", "basedpyright", "import-linter"]

setup(
    name="megalite",
    version=version(),
    description="Megatron-style training of large transformers: any parallel layout, the same result.",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    # megalite/kernels is a symlink to kernels/: find_packages follows it, so the kernels land in wheel and sdist.
    packages=find_packages(include=["megalite", "megalite.*"]),
    package_data={"megalite": ["py.typed"], "megalite.kernels.triton": ["*.csv"]},
    install_requires=[
        "torch>=2.9",
        # The CUDA build of torch asks for one exact triton, so no version that could contradict it is named here.
        'triton>=3.5; platform_system == "Linux" and (platform_machine == "x86_64" or platform_machine == "aarch64")',
        "numpy",
        "sentencepiece",
        "safetensors",
        "fsspec",
        "jinja2",
        "tyro>=0.9",
        "PyYAML",
        "rich",
        "tensorboard",
        "matplotlib",
    ],
    # NVIDIA apex is not on PyPI (the package of that name there is another one): see README.md.
    extras_require={
        "flash": ["flash-attn"],
        "s3": ["s3fs"],
        "gcs": ["gcsfs"],
        "eval": ["lm-eval"],
        "text": TEXT,
        "test": TEST,
        "dev": DEV,
    },
    classifiers=["Programming Language :: Python :: 3", "Operating System :: POSIX :: Linux"],
)
