"""Package metadata. Tool settings live in pyproject.toml."""

from setuptools import find_packages, setup

LINT = ["ruff", "mypy", "import-linter"]
TEST = ["pytest", "pytest-xdist", "hypothesis", "scipy", "simpy", *LINT]

setup(
    name="deepinfer-jax",
    version="0.1.0",
    description="LLM inference in JAX: the DeepSeek-V4.1 model, and a simulator of its service.",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(
        include=[
            "deepinfer_jax",
            "deepinfer_jax.*",
            "pallas_kernels",
            "pallas_kernels.*",
            "experiments",
            "experiments.*",
        ]
    ),
    install_requires=[
        "jax>=0.10.2",
        "numpy",
        "ml_collections",
        "absl-py",
        "matplotlib",
        # weights in and out
        "safetensors",
        "orbax-checkpoint",
        # the tiny model: its training and its vocabulary
        "flax",
        "optax",
        "tokenizers",
        "tqdm",
        # images of prompts
        "pillow",
        # structured output
        "llguidance",
    ],
    extras_require={
        "test": TEST,
        # Independent implementations of the model. nemo-automodel and mlx-lm pin other versions of
        # their dependencies than the ones they agree on here, so they are installed on top with
        #   pip install --no-deps nemo-automodel==0.7.0 mlx-lm==0.32.2
        "oracle": [
            "torch==2.13.0",
            "transformers==5.24.0",
            "safetensors",
            "pillow",
            "mlx[cpu]==0.32.4",
        ],
        "tpu": ["jax[tpu]"],
        "cuda": ["jax[cuda13]"],
        "serve": [],  # filled by the first module that talks HTTP; nothing here does yet
    },
)
